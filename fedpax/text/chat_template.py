"""ChatTemplate: a Jinja template that writes a list of chat messages as one text."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpax.errors import ArgumentError, MissingPackageError
from fedpax.files import read_file, read_json
from fedpax.text.tokenizer_json import token_name
from fedpax.user_paths import expand_home

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    Attributes:
        text: the Jinja template.
        render: `(messages, add_generation_prompt) -> text`. A message is a dict with `role` and
            `content`. `add_generation_prompt` adds the beginning of an answer.
    """

    text: str
    render: Callable[[Messages, bool], str] = dataclasses.field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """A checksum of the text, which identifies the template."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def find_chat_template(path: str | Path) -> ChatTemplate | None:
    """Return the chat template in a model's folder, or beside a tokenizer's file."""
    folder = expand_home(str(path))
    folder = folder if folder.is_dir() else folder.parent
    config = folder / CONFIG_FILE
    entries = _entries(config)
    if (file := folder / TEMPLATE_FILE).is_file():
        return _compile(_text(file), entries, str(file))
    text = entries.get("chat_template") if isinstance(entries, dict) else None
    if isinstance(text, list):  # several templates by name
        named = [item for item in text if isinstance(item, dict) and item.get("name") == "default"]
        text = named[-1].get("template") if named else None
    return None if text is None else _compile(text, entries, str(config))


def load_chat_template(path: str | Path) -> ChatTemplate:
    r"""Load a chat template.

    Templates run in Jinja's sandbox, with the functions and variables of `transformers`.

    Args:
        path: a Jinja file, or a model's folder with chat_template.jinja or tokenizer_config.json.

    Raises:
        FileNotFoundError: there is no such file, or the folder has no template.
        ImportError: Jinja is not installed: it comes with the extra `tokenizers`.
        ValueError: the template is damaged.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "chat.jinja"
        >>> text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        >>> _ = path.write_text(text)
        >>> template = load_chat_template(path)
        >>> template.render([{"role": "user", "content": "1 + 1?"}], False)
        '<user>1 + 1?\n'
    """
    file = expand_home(str(path))
    if file.is_dir():
        template = find_chat_template(file)
    elif file.is_file():
        template = _compile(_text(file), _entries(file.with_name(CONFIG_FILE)), str(file))
    else:
        template = None
    if template is None:
        raise FileNotFoundError(
            f"chat_template={str(path)!r} is neither a file nor a folder with {TEMPLATE_FILE} or "
            f"an entry chat_template in {CONFIG_FILE}. Pass the path of a Jinja file."
        )
    return template


def _entries(config: Path) -> Any:
    """Read tokenizer_config.json; an empty dict if there is none."""
    try:
        return read_json(config) if config.is_file() else {}
    except ValueError as error:
        raise ArgumentError(
            f"{config} is damaged ({error}), expected the JSON of a tokenizer. Restore it."
        ) from error


def _text(file: Path) -> str:
    try:
        return read_file(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"{file} is not UTF-8 ({error}), expected a Jinja template. Save it in UTF-8."
        ) from error


def _compile(text: Any, entries: Any, source: str) -> ChatTemplate:
    if not isinstance(text, str):
        raise ArgumentError(
            f"{source}: chat_template is {text!r:.100}, expected a text. Correct it, or pass "
            "another one with data.chat_template."
        )
    try:
        import jinja2
        from jinja2.ext import Extension, LoopControlExtension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingPackageError(
            'A chat template needs an extra: pip install "fedpax[tokenizers]".'
        ) from error

    class Generation(Extension):
        """Accept the tag `generation`, which marks answers; they are found without it."""

        tags = {"generation"}  # noqa: RUF012, the name and type are Jinja's

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    names = entries.items() if isinstance(entries, dict) else ()
    tokens = {
        entry: name
        for entry, value in names
        if entry.endswith("_token") and isinstance(name := token_name(value), str)
    }
    try:
        compiled = environment.from_string(text)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ArgumentError(
            f"{source}: the chat template is damaged ({error}). Correct it, or pass another one "
            "with data.chat_template."
        ) from error

    def render(messages: Messages, add_generation_prompt: bool) -> str:
        try:
            return compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **tokens,
            )
        except Exception as error:  # a template can divide by zero, call itself, or add a text
            raise ArgumentError(
                f"{source}: the chat template raises for the messages {list(messages)!r:.300}: "
                f"{str(error) or type(error).__name__}. Correct the messages, or pass another "
                "template with data.chat_template."
            ) from error

    return ChatTemplate(text, render)

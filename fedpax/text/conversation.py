"""Conversation: examples that are prompts with answers, where the loss is on answers alone."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpax.errors import ArgumentError
from fedpax.sources.source import get_field
from fedpax.text.chat_template import ChatTemplate, Messages
from fedpax.text.packing import Document
from fedpax.text.tokenizer import Tokenizer, as_string

_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names


class _Piece(NamedTuple):
    """A part of a conversation's text."""

    text: str
    is_answer: bool


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The fields of an example with a prompt and its answer, or with a list of chat messages.

    The `field` of `token_rounds` and `heldout_token_batches`; the loss is on answers alone.

    With a chat template, the document is the text that the template writes. Targets are what
    follows the template's generation prompt, up to the token that ends the turn. A message that
    spells a special token raises. Without a template, the document is the prompt directly followed
    by the answer, and targets are the answer and the separator behind it.

    Args:
        prompt: the field with the prompt, a text.
        answer: the field with the answer, a text.
        messages: the field with the messages, in place of `prompt` and `answer`: a list of dicts
            with `role` and `content`, or with `from` and `value` (ShareGPT; "human" is "user", and
            "gpt" is "assistant"). The answers are the messages of "assistant".
        template: the chat template, from `load_chat_template`. Needed for `messages`.

    Raises:
        ValueError: neither both of `prompt` and `answer` nor `messages` are given, or `messages`
            without a template.

    Example:
        >>> from fedpax.data import heldout_token_batches
        >>> source = [{"question": "1+1=", "reply": "2"}]
        >>> field = Conversation("question", "reply")
        >>> (batch,) = heldout_token_batches(source, batch_size=1, seq_len=6, field=field)
        >>> batch["targets"][0].tolist()
        [49, 43, 49, 61, 50, 255]
        >>> batch["mask"][0].tolist()
        [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    """

    prompt: str | None = None
    answer: str | None = None
    messages: str | None = None
    template: ChatTemplate | None = None

    def __post_init__(self) -> None:
        pair = (self.prompt is not None) + (self.answer is not None)
        if pair == 1 or (pair == 2) == (self.messages is not None):
            raise ArgumentError(
                f"prompt={self.prompt!r}, answer={self.answer!r} and messages={self.messages!r}, "
                "expected both prompt and answer, or messages alone. Name these fields."
            )
        if self.messages is not None and self.template is None:
            raise ArgumentError(
                f"The messages in the field {self.messages!r} need a chat template, but the "
                "tokenizer has none. Pass one: --data.chat_template=FILE, in Python "
                "template=load_chat_template(FILE)."
            )

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of an example that are read."""
        return tuple(f for f in (self.prompt, self.answer, self.messages) if f is not None)

    def __str__(self) -> str:
        written = "none" if self.template is None else self.template.name
        return f"conversation {', '.join(self.fields)} with the template {written}"

    def encode(self, examples: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[Document]:
        """Encode examples, in the fastest way that the tokenizer has."""
        special = re.compile(
            "|".join(sorted(map(re.escape, tokenizer.special), key=len, reverse=True)) or "(?!)"
        )
        pieces = [self._pieces(example, special) for example in examples]
        if self.template is None:
            texts = [piece.text for example in pieces for piece in example]
            encoded = iter(tokenizer.encode_all(texts))
            return [_without_template([next(encoded) for _ in example]) for example in pieces]
        texts = [text for ps in pieces for p in ps for text in special.split(p.text) if text]
        encoded = iter(tokenizer.encode_all(texts))
        documents = []
        for example in pieces:
            parts: list[Any] = []
            is_answer: list[bool] = []
            for piece in example:
                names = [*special.findall(piece.text), None]
                for text, name in zip(special.split(piece.text), names, strict=True):
                    parts += [next(encoded)] if text else []
                    parts += [] if name is None else [np.array([tokenizer.special[name]])]
                is_answer += [piece.is_answer] * (sum(map(len, parts)) - len(is_answer))
            tokens = np.concatenate(parts).astype(np.int32)
            targets = np.array([*is_answer[1:], False])
            documents.append(Document(tokens[1:], targets, first=int(tokens[0])))
        return documents

    def encode_prompt(
        self, prompt: str, tokenizer: Tokenizer
    ) -> tuple[NDArray[np.int32], list[int]]:
        """Encode a user's message up to its answer; return also the token that ends answers."""
        pair = dataclasses.replace(self, prompt="prompt", answer="answer", messages=None)
        (document,) = pair.encode([{"prompt": prompt, "answer": "."}], tokenizer)
        tokens = np.array([document.first, *document.tokens], np.int32)
        is_answer = np.array([False, *document.is_target[:-1]])
        ends = [int(tokens[is_answer][-1])]
        ends = [token for token in ends if token in tokenizer.special.values()]
        return tokens[: int(np.argmax(is_answer))], ends

    def _pieces(self, example: Mapping[str, Any], special: re.Pattern[str]) -> list[_Piece]:
        if self.messages is None:
            prompt, answer = (_text(example, field) for field in self.fields)
            if self.template is None:
                return [_Piece(prompt, False), _Piece(answer, True)]
            messages = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
        else:
            messages = _messages(example, self.messages)
        assert self.template is not None  # `messages` need one
        _check_special(messages, special)
        return _answers(self.template, messages, special)


def _without_template(parts: list[Any]) -> Document:
    prompt, answer = parts
    is_target = np.arange(len(prompt) + len(answer) + 1) >= len(prompt)
    return Document(np.concatenate([prompt, answer]), is_target)


def _answers(template: ChatTemplate, messages: Messages, special: re.Pattern[str]) -> list[_Piece]:
    """Divide the text of a conversation into answers and the text between them."""
    whole, done, pieces = template.render(messages, False), 0, []
    for content in (m.get("content") for m in messages):
        if content and not isinstance(content, str) and str(content) in whole:
            raise ArgumentError(
                f"The chat template writes the parts {content!r:.200} of a message as Python does, "
                "expected a text: it has no rule for parts. Join their texts, or pass another "
                "template with data.chat_template."
            )
    if any(map(_calls, messages)):
        _check_calls(template, messages, whole)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:number], True)
        after = template.render(messages[: number + 1], False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise ArgumentError(
                f"The chat template writes message {number} of {list(messages)!r:.200} in another "
                "way if others follow, or not behind its generation prompt: the answers cannot be "
                "found. Pass a template without this property with data.chat_template."
            )
        answer = after[len(before) :]
        # The space behind the token that ends the turn is the template's, not the model's.
        end = answer.rstrip()
        if not any(end.endswith(name) for name in special.findall(end)[-1:]):
            end = answer
        pieces += [_Piece(before[done:], False), _Piece(end, True)]
        done = len(before) + len(end)
    return [piece for piece in (*pieces, _Piece(whole[done:], False)) if piece.text]


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, list | tuple | np.ndarray) else []


def _check_calls(template: ChatTemplate, messages: Messages, whole: str) -> None:
    """Raise if the template leaves out the calls of tools."""
    without = [{key: x for key, x in m.items() if key != "tool_calls"} for m in messages]
    try:
        written = template.render(without, False)
    except ArgumentError:  # it needs them
        return
    if written == whole:
        calls = next(filter(None, map(_calls, messages)))
        raise ArgumentError(
            f"The chat template does not write the tool_calls {calls!r:.200} of a message. Leave "
            "out such examples, or pass a template with a rule for tool_calls with "
            "data.chat_template."
        )


def _text(example: Mapping[str, Any], field: str) -> str:
    value = get_field(example, field)
    if not isinstance(value, str | bytes):
        raise ArgumentError(
            f"The field {field!r} of an example is {value!r:.80}, expected a text. Read "
            f"numbers and dates as texts with --data.types {field}=string, in Python types="
            f"{{{field!r}: 'string'}}; leave out examples without one, or name another field."
        )
    return as_string(value)


def _messages(example: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    value = get_field(example, field)
    expected = (
        "expected a list of dicts with 'role' and 'content', or 'from' and 'value', at least one "
        "of the role 'assistant'"
    )
    messages = list(value) if isinstance(value, list | tuple | np.ndarray) else []
    messages = [with_role(m) if isinstance(m, Mapping) else m for m in messages]
    valid = all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages)
    if not valid or "assistant" not in [m["role"] for m in messages]:
        is_text = isinstance(value, str | bytes)
        remedy = "Parse the JSON" if is_text else "Leave out this example, or rename the keys"
        raise ArgumentError(
            f"The field {field!r} of an example is {value!r:.300}, {expected}. {remedy}."
        )
    for m in messages:
        if m["role"] == "assistant" and m["content"] is None and not _calls(m):
            raise ArgumentError(
                f"A message in the field {field!r} of an example is {dict(m)!r:.300}, expected a "
                "text as 'content', because the loss is on this answer. Leave out this example."
            )
        if not isinstance(m["role"], str) or not _is_content(m["content"]):
            raise ArgumentError(
                f"A message in the field {field!r} of an example is {dict(m)!r:.300}, expected "
                "texts as 'role' and 'content': a template would write another value as Python "
                "does. Convert it, or leave out this example."
            )
    # Arrow gives every message the keys of all messages.
    return [{key: x for key, x in m.items() if x is not None} for m in messages]


def with_role(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a message of ShareGPT's form the keys `role` and `content`."""
    if not {"from", "value"} <= message.keys() or message.get("role") is not None:
        return message
    others = {key: x for key, x in message.items() if key not in ("from", "value")}
    role = message["from"]
    return {
        **others,
        "role": _ROLES.get(role, role) if isinstance(role, str) else role,
        "content": message["value"],
    }


def _is_content(value: Any) -> bool:
    """Return whether a template can write a message's content: a text, its parts, or nothing."""
    if isinstance(value, list | tuple | np.ndarray):
        return all(isinstance(part, Mapping) for part in value)
    return value is None or isinstance(value, str)


def _check_special(messages: Messages, special: re.Pattern[str]) -> None:
    for message in messages:
        # Also in the role, or in another key that the template writes.
        matches = (special.search(str(value)) for value in message.values())
        if match := next(filter(None, matches), None):
            raise ArgumentError(
                f"A message ({dict(message)!r:.120}) spells {match.group()!r}, a special "
                "token. Remove it from the message: it would be read as the end or the beginning "
                "of a message."
            )

"""The token that ends a document, as a tokenizer's folder names it."""

from pathlib import Path
from typing import Any

from fedpax.errors import ArgumentError
from fedpax.files import read_json
from fedpax.text.vocabulary import Vocabulary

# The files of a Hugging Face folder that name the token, with the entry, in order of preference.
SOURCES = {
    "tokenizer_config.json": "eos_token",
    "config.json": "eos_token_id",
    "generation_config.json": "eos_token_id",
}
_REMEDY = "Name the token with data.end_of_document, in Python with end_of_document=."


def end_of_document(path: Path, vocabulary: Vocabulary, given: str | None) -> int:
    """Return the token that ends a document: `given`, or as the files beside `path` name it."""
    if given is not None:
        return _token(vocabulary, given, f"end_of_document={given!r}")
    if (named := named_end(path)) is not None:
        file, value = named
        return _token(vocabulary, value, f"{file}: {SOURCES[file.name]}={value!r}")
    if vocabulary.end is None:
        known = ", ".join(vocabulary.special) or "none"
        raise ArgumentError(
            f"tokenizer={str(path)!r} does not say which token ends a document, expected one "
            f"special token or {', '.join(SOURCES)} beside it. Its special tokens: {known}. "
            f"{_REMEDY}"
        )
    return vocabulary.end


def named_end(path: Path) -> tuple[Path, str | int] | None:
    """Return the file beside a tokenizer that names the token that ends a document; its name."""
    for name, entry in SOURCES.items():
        if (file := path.with_name(name)).is_file():
            value = token_name(_entries(file).get(entry))
            if value is not None:
                return file, value
    return None


def _entries(file: Path) -> dict[str, Any]:
    try:
        entries = read_json(file)
    except PermissionError:
        raise
    except (ValueError, OSError) as error:
        raise ArgumentError(
            f"{file}, which can name the token that ends a document, cannot be read ({error}). "
            f"Correct the file. {_REMEDY}"
        ) from error
    return entries if isinstance(entries, dict) else {}


def token_name(value: Any) -> Any:
    """Return a token's name or number: some files have several, or an object with the name."""
    if isinstance(value, list):
        return value[0] if value else None
    return value.get("content") if isinstance(value, dict) else value


def _token(vocabulary: Vocabulary, value: Any, source: str) -> int:
    """Return a token by its name or number."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number and 0 <= value < vocabulary.size and vocabulary.name(value) is not None:
        return int(value)
    token = vocabulary.token(value) if isinstance(value, str) else None
    if token is None:
        raise ArgumentError(
            f"{source} is not a token of the vocabulary, expected the token that ends a document. "
            f"{_REMEDY}"
        )
    return token

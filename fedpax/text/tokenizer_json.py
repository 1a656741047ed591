"""Vocabularies: bytes, and the tokens of a tokenizer's files with the end of a document.

The separator of bytes is 0xFF, which UTF-8 never uses (RFC 3629, section 1).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import UInt8
from numpy.typing import ArrayLike

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.files import parse_json, read_json
from fedpax.primitives.casts import checked_cast

VOCAB_SIZE = 256
"""The number of tokens: one for each byte value."""

SEPARATOR = 0xFF
"""The token before and after every document."""


def encode(text: str | bytes) -> UInt8[np.ndarray, " bytes"]:
    """Encode a text as byte tokens.

    Returns:
        uint8 `[bytes]`, read-only and without separators.

    Raises:
        TypeError: `text` is neither a string nor bytes.
        ValueError: the bytes contain the separator 0xFF, or the string half of a surrogate pair.

    Example:
        >>> encode("né").tolist()
        [110, 195, 169]
    """
    if isinstance(text, str):
        try:
            text = text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(
                f"A text ({text[:60]!r}) has half of a surrogate pair at {error.start}, expected "
                "Unicode: read it again from its own encoding, or remove the character."
            ) from error
    if not isinstance(text, bytes):
        raise ArgumentTypeError(
            f"A text is of type {type(text).__name__} ({text!r:.60}), expected str or bytes: name "
            "the field of the examples that holds the text, or leave out such examples."
        )
    if (where := text.find(SEPARATOR)) >= 0:
        raise ArgumentError(
            f"Byte {where} of a text is 0xFF, so it is not UTF-8: decode it from its own encoding "
            "first."
        )
    return np.frombuffer(text, np.uint8)


def decode(tokens: ArrayLike) -> str:
    """Decode byte tokens to text.

    Args:
        tokens: integers from 0 to 255, of any shape; separators are skipped.

    Returns:
        The text, in which bytes that are not valid UTF-8 become U+FFFD.

    Raises:
        ValueError: a token is not a byte value.

    Example:
        >>> decode([SEPARATOR, 110, 195, 169, SEPARATOR])
        'né'
    """
    array = np.asarray(tokens)
    if array.size and (array.min() < 0 or array.max() >= VOCAB_SIZE):
        raise ArgumentError(
            f"tokens has values from {array.min()} to {array.max()}, expected bytes from 0 to "
            f"{VOCAB_SIZE - 1}: use a model with vocab_size={VOCAB_SIZE}."
        )
    flat = checked_cast(array, np.uint8, "tokens", "Decode integers.").ravel()
    return flat[flat != SEPARATOR].tobytes().decode(errors="replace")


# Every byte of UTF-8 but the null character, and characters that normalizers change.
_EVERY_BYTE = "".join(
    chr(code)
    for code in (*range(1, 0x100), *range(0x100, 0x110000, 0x3C1))
    if not 0xD800 <= code < 0xE000
)
_TEXTS = ("Two  words", " space \n\tline\n", "caf\u00e9 cafe\u0301 \ufb01 \uff21", _EVERY_BYTE)

SPACE = "\u2581"
"""The character by which SentencePiece, and a pre-tokenizer Metaspace, write a space."""


class Vocabulary(NamedTuple):
    """The tokens of a file, and functions between texts and tokens."""

    size: int  # the largest token + 1
    # Encodes several texts, on several cores, and adds no token and no character.
    encode: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[list[int]], str]  # returns the text of tokens below `size`
    # Returns the number of a token by its name; None if there is no such token.
    token: Callable[[str], int | None]
    # Returns the name of a token by its number; None if there is no such token.
    name: Callable[[int], str | None]
    # Tokens that stand for no text, by name, such as the one that ends a document.
    special: Mapping[str, int]
    end: int | None  # the token that ends a document, if the file itself says so


def changed_text(vocabulary: Vocabulary, texts: Sequence[str] = _TEXTS) -> tuple[str, str] | None:
    """Return a short text that its tokens do not give back, and what they give; None if all do."""
    for text in texts:
        try:
            decoded = vocabulary.decode(vocabulary.encode([text])[0])
        except Exception as error:  # a character without a token, where none stands for it
            decoded = str(error)
        if decoded != text:
            return text[:20], decoded[:80]
    return None


Entries: TypeAlias = dict[str, Any]
_LISTS = ("normalizers", "pretokenizers", "decoders")  # of a part of the type "Sequence"
_OTHER_PURPOSE = re.compile("(?<![a-z])(pad|padding|mask|unk|unknown|cls)(?![a-z])", re.IGNORECASE)


def read_tokenizer_json(content: str) -> Vocabulary:
    """Make the vocabulary of a `tokenizer.json`; errors have any type."""
    # Truncation, padding, dropout, and added tokens and characters are left out. So is the
    # normalizer where the tokens spell every text without it.
    entries = parse_json(content)
    for name in ("truncation", "padding", "post_processor"):
        entries[name] = None
    if "dropout" in entries["model"]:
        entries["model"]["dropout"] = None
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        entries[name] = _map_parts(entries.get(name), _without_prefix)
    if entries["decoder"] is None:
        entries["decoder"] = _decoder(entries)
    for added in entries.get("added_tokens") or ():  # no token takes the spaces beside it
        added["lstrip"] = added["rstrip"] = False
    plain = {**entries, "normalizer": _map_parts(entries["normalizer"], _spelling)}
    vocabulary = _vocabulary(plain)
    if changed_text(vocabulary) is not None:
        vocabulary = _vocabulary(entries)
    return vocabulary._replace(end=_end(vocabulary))


def _vocabulary(entries: Entries) -> Vocabulary:
    library = _library(entries)
    library.encode_special_tokens = True  # text that spells a special token is text
    unknown = _unknown(entries["model"])
    special = {
        added["content"]: added["id"]
        for added in entries.get("added_tokens") or ()
        if added["special"] and added["content"] != unknown
    }

    def encode(texts: Sequence[str]) -> list[list[int]]:
        # "fast": without the tokens' places in the text.
        encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    return Vocabulary(
        size=max(library.get_vocab().values(), default=-1) + 1,
        encode=encode,
        decode=lambda tokens: library.decode(tokens, skip_special_tokens=False),
        token=library.token_to_id,
        name=library.id_to_token,
        special=special,
        end=None,
    )


def _end(vocabulary: Vocabulary) -> int | None:
    """Return the only special token, unless its name says that it has another purpose."""
    if len(vocabulary.special) != 1:
        return None
    ((name, token),) = vocabulary.special.items()
    return None if _OTHER_PURPOSE.search(name) else token


def _library(entries: Entries) -> Any:
    """Make the library's tokenizer, with the numbers that the file gives to added tokens."""
    import tokenizers

    added = {token["content"]: token["id"] for token in entries.get("added_tokens") or ()}
    library = tokenizers.Tokenizer.from_str(json.dumps(entries))
    moved = {name: k for name, k in added.items() if library.token_to_id(name) != k}
    if not moved:
        return library
    # The library numbers added tokens without gaps, but keeps the numbers of the model's tokens.
    model, vocab = entries["model"], entries["model"]["vocab"]
    if isinstance(vocab, dict) and not moved.keys() & vocab.keys():
        changed = {**entries, "model": {**model, "vocab": vocab | moved}}
        library = tokenizers.Tokenizer.from_str(json.dumps(changed))
    for name, k in moved.items():
        if (token_id := library.token_to_id(name)) != k:
            raise ArgumentError(f"the added token {name!r} has id {k}, expected {token_id}")
    return library


def _unknown(model: Entries) -> str | None:
    """Return the name of the token for what has no other token."""
    if model.get("unk_id") is not None:
        return str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")


def _map_parts(part: Entries | None, change: Callable[[Entries], Entries | None]) -> Any:
    """Apply a function to a part, or to each of a sequence of parts; None removes a part."""
    if part is None or part["type"] != "Sequence":
        return None if part is None else change(part)
    (name,) = (name for name in _LISTS if name in part)
    parts = [changed for inner in part[name] if (changed := _map_parts(inner, change)) is not None]
    return {**part, name: parts} if parts else None


def _without_prefix(part: Entries) -> Entries | None:
    """Add and remove no character at the ends of a text."""
    match part["type"]:
        case "Prepend" | "Strip":
            return None
        case "Metaspace":
            kept = {name: x for name, x in part.items() if name != "add_prefix_space"}
            return kept | {"prepend_scheme": "never"}
        case "ByteLevel" if "add_prefix_space" in part:
            return part | {"add_prefix_space": False}
    return part


def _spelling(part: Entries) -> Entries | None:
    """Keep the normalizers that write a text's own characters in the vocabulary's alphabet."""
    writes_space = part["type"] == "Replace" and part["pattern"] == {"String": " "}
    return part if writes_space or part["type"] == "ByteLevel" else None


def _decoder(entries: Entries) -> Entries | None:
    """Return the decoder of a file that has none: the inverse of its way to write spaces."""
    decoders: list[Entries] = []

    def find(part: Entries) -> Entries:
        if part["type"] in ("ByteLevel", "Metaspace"):
            decoders.append(part)
        return part

    for name in ("normalizer", "pre_tokenizer"):
        _map_parts(entries[name], find)
    if not decoders:
        return None
    defaults = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return decoders[0] if decoders[0]["type"] == "Metaspace" else {**defaults, **decoders[0]}


# ---- the token that ends a document, as a tokenizer's folder names it

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

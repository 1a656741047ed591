"""The vocabulary of a `tokenizer.json`, without what the file stores for other purposes."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from fedpax.errors import ArgumentError
from fedpax.files import parse_json
from fedpax.text.vocabulary import Vocabulary, changed_text

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

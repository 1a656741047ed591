"""Tokenizers: bytes, or a subword vocabulary from a `tokenizer.json`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.data.text.tokens import SEPARATOR, VOCABULARY, decode, encode

# What published vocabularies call the token that ends a document, the first that there is.
END_OF_DOCUMENT = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eot_id|>")


class Tokenizer(NamedTuple):
    """What turns texts into tokens and back.

    Attributes:
        name: what decides the tokens: "bytes", or a file's name and checksum.
        vocabulary: how many tokens there are.
        separator: the token before and after every document.
        encode: takes a string, or bytes that are UTF-8, and returns integers [tokens].
        decode: takes integers of any shape and returns the text, without separators.
    """

    name: str
    vocabulary: int
    separator: int
    encode: Callable[[str | bytes], NDArray[Any]]
    decode: Callable[[ArrayLike], str]


BYTES = Tokenizer("bytes", VOCABULARY, SEPARATOR, encode, decode)
"""A token for each byte of UTF-8."""


def load_tokenizer(name: str) -> Tokenizer:
    """Loads a tokenizer.

    Args:
        name: "bytes", or the path of a `tokenizer.json`, as published beside many models and as
            `train_tokenizer` writes it. A file needs the extra `tokenizers`.

    Returns:
        The tokenizer.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the library that reads it is not installed.
        ValueError: the file is not a tokenizer, or has no token that ends a document.

    Example:
        >>> load_tokenizer("bytes").encode("né").tolist()
        [110, 195, 169]
    """
    if name == BYTES.name:
        return BYTES
    path = Path(name).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer={name!r}: there is no such file. Give the path of a tokenizer.json, or "
            "'bytes'."
        )
    content = path.read_bytes()
    try:
        library = _library().Tokenizer.from_str(content.decode())
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(
            f"tokenizer={name!r} is not a tokenizer.json ({error}). Give one, or 'bytes'."
        ) from error
    separator = next(
        (i for token in END_OF_DOCUMENT if (i := library.token_to_id(token)) is not None), None
    )
    if separator is None:
        raise ValueError(
            f"tokenizer={name!r} has no token that ends a document, none of "
            f"{', '.join(END_OF_DOCUMENT)}: add one of them to its special tokens."
        )
    vocabulary = library.get_vocab_size()
    narrow = np.uint16 if vocabulary <= 2**16 else np.int32

    def encode_text(text: str | bytes) -> NDArray[Any]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return np.asarray(library.encode(text, add_special_tokens=False).ids, narrow)

    def decode_tokens(tokens: ArrayLike) -> str:
        flat = np.asarray(tokens).ravel()
        return library.decode(flat[flat != separator].tolist(), skip_special_tokens=False)

    checksum = hashlib.sha256(content).hexdigest()[:16]
    return Tokenizer(f"{path.name}:{checksum}", vocabulary, separator, encode_text, decode_tokens)


def train_tokenizer(
    texts: Iterable[str | bytes], *, vocabulary: int, path: str | os.PathLike[str]
) -> Tokenizer:
    """Learns a byte-level subword vocabulary from texts and writes it as a `tokenizer.json`.

    Every text can be encoded, since all 256 bytes are tokens.

    Args:
        texts: strings, or bytes that are UTF-8.
        vocabulary: how many tokens there are to be at most, at least 257.
        path: the file to write.

    Returns:
        The tokenizer, as `load_tokenizer(path)` loads it.

    Raises:
        ImportError: the extra `tokenizers` is not installed.
        ValueError: a vocabulary below 257.

    Reference:
        Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units",
        arXiv:1508.07909, section 3.2.
    """
    if vocabulary <= VOCABULARY:
        raise ValueError(
            f"vocabulary={vocabulary} is too small: the {VOCABULARY} bytes and a separator take "
            f"{VOCABULARY + 1}. Use load_tokenizer('bytes') for no more than bytes."
        )
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_DOCUMENT[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    decoded = (t.decode(errors="replace") if isinstance(t, bytes) else t for t in texts)
    tokenizer.train_from_iterator(decoded, trainer)
    tokenizer.save(os.fspath(path))
    return load_tokenizer(os.fspath(path))


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            'A tokenizer.json needs the library that reads it: pip install "fedpax[tokenizers]", '
            "or use tokenizer='bytes'."
        ) from error
    return tokenizers

"""Tokenizers: bytes, or a subword vocabulary from a `tokenizer.json`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer
from numpy.typing import ArrayLike

from fedpax.data.text.byte_tokenizer import SEPARATOR, VOCAB_SIZE, decode, encode

# The names that published vocabularies give the end-of-document token, in order of preference.
END_OF_DOCUMENT = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eot_id|>")


class Tokenizer(NamedTuple):
    """A pair of functions between texts and tokens, with their vocabulary.

    Attributes:
        name: identifies the tokenizer: `"bytes"`, or a file's name and checksum.
        vocab_size: the number of tokens.
        separator: the token before and after every document.
        encode: takes a string or UTF-8 bytes, and returns integers `[tokens]`.
        decode: takes integers of any shape, and returns the text without separators.
    """

    name: str
    vocab_size: int
    separator: int
    encode: Callable[[str | bytes], Integer[np.ndarray, " tokens"]]
    decode: Callable[[ArrayLike], str]


BYTE_TOKENIZER = Tokenizer("bytes", VOCAB_SIZE, SEPARATOR, encode, decode)
"""The tokenizer with one token for each UTF-8 byte."""


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: `"bytes"`, or the path of a `tokenizer.json`, as published with many models and as
            written by `train_tokenizer`. Reading a file needs the extra `tokenizers`.

    Returns:
        The tokenizer.

    Raises:
        FileNotFoundError: the file does not exist.
        ImportError: the extra `tokenizers` is not installed.
        ValueError: the file is not a tokenizer, or has no end-of-document token.

    Example:
        >>> load_tokenizer("bytes").encode("né").tolist()
        [110, 195, 169]
    """
    if name == BYTE_TOKENIZER.name:
        return BYTE_TOKENIZER
    path = Path(name).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer={name!r}: there is no such file. Pass the path of a tokenizer.json, or "
            "'bytes'."
        )
    content = path.read_bytes()
    try:
        library = _library().Tokenizer.from_str(content.decode())
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(
            f"tokenizer={name!r} is not a tokenizer.json ({error}). Pass the path of one, or "
            "'bytes'."
        ) from error
    separator = next(
        (i for token in END_OF_DOCUMENT if (i := library.token_to_id(token)) is not None), None
    )
    if separator is None:
        raise ValueError(
            f"tokenizer={name!r} has no end-of-document token, expected one of "
            f"{', '.join(END_OF_DOCUMENT)}: add one to its special tokens."
        )
    vocab_size = library.get_vocab_size()
    dtype = np.uint16 if vocab_size <= 2**16 else np.int32

    def encode_text(text: str | bytes) -> Integer[np.ndarray, " tokens"]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return np.asarray(library.encode(text, add_special_tokens=False).ids, dtype)

    def decode_tokens(tokens: ArrayLike) -> str:
        flat = np.asarray(tokens).ravel()
        return library.decode(flat[flat != separator].tolist(), skip_special_tokens=False)

    checksum = hashlib.sha256(content).hexdigest()[:16]
    return Tokenizer(f"{path.name}:{checksum}", vocab_size, separator, encode_text, decode_tokens)


def train_tokenizer(
    texts: Iterable[str | bytes], *, vocab_size: int, path: str | os.PathLike[str]
) -> Tokenizer:
    """Train a byte-level byte-pair encoding (BPE) and write it as a `tokenizer.json`.

    It can encode every text, because all 256 bytes are tokens.

    Args:
        texts: strings or UTF-8 bytes.
        vocab_size: the largest number of tokens, at least 257.
        path: the file to write.

    Returns:
        The tokenizer, equal to `load_tokenizer(path)`.

    Raises:
        ImportError: the extra `tokenizers` is not installed.
        ValueError: `vocab_size` is below 257.

    Reference:
        Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units",
        arXiv:1508.07909, section 3.2.
    """
    if vocab_size <= VOCAB_SIZE:
        raise ValueError(
            f"vocab_size is {vocab_size}, expected at least {VOCAB_SIZE + 1} for the {VOCAB_SIZE} "
            "bytes and a separator. For bytes alone use load_tokenizer('bytes')."
        )
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    decoded = (t.decode(errors="replace") if isinstance(t, bytes) else t for t in texts)
    tokenizer.train_from_iterator(decoded, trainer)
    tokenizer.save(os.fspath(path))
    return load_tokenizer(os.fspath(path))


def _library() -> Any:
    """Import the library that reads a `tokenizer.json`."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            'Reading a tokenizer.json needs an extra: pip install "fedpax[tokenizers]", or use '
            "tokenizer='bytes'."
        ) from error
    return tokenizers

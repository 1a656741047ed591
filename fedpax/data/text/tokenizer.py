"""Tokenizers: bytes, or a subword vocabulary from a `tokenizer.json` or a SentencePiece model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedpax.data.text.byte_tokenizer import SEPARATOR, VOCAB_SIZE, decode, encode
from fedpax.data.text.packing import Tokens

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
        encode_batch: encodes several strings or UTF-8 bytes, on several cores. Default None: there
            is no faster way than `encode` for one after another.
    """

    name: str
    vocab_size: int
    separator: int
    encode: Callable[[str | bytes], Tokens]
    decode: Callable[[ArrayLike], str]
    encode_batch: Callable[[Sequence[str | bytes]], list[Tokens]] | None = None

    def encode_all(self, texts: Sequence[str | bytes]) -> list[Tokens]:
        """Encode several texts, in the fastest way.

        Args:
            texts: strings or UTF-8 bytes.

        Returns:
            Integers `[tokens]` for each text, equal to those of `encode`.

        Example:
            >>> [tokens.tolist() for tokens in BYTE_TOKENIZER.encode_all(["a", b"bc"])]
            [[97], [98, 99]]
        """
        if self.encode_batch is not None:
            return self.encode_batch(texts)
        return [self.encode(text) for text in texts]


BYTE_TOKENIZER = Tokenizer("bytes", VOCAB_SIZE, SEPARATOR, encode, decode)
"""The tokenizer with one token for each UTF-8 byte."""


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: `"bytes"`, or the path of a file: a `tokenizer.json`, as published with many models
            and as written by `train_tokenizer`, or a SentencePiece model (`tokenizer.model`), which
            normalizes texts, so decoding may not give back the text. Reading a file needs the extra
            `tokenizers`.

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
            f"tokenizer={name!r}: there is no such file. Pass the path of a tokenizer.json or of a "
            "SentencePiece model, or 'bytes'."
        )
    content = path.read_bytes()
    identity = f"{path.name}:{hashlib.sha256(content).hexdigest()[:16]}"
    is_json = content.lstrip()[:1] == b"{"  # a SentencePiece model is binary
    return (_from_json if is_json else _from_sentencepiece)(name, identity, content)


def _from_json(name: str, identity: str, content: bytes) -> Tokenizer:
    """Make the tokenizer of a `tokenizer.json`."""
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
    dtype = _smallest_dtype(vocab_size)

    def encode_text(text: str | bytes) -> Tokens:
        return np.asarray(library.encode(_as_string(text), add_special_tokens=False).ids, dtype)

    def encode_texts(texts: Sequence[str | bytes]) -> list[Tokens]:
        strings = [_as_string(text) for text in texts]
        encode_fast = library.encode_batch_fast  # without the tokens' places in the text
        return [np.asarray(x.ids, dtype) for x in encode_fast(strings, add_special_tokens=False)]

    def decode_tokens(tokens: ArrayLike) -> str:
        flat = np.asarray(tokens).ravel()
        return library.decode(flat[flat != separator].tolist(), skip_special_tokens=False)

    return Tokenizer(identity, vocab_size, separator, encode_text, decode_tokens, encode_texts)


def _from_sentencepiece(name: str, identity: str, content: bytes) -> Tokenizer:
    """Make the tokenizer of a SentencePiece model."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise ImportError(_needs_extra("a SentencePiece model")) from error
    try:
        if not content:
            raise ValueError("the file is empty")
        model = SentencePieceProcessor(model_proto=content)
        vocab_size, separator = model.get_piece_size(), model.eos_id()
    except Exception as error:
        raise ValueError(
            f"tokenizer={name!r} is neither a tokenizer.json nor a SentencePiece model ({error}). "
            "Pass the path of one, or 'bytes'."
        ) from error
    if separator < 0:
        raise ValueError(
            f"tokenizer={name!r} has no end-of-sentence token, which separates documents: train "
            "the SentencePiece model without eos_id=-1."
        )
    dtype = _smallest_dtype(vocab_size)

    def encode_text(text: str | bytes) -> Tokens:
        return np.asarray(model.encode(_as_string(text)), dtype)

    def encode_texts(texts: Sequence[str | bytes]) -> list[Tokens]:
        return [
            np.asarray(ids, dtype) for ids in model.encode([_as_string(text) for text in texts])
        ]

    def decode_tokens(tokens: ArrayLike) -> str:
        flat = np.asarray(tokens).ravel()
        return model.decode(flat[flat != separator].tolist())

    return Tokenizer(identity, vocab_size, separator, encode_text, decode_tokens, encode_texts)


def _as_string(text: str | bytes) -> str:
    if not isinstance(text, str | bytes):
        raise TypeError(
            f"A text is of type {type(text).__name__} ({text!r:.60}), expected str or bytes: name "
            "the field of the examples that holds the text."
        )
    return text.decode(errors="replace") if isinstance(text, bytes) else text


def _smallest_dtype(vocab_size: int) -> type[np.integer]:
    return np.uint16 if vocab_size <= 2**16 else np.int32


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
    tokenizer.train_from_iterator(map(_as_string, texts), trainer)
    tokenizer.save(os.fspath(path))
    return load_tokenizer(os.fspath(path))


def _library() -> Any:
    """Import the library that reads a `tokenizer.json`."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(_needs_extra("a tokenizer.json")) from error
    return tokenizers


def _needs_extra(file: str) -> str:
    return (
        f'Reading {file} needs an extra: pip install "fedpax[tokenizers]", or use '
        "tokenizer='bytes'."
    )

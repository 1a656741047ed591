"""Tokenizers: bytes, or a subword vocabulary from a `tokenizer.json` or a SentencePiece model."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedpax.errors import ArgumentError, ArgumentTypeError, FedpaxError, MissingPackageError
from fedpax.files import BYTE_ORDER_MARK, read_file
from fedpax.text.packing import Tokens
from fedpax.text.tokenizer_json import (
    SEPARATOR,
    SPACE,
    VOCAB_SIZE,
    Vocabulary,
    changed_text,
    decode,
    encode,
    read_tokenizer_json,
)
from fedpax.text.tokenizer_json import end_of_document as find_end
from fedpax.user_paths import expand_home

END_OF_DOCUMENT = "<|end_of_text|>"
"""The name of the end-of-document token that `train_tokenizer` gives."""
_MOST_TOKENS = 2**31


class Tokenizer(NamedTuple):
    """A pair of functions between texts and tokens, with their vocabulary.

    Attributes:
        name: identifies the tokenizer: `"bytes"`, or a file's name, checksum and separator.
        vocab_size: the number of tokens.
        separator: the token before and after every document.
        encode: takes a string or UTF-8 bytes, and returns integers `[tokens]`.
        decode: takes integers of any shape, and returns the text without separators.
        encode_batch: encodes several strings or UTF-8 bytes, on several cores. Default None:
            `encode` one after another.
        end_of_document: the separator's name in the vocabulary. Default None: it has no name.
        special: the tokens that stand for no text by name, such as the separator.
    """

    name: str
    vocab_size: int
    separator: int
    encode: Callable[[str | bytes], Tokens]
    decode: Callable[[ArrayLike], str]
    encode_batch: Callable[[Sequence[str | bytes]], list[Tokens]] | None = None
    end_of_document: str | None = None
    special: Mapping[str, int] = types.MappingProxyType({})

    def encode_all(self, texts: Sequence[str | bytes]) -> list[Tokens]:
        """Encode several texts as `encode` does, in the fastest way."""
        if self.encode_batch is not None:
            return self.encode_batch(texts)
        return [self.encode(text) for text in texts]


BYTE_TOKENIZER = Tokenizer("bytes", VOCAB_SIZE, SEPARATOR, encode, decode)
"""The tokenizer with one token for each UTF-8 byte."""


def load_tokenizer(name: str, *, end_of_document: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Tokens are of the text alone: the file's truncation, padding, dropout, added tokens and spaces
    have no effect, and a text that spells a special token has the tokens of these characters. A
    warning is logged if decoding does not give back a text.

    Args:
        name: `"bytes"`, or the path of a file: a `tokenizer.json`, as published with many models
            and as written by `train_tokenizer`, or a SentencePiece model (`tokenizer.model`).
            Reading a file needs the extra `tokenizers`.
        end_of_document: the name of the token that separates documents, such as "<|im_end|>".
            Default None: `eos_token` of the tokenizer_config.json beside the file, else
            `eos_token_id` of config.json or generation_config.json there, else the file's only
            special token.

    Raises:
        FileNotFoundError: the file does not exist.
        ImportError: the extra `tokenizers` is not installed.
        ValueError: the file is not a tokenizer, such as a Git LFS pointer, or its end-of-document
            token is not found.

    Example:
        >>> load_tokenizer("bytes").encode("né").tolist()
        [110, 195, 169]
    """
    if name == BYTE_TOKENIZER.name:
        if end_of_document is not None:
            raise ArgumentError(
                f"end_of_document={end_of_document!r} with tokenizer='bytes', expected None: byte "
                "255 separates documents. Leave it out."
            )
        return BYTE_TOKENIZER
    path = expand_home(name)
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer={name!r}: there is no such file. Pass the path of a tokenizer.json or of a "
            "SentencePiece model, or 'bytes'."
        )
    content = read_file(path).removeprefix(BYTE_ORDER_MARK)
    vocabulary = _read(name, content)
    if vocabulary.size > _MOST_TOKENS:
        raise ArgumentError(
            f"tokenizer={name!r} has a token {vocabulary.size - 1}, expected numbers below "
            f"{_MOST_TOKENS}: tokens are int32. Number the tokens anew."
        )
    if (changed := changed_text(vocabulary)) is not None:
        logging.getLogger(__name__).warning(
            "tokenizer=%r does not give back every text: %r becomes %r.", name, *changed
        )
    separator = find_end(path, vocabulary, end_of_document)
    identity = f"{path.name}:{hashlib.sha256(content).hexdigest()[:16]}:{separator}"
    return _tokenizer(identity, vocabulary, separator)


def _read(name: str, content: bytes) -> Vocabulary:
    is_json = content.lstrip()[:1] == b"{"  # a SentencePiece model is binary
    expected = "a tokenizer.json" if is_json else "a SentencePiece model"
    try:
        return read_tokenizer_json(content.decode()) if is_json else read_sentencepiece(content)
    except ImportError as error:
        raise MissingPackageError(_needs_extra(expected)) from error
    except Exception as error:  # the libraries raise several types
        difference = f"not {expected}" if is_json else f"neither a tokenizer.json nor {expected}"
        raise ArgumentError(
            f"tokenizer={name!r} is {difference} ({error}). Pass the path of one, or 'bytes'."
        ) from error


def _tokenizer(identity: str, vocabulary: Vocabulary, separator: int) -> Tokenizer:
    dtype = np.uint16 if vocabulary.size <= 2**16 else np.int32
    end = vocabulary.name(separator)
    special = {**vocabulary.special, str(end): separator}
    is_special = np.zeros(vocabulary.size, np.bool_)
    is_special[list(special.values())] = True
    # The place after the first character of a special token's name.
    inside = "|".join(
        f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in special if len(name) > 1
    )
    cut = re.compile(inside or "(?!)", re.IGNORECASE)  # a normalizer may write lower case

    # Vocabularies that write a space as this character read the character as a space.
    is_lost = changed_text(vocabulary, (SPACE,)) == (SPACE, " ")
    warned: list[str] = []

    def encode_text(text: str | bytes) -> Tokens:
        return encode_texts([text])[0]

    def encode_texts(texts: Sequence[str | bytes]) -> list[Tokens]:
        strings = [as_string(text) for text in texts]
        if is_lost and not warned and (found_in := next((t for t in strings if SPACE in t), "")):
            warned.append(found_in)
            logging.getLogger(__name__).warning(
                "A text (%r) has the character %r, which this tokenizer does not give back: "
                "it stands for a space.",
                found_in[:60],
                SPACE,
            )
        arrays = [np.asarray(tokens, dtype) for tokens in _encode(vocabulary, strings)]
        return [
            encode_parts(text) if is_special[tokens].any() else tokens
            for text, tokens in zip(strings, arrays, strict=True)
        ]

    def encode_parts(text: str) -> Tokens:
        """Encode a text that spells a special token, in parts that do not."""
        parts = _encode(vocabulary, cut.split(text))
        tokens = np.asarray(list(chain.from_iterable(parts)), dtype)
        if (wrong := tokens[is_special[tokens]]).size:
            raise ArgumentError(
                f"A text ({text[:60]!r}) spells {vocabulary.name(int(wrong[0]))!r}, a special "
                "token, and the vocabulary has no other tokens for it. Remove it from the text."
            )
        return tokens

    def decode_tokens(tokens: ArrayLike) -> str:
        flat = np.asarray(tokens).ravel()
        known = (flat != separator) & (flat < vocabulary.size)  # a model can have more tokens
        return vocabulary.decode(flat[known].tolist())

    return Tokenizer(
        identity,
        vocabulary.size,
        separator,
        encode_text,
        decode_tokens,
        encode_texts,
        end,
        special if end is not None else vocabulary.special,
    )


def _encode(vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts, or name the one that the vocabulary has no tokens for."""
    try:
        return vocabulary.encode(texts)
    except (FedpaxError, MemoryError):
        raise
    except Exception as error:  # the libraries raise several types
        if len(texts) > 1:
            return [tokens for text in texts for tokens in _encode(vocabulary, [text])]
        raise ArgumentError(
            f"A text ({texts[0][:60]!r}) has characters without a token ({error}), expected a "
            "vocabulary with tokens for all characters, or with one for unknown characters. Choose "
            "another tokenizer, or leave such texts out."
        ) from error


def as_string(text: str | bytes) -> str:
    """Return a text of str or bytes as str; tell once of bytes that are not UTF-8."""
    if not isinstance(text, str | bytes):
        raise ArgumentTypeError(
            f"A text is of type {type(text).__name__} ({text!r:.60}), expected str or bytes: name "
            "the field of the examples that holds the text, or leave out such examples."
        )
    if isinstance(text, str):
        return text
    try:
        return text.decode()
    except UnicodeDecodeError:
        string = text.decode(errors="replace")
        _tell_of_other_encoding(string[:60])
        return string


_told_of_other_encoding: list[str] = []


def _tell_of_other_encoding(text: str) -> None:
    if not _told_of_other_encoding:
        _told_of_other_encoding.append(text)
        logging.getLogger(__name__).warning(
            "A text (%r) has bytes that are not UTF-8: each of them is read as the character %r. "
            "Decode the texts from their own encoding first.",
            text,
            "\ufffd",
        )


def train_tokenizer(
    texts: Iterable[str | bytes], *, vocab_size: int, path: str | os.PathLike[str]
) -> Tokenizer:
    """Train a byte-level byte-pair encoding (BPE) and write it as a `tokenizer.json`.

    It can encode every text.

    Args:
        texts: strings or UTF-8 bytes.
        vocab_size: the largest number of tokens, at least 257.
        path: the file to write.

    Returns:
        The tokenizer, as of `load_tokenizer(path)`.

    Raises:
        ImportError: the extra `tokenizers` is not installed.
        ValueError: `vocab_size` is below 257.

    Reference:
        Sennrich et al., arXiv:1508.07909, section 3.2.
    """
    if vocab_size <= VOCAB_SIZE:
        raise ArgumentError(
            f"vocab_size is {vocab_size}, expected at least {VOCAB_SIZE + 1} for the {VOCAB_SIZE} "
            "bytes and a separator. For bytes alone use load_tokenizer('bytes')."
        )
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(as_string, texts), trainer)
    tokenizer.save(os.fspath(path))
    return load_tokenizer(os.fspath(path))


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingPackageError(_needs_extra("a tokenizer.json")) from error
    return tokenizers


def _needs_extra(file: str) -> str:
    return (
        f'Reading {file} needs an extra: pip install "fedpax[tokenizers]", or use '
        "tokenizer='bytes'."
    )


def read_sentencepiece(content: bytes) -> Vocabulary:
    """Make the vocabulary of a SentencePiece model; errors have any type."""
    # No space is added or removed. Texts are normalized only if the pieces need it to spell them.
    from sentencepiece import sentencepiece_model_pb2 as messages

    if not content:
        raise ArgumentError("the file is empty")
    model = messages.ModelProto.FromString(content)  # type: ignore[attr-defined]  # made at import
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    rules = model.normalizer_spec.precompiled_charsmap
    model.normalizer_spec.precompiled_charsmap = b""
    vocabulary = _vocabulary(model)
    if rules and changed_text(vocabulary) is not None:
        model.normalizer_spec.precompiled_charsmap = rules
        return _vocabulary(model)
    return vocabulary


def _vocabulary(model: Any) -> Vocabulary:
    from sentencepiece import SentencePieceProcessor

    library = SentencePieceProcessor(model_proto=model.SerializeToString())
    size = library.get_piece_size()

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return library.encode(list(texts))

    def name(token: int) -> str | None:
        return library.id_to_piece(token) if 0 <= token < size else None

    def token(piece: str) -> int | None:
        piece_id = library.piece_to_id(piece)  # of the unknown token for an unknown piece
        return piece_id if name(piece_id) == piece else None

    return Vocabulary(
        size=size,
        encode=encode,
        decode=library.decode,
        token=token,
        name=name,
        special={library.id_to_piece(k): k for k in range(size) if library.is_control(k)},
        end=library.eos_id() if library.eos_id() >= 0 else None,
    )

"""The vocabulary of a SentencePiece model, without the characters that the model adds."""

from collections.abc import Sequence
from typing import Any

from fedpax.errors import ArgumentError
from fedpax.text.vocabulary import Vocabulary, changed_text


def read_sentencepiece(content: bytes) -> Vocabulary:
    """Make the vocabulary of a SentencePiece model; errors have any type."""
    # No space is added before a text, and no spaces are removed. Texts are normalized only if the
    # pieces do not spell every text without it.
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

"""SentencePiece models, trained on Python sources."""

import contextlib
import io
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedpax.data import Tokenizer, load, load_tokenizer, token_rounds, train_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")


@pytest.fixture(scope="module")
def texts(data_dir: Path) -> list[bytes]:
    source = load("stdlib_text", "heldout", data_dir=data_dir)
    return [source[i]["text"] for i in range(10)]


def train(texts: list[bytes], path: Path, **options: Any) -> str:
    """Train a model of 400 pieces that keeps spaces and falls back to bytes."""
    lines = [line for text in texts for line in text.decode().splitlines() if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture(scope="module")
def trained(texts: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return load_tokenizer(train(texts, path))


# The library drops the null character, and writes U+2581 for a space.
@given(st.text(st.characters(exclude_characters="\0\u2581", exclude_categories=["Cs"])))
def test_decoding_inverts_encoding(trained: Tokenizer, text: str) -> None:
    tokens = trained.encode(text)
    assert trained.separator not in tokens
    assert tokens.size == 0 or tokens.max() < trained.vocab_size == 400
    assert trained.decode(np.append(tokens, trained.separator)) == text


@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizers"])
def test_a_batch_of_texts_has_the_tokens_of_each_text(
    kind: str, trained: Tokenizer, texts: list[bytes], tmp_path: Path
) -> None:
    if kind == "tokenizers":
        trained = train_tokenizer(texts, vocab_size=400, path=tmp_path / "tokenizer.json")
    mixed = [text if k % 2 else text.decode() for k, text in enumerate([*texts, b"", b"\xff\n"])]
    assert trained.encode_batch is not None
    for tokens, text in zip(trained.encode_all(mixed), mixed, strict=True):
        expected = trained.encode(text)
        assert tokens.dtype == expected.dtype == np.uint16
        np.testing.assert_array_equal(tokens, expected)
    assert len(trained.encode(texts[0])) < 0.8 * len(texts[0])
    with pytest.raises(TypeError, match="expected str or bytes: name the field"):
        trained.encode_all([b"text", 3])  # type: ignore[list-item]


def test_rounds_of_a_sentencepiece_model(trained: Tokenizer, texts: list[bytes]) -> None:
    source = [{"text": text} for text in texts]
    rounds = token_rounds(
        source,
        islands=1,
        local_steps=2,
        batch_size=2,
        seq_len=64,
        tokenizer=trained,
        shuffle_tokens=1,
    )
    batch = next(rounds).batches
    np.testing.assert_array_equal(batch["inputs"][..., 1:], batch["targets"][..., :-1])
    assert batch["inputs"][0, 0, 0, 0] == trained.separator
    row = trained.decode(batch["inputs"][0, 0, 0])
    assert any(text.decode().startswith(row[:20]) for text in texts)
    assert rounds.settings["tokenizer"] == trained.name and "tokenizer.model:" in trained.name


def test_bad_models_raise(texts: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "bad.model"
    for content in (b"", b"not a model"):
        path.write_bytes(content)
        with (
            contextlib.redirect_stderr(io.StringIO()),
            pytest.raises(ValueError, match=r"neither a tokenizer\.json nor a SentencePiece model"),
        ):
            load_tokenizer(str(path))
    with pytest.raises(ValueError, match=r"does not say which token ends a document"):
        load_tokenizer(train(texts[:3], path, eos_id=-1))

"""Byte-pair encodings, trained on Python sources."""

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedpax.data import (
    BYTE_TOKENIZER,
    Tokenizer,
    heldout_token_batches,
    load,
    load_tokenizer,
    token_rounds,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Tokenizer:
    """A tokenizer of 400 tokens, trained on Python sources."""
    source = load("stdlib_text", "heldout", data_dir=data_dir)
    texts = [source[i]["text"] for i in range(min(20, len(source)))]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_tokenizer(texts, vocab_size=400, path=path)


def test_bytes_are_the_default() -> None:
    assert load_tokenizer("bytes") is BYTE_TOKENIZER


@given(st.text())
def test_decoding_inverts_encoding_of_any_text(trained: Tokenizer, text: str) -> None:
    tokens = trained.encode(text)
    assert trained.separator not in tokens
    assert tokens.size == 0 or tokens.max() < trained.vocab_size
    assert trained.decode(np.append(tokens, trained.separator)) == text


def test_subwords_are_fewer_than_bytes(trained: Tokenizer) -> None:
    text = "def function(self, argument):\n    return self.argument\n"
    assert trained.vocab_size == 400
    assert len(trained.encode(text)) < 0.7 * len(text)
    np.testing.assert_array_equal(trained.encode(text), trained.encode(text.encode()))


def test_subwords_in_rounds_and_heldout_token_batches(trained: Tokenizer) -> None:
    source = [{"text": f"import module_{i}\nreturn {i}\n" * 5} for i in range(8)]
    sizes: dict[str, Any] = {"batch_size": 2, "seq_len": 16}
    rounds = token_rounds(source, islands=2, local_steps=3, tokenizer=trained, **sizes)
    batch = next(rounds).batches
    np.testing.assert_array_equal(batch["inputs"][..., 1:], batch["targets"][..., :-1])
    assert batch["inputs"].max() > 255 and (batch["inputs"] == trained.separator).any()
    heldout = heldout_token_batches(source, tokenizer=trained, **sizes)
    flat = np.concatenate([b["targets"][b["mask"] > 0] for b in heldout])
    assert trained.decode(flat) == "".join(example["text"] for example in source)
    with pytest.raises(ValueError, match=r"tokenizer is 'bytes' and was 'tokenizer\.json:"):
        token_rounds(source, islands=2, local_steps=3, **sizes).set_state(rounds.get_state())


def test_files_that_are_no_tokenizers_raise(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such file.*or 'bytes'"):
        load_tokenizer(str(tmp_path / "missing.json"))
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(path))
    with pytest.raises(ValueError, match=r"vocab_size is 256, expected at least 257"):
        train_tokenizer(["a"], vocab_size=256, path=path)


def test_a_tokenizer_without_an_end_of_document_token_raises(
    trained: Tokenizer, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers.models import WordLevel

    path = tmp_path / "words.json"
    Library(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(path))
    with pytest.raises(ValueError, match=r"does not say which token ends a document, expected one"):
        load_tokenizer(str(path))


def test_bytes_of_another_encoding_are_told_once(
    trained: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpax.text.tokenizer._told_of_other_encoding", [])
    trained.encode_all(["é", "é".encode(), "é".encode("latin1"), b"\xff"])
    assert caplog.text.count("has bytes that are not UTF-8") == 1

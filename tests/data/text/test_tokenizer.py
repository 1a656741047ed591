"""Subword tokenizers, learned here from random and real text."""

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedpax.data import (
    BYTES,
    Tokenizer,
    heldout_batches,
    load,
    load_tokenizer,
    token_rounds,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Tokenizer:
    """400 tokens of Python's sources."""
    source = load("stdlib_text", "heldout", data_dir=data_dir)
    texts = [source[i]["text"] for i in range(min(20, len(source)))]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_tokenizer(texts, vocabulary=400, path=path)


def test_bytes_are_the_default() -> None:
    assert load_tokenizer("bytes") is BYTES


@given(st.text())
def test_any_text_comes_back(learned: Tokenizer, text: str) -> None:
    tokens = learned.encode(text)
    assert learned.separator not in tokens
    assert tokens.size == 0 or tokens.max() < learned.vocabulary
    assert learned.decode(np.append(tokens, learned.separator)) == text


def test_subwords_are_fewer_than_bytes(learned: Tokenizer) -> None:
    text = "def function(self, argument):\n    return self.argument\n"
    assert learned.vocabulary == 400
    assert len(learned.encode(text)) < 0.7 * len(text)
    np.testing.assert_array_equal(learned.encode(text), learned.encode(text.encode()))


def test_rounds_and_held_out_batches_of_subwords(learned: Tokenizer) -> None:
    source = [{"text": f"import module_{i}\nreturn {i}\n" * 5} for i in range(8)]
    sizes: dict[str, Any] = {"batch": 2, "length": 16}
    rounds = token_rounds(source, islands=2, local_steps=3, tokenizer=learned, **sizes)
    batch = next(rounds)
    np.testing.assert_array_equal(batch["inputs"][..., 1:], batch["targets"][..., :-1])
    assert batch["inputs"].max() > 255 and (batch["inputs"] == learned.separator).any()
    heldout = heldout_batches(source, tokenizer=learned, **sizes)
    flat = np.concatenate([b["targets"][b["mask"] > 0] for b in heldout])
    assert learned.decode(flat) == "".join(example["text"] for example in source)
    with pytest.raises(ValueError, match=r"tokenizer is 'bytes' and was 'tokenizer\.json:"):
        token_rounds(source, islands=2, local_steps=3, **sizes).set_state(rounds.get_state())


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such file.*or 'bytes'"):
        load_tokenizer(str(tmp_path / "missing.json"))
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(path))
    with pytest.raises(ValueError, match=r"vocabulary=256 is too small.*257"):
        train_tokenizer(["a"], vocabulary=256, path=path)


def test_a_file_without_an_end_of_document_is_refused(learned: Tokenizer, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers.models import WordLevel

    path = tmp_path / "words.json"
    Library(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(path))
    with pytest.raises(ValueError, match=r"no token that ends a document, none of"):
        load_tokenizer(str(path))

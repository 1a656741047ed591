"""Rows of characters: against a loop, and their limits."""

import numpy as np
import pytest

from fedpax.experiments.fedavg_characters import (
    SHAKESPEARE_CHARACTERS,
    character_batch,
    character_rows,
)


def test_rows_equal_a_loop_over_characters() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.bytes(int(rng.integers(0, 30))) for _ in range(40)] + [SHAKESPEARE_CHARACTERS]
    rows, counts = character_rows(texts, 7)
    expected: list[int] = []
    lengths = []
    for text in texts:
        numbers = [88]
        for byte in text:
            known = bytes([byte]) in SHAKESPEARE_CHARACTERS
            numbers.append(SHAKESPEARE_CHARACTERS.index(byte) + 1 if known else 87)
        numbers.append(89)
        numbers += [0] * (-len(numbers) % 8)
        expected += numbers
        lengths.append(len(numbers) // 8)
    assert rows.ravel().tolist() == expected
    assert counts.tolist() == lengths


def test_a_batch_predicts_each_number_from_those_before_it_in_its_row() -> None:
    rows, _ = character_rows([b"question"], 5)
    batch = character_batch({"rows": rows})
    for name in ("inputs", "targets"):
        assert batch[name].dtype == np.int32 and batch[name].shape == (2, 5)
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert batch["mask"].tolist() == [[True] * 5, [True] * 3 + [False] * 2]


def test_the_published_vocabulary_has_86_characters() -> None:
    assert len(set(SHAKESPEARE_CHARACTERS)) == len(SHAKESPEARE_CHARACTERS) == 86


@pytest.mark.parametrize(
    ("seq_len", "characters", "words"),
    [
        (0, b"ab", "seq_len is 0, expected at least 1"),
        (4, b"aba", "characters has 3 bytes, 2 of them different, expected at most 252 different"),
        (4, bytes(range(253)), "characters has 253 bytes"),
    ],
)
def test_invalid_arguments_raise(seq_len: int, characters: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        character_rows([b"a"], seq_len, characters)

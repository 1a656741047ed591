import numpy as np
import pytest

from fedpax.experiments.fedavg_words import WordRows

WORDS = [b"the", b"to", b"be"]
PAD, UNKNOWN, BEGIN, END = 0, 4, 5, 6


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        (b"to be the", [BEGIN, 2, 3, 1, END]),
        (b"to be the to", [BEGIN, 2, 3, 1, 2]),  # as long as a row: no end
        (b"to be the to be be", [BEGIN, 2, 3, 1, 2]),
        (b"or", [BEGIN, UNKNOWN, END, PAD, PAD]),
        (b"", [BEGIN, END, PAD, PAD, PAD]),
    ],
)
@pytest.mark.parametrize("dtype", ["S40", object])
def test_a_row_begins_and_ends_as_in_the_authors_code(
    sentence: bytes, expected: list[int], dtype: str
) -> None:
    batch = WordRows(WORDS, seq_len=4)({"text": np.array([sentence, b"be"], dtype)})
    assert batch["inputs"][0].tolist() == expected[:-1]
    assert batch["targets"][0].tolist() == expected[1:]
    assert batch["mask"][0].tolist() == [target != PAD for target in expected[1:]]


def test_a_word_that_occurs_twice_raises() -> None:
    with pytest.raises(ValueError, match="The 3 words have 1 duplicates"):
        WordRows([b"a", b"b", b"a"], seq_len=4)


def test_examples_without_the_field_raise() -> None:
    with pytest.raises(KeyError, match="no field 'text', but 'title'"):
        WordRows(WORDS, seq_len=4)({"title": np.array([b"a"])})


@pytest.mark.parametrize("dtype", ["U40", object])
def test_strings_are_the_same_words(dtype: str) -> None:
    """They were unknown words, all of them."""
    batch = WordRows(WORDS, seq_len=4)({"text": np.array(["to be the", "or"], dtype)})
    assert batch["targets"].tolist() == [[2, 3, 1, END], [UNKNOWN, END, PAD, PAD]]


@pytest.mark.parametrize("sentence", [None, float("nan"), 3])
def test_what_is_no_sentence_raises(sentence: object) -> None:
    with pytest.raises(TypeError, match=r"A sentence in the field 'text' is .*expected str or"):
        WordRows(WORDS, seq_len=4)({"text": np.array([sentence, b"be"], object)})

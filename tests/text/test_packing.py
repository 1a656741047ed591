"""Laws of packing over random documents and lengths, and equality with a plain loop."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from fedpax.data import SEPARATOR, pack
from fedpax.text import packing
from fedpax.text.packing import Batch

# Any bytes, including the separator: document boundaries must not depend on token values.
DOCUMENTS = st.lists(
    st.binary(max_size=40).map(lambda text: np.frombuffer(text, np.uint8)), max_size=12
)
SEQ_LENS = st.integers(1, 30)


def plain_pack(documents: list[NDArray[np.uint8]], seq_len: int) -> Batch:
    """Pack token by token, in a Python loop."""
    pairs = []
    for number, document in enumerate(documents):
        tokens = [SEPARATOR, *document.tolist(), SEPARATOR]
        pairs += [(a, b, number) for a, b in itertools.pairwise(tokens)]
    rows = [pairs[start : start + seq_len] for start in range(0, len(pairs), seq_len)]
    names = ("inputs", "targets", "segments", "positions", "mask")
    batch = {name: np.zeros((len(rows), seq_len), np.int32) for name in names}
    for r, row in enumerate(rows):
        segment, position, before = 0, 0, None
        for c, (token, target, number) in enumerate(row):
            # A new segment begins wherever the document changes within the row.
            segment, position = (segment, position + 1) if number == before else (segment + 1, 0)
            before = number
            for name, value in zip(names, (token, target, segment, position, 1), strict=True):
                batch[name][r, c] = value
    return batch


@given(DOCUMENTS, SEQ_LENS)
def test_equals_a_plain_loop(documents: list[NDArray[np.uint8]], seq_len: int) -> None:
    packed, plain = pack(documents, seq_len), plain_pack(documents, seq_len)
    assert packed.keys() == plain.keys()
    for name, array in packed.items():
        assert array.dtype == (np.float32 if name == "mask" else np.int32)
        np.testing.assert_array_equal(array, plain[name], err_msg=name)


@given(DOCUMENTS, SEQ_LENS)
def test_every_token_is_exactly_once_an_input_and_a_target(
    documents: list[NDArray[np.uint8]], seq_len: int
) -> None:
    rows = pack(documents, seq_len)
    valid = rows["mask"] == 1
    whole = [token for document in documents for token in [SEPARATOR, *document.tolist()]]
    assert rows["inputs"][valid].tolist() == whole
    assert rows["targets"][valid].tolist() == [*whole[1:], *([SEPARATOR] if documents else [])]


@given(DOCUMENTS, SEQ_LENS)
def test_only_the_end_of_the_last_row_is_padding(
    documents: list[NDArray[np.uint8]], seq_len: int
) -> None:
    rows = pack(documents, seq_len)
    tokens = sum(len(document) + 1 for document in documents)
    mask = rows["mask"].ravel()
    assert mask.tolist() == [1] * tokens + [0] * (-tokens % seq_len)
    for name in ("inputs", "targets", "segments", "positions"):
        assert not rows[name].ravel()[tokens:].any(), name
    assert (rows["segments"].ravel()[:tokens] > 0).all()


@given(DOCUMENTS, SEQ_LENS)
def test_a_segment_is_a_contiguous_part_of_one_document(
    documents: list[NDArray[np.uint8]], seq_len: int
) -> None:
    rows = pack(documents, seq_len)
    flat = np.repeat(np.arange(len(documents)), [len(document) + 1 for document in documents])
    owners = np.pad(flat, (0, -len(flat) % seq_len), constant_values=-1).reshape(-1, seq_len)
    for owner, segment, position, inputs, targets in zip(
        owners, *(rows[n] for n in ("segments", "positions", "inputs", "targets")), strict=True
    ):
        for number in range(1, segment.max() + 1):
            piece = np.flatnonzero(segment == number)
            assert len(set(owner[piece])) == 1
            assert position[piece].tolist() == list(range(len(piece)))
            # Within a segment the targets are the inputs shifted by one.
            assert targets[piece][:-1].tolist() == inputs[piece][1:].tolist()


def test_no_documents_give_no_rows() -> None:
    assert pack([], 5)["inputs"].shape == (0, 5)


@pytest.mark.parametrize("seq_len", [0, -3])
def test_a_seq_len_below_1_raises(seq_len: int) -> None:
    with pytest.raises(ValueError, match=f"seq_len is {seq_len}, expected at least 1"):
        pack([], seq_len)


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint64, ">i4"])
def test_wide_tokens_are_kept_or_named(dtype) -> None:
    batch = pack([np.array([7, 2**31 - 1], dtype), np.array([5], dtype)], seq_len=3)
    assert batch["targets"].dtype == np.int32
    assert batch["targets"].tolist() == [[7, 2**31 - 1, SEPARATOR], [5, SEPARATOR, 0]]
    if dtype != ">i4":
        with pytest.raises(ValueError, match=r"tokens has the value 2147483648 .*vocabulary"):
            pack([np.array([7, 2**31], dtype)], seq_len=3)


def test_lists_are_packed_and_texts_raise() -> None:
    lists, arrays = pack([[1, 2], [], [300]], 4), pack([np.array([1, 2]), [], np.array([300])], 4)
    assert {k: v.tolist() for k, v in lists.items()} == {k: v.tolist() for k, v in arrays.items()}
    for document in ("to be", [0.5], np.zeros((2, 2), int)):
        with pytest.raises(TypeError, match=r"Document 1 is .*, expected an array of integers"):
            pack([[1], document], 4)


def test_negative_tokens_are_named():
    with pytest.raises(ValueError, match="Document 1 has the token -100, expected tokens from 0"):
        pack([np.array([1]), np.array([2, -100])], 4)


def test_a_conversation_that_no_row_holds_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_told", set())

    def rows(tokens: int) -> None:
        made = np.zeros(tokens, np.int32)
        documents = [packing.Document(made, np.ones(tokens + 1, np.bool_)) for _ in range(3)]
        packing.keep_in_rows(documents, 8, 0)

    rows(7)
    assert not caplog.text
    rows(8)
    rows(30)
    assert caplog.text.count("a conversation needs rows of 9 tokens, and they have 8") == 1
    assert "of 31" not in caplog.text


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_conversation_whose_answers_are_in_one_row_is_not_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    """Of 9 tokens with a template, the last one is an input alone, and a row of 8 loses nothing."""
    monkeypatch.setattr(packing, "_told", set())
    is_target = np.arange(10) < (10 if is_cut else 8)
    packing.keep_in_rows([packing.Document(np.zeros(9, np.int32), is_target, first=1)], 8, 0)
    assert ("a conversation needs rows of 10 tokens, and they have 8" in caplog.text) == is_cut
    assert bool(caplog.text) == is_cut

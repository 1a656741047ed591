"""Laws of packing, over random documents and lengths, and equality with a plain loop."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from fedpax.data import SEPARATOR, pack
from fedpax.data.text.packing import Batch

# Any bytes, the separator too: where documents begin must not be read off the tokens.
DOCUMENTS = st.lists(
    st.binary(max_size=40).map(lambda text: np.frombuffer(text, np.uint8)), max_size=12
)
LENGTHS = st.integers(1, 30)


def plain_pack(documents: list[NDArray[np.uint8]], length: int) -> Batch:
    """One token after another: (input, target, document, step within the document)."""
    pairs = []
    for number, document in enumerate(documents):
        tokens = [SEPARATOR, *document.tolist(), SEPARATOR]
        pairs += [(a, b, number) for a, b in itertools.pairwise(tokens)]
    rows = [pairs[start : start + length] for start in range(0, len(pairs), length)]
    names = ("inputs", "targets", "segments", "positions", "mask")
    batch = {name: np.zeros((len(rows), length), np.int32) for name in names}
    for r, row in enumerate(rows):
        segment, position, before = 0, 0, None
        for c, (token, target, number) in enumerate(row):
            # A document of which a row has nothing but what came before has not ended there.
            segment, position = (segment, position + 1) if number == before else (segment + 1, 0)
            before = number
            for name, value in zip(names, (token, target, segment, position, 1), strict=True):
                batch[name][r, c] = value
    return batch


@given(DOCUMENTS, LENGTHS)
def test_equals_a_plain_loop(documents: list[NDArray[np.uint8]], length: int) -> None:
    packed, plain = pack(documents, length), plain_pack(documents, length)
    assert packed.keys() == plain.keys()
    for name, array in packed.items():
        assert array.dtype == (np.float32 if name == "mask" else np.int32)
        np.testing.assert_array_equal(array, plain[name], err_msg=name)


@given(DOCUMENTS, LENGTHS)
def test_every_token_is_once_an_input_and_once_a_target(
    documents: list[NDArray[np.uint8]], length: int
) -> None:
    rows = pack(documents, length)
    present = rows["mask"] == 1
    whole = [token for document in documents for token in [SEPARATOR, *document.tolist()]]
    assert rows["inputs"][present].tolist() == whole
    assert rows["targets"][present].tolist() == [*whole[1:], *([SEPARATOR] if documents else [])]


@given(DOCUMENTS, LENGTHS)
def test_only_the_end_of_the_last_row_is_padding(
    documents: list[NDArray[np.uint8]], length: int
) -> None:
    rows = pack(documents, length)
    tokens = sum(len(document) + 1 for document in documents)
    mask = rows["mask"].ravel()
    assert mask.tolist() == [1] * tokens + [0] * (-tokens % length)
    for name in ("inputs", "targets", "segments", "positions"):
        assert not rows[name].ravel()[tokens:].any(), name
    assert (rows["segments"].ravel()[:tokens] > 0).all()


@given(DOCUMENTS, LENGTHS)
def test_a_segment_is_one_piece_of_one_document(
    documents: list[NDArray[np.uint8]], length: int
) -> None:
    rows = pack(documents, length)
    flat = np.repeat(np.arange(len(documents)), [len(document) + 1 for document in documents])
    owners = np.pad(flat, (0, -len(flat) % length), constant_values=-1).reshape(-1, length)
    for owner, segment, position, inputs, targets in zip(
        owners, *(rows[n] for n in ("segments", "positions", "inputs", "targets")), strict=True
    ):
        for number in range(1, segment.max() + 1):
            piece = np.flatnonzero(segment == number)
            assert len(set(owner[piece])) == 1
            assert position[piece].tolist() == list(range(len(piece)))
            # Within a segment the targets are the inputs one step on.
            assert targets[piece][:-1].tolist() == inputs[piece][1:].tolist()


def test_no_documents_give_no_rows() -> None:
    assert pack([], 5)["inputs"].shape == (0, 5)


@pytest.mark.parametrize("length", [0, -3])
def test_a_length_that_is_not_positive_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"length is {length}, but a row must have"):
        pack([], length)

from collections.abc import Callable

import numpy as np
import pytest

from fedpax.data import SEPARATOR, Source, encode, heldout_batches, pack


def test_is_the_packed_split_in_batches_of_one_shape(documents: list[dict[str, bytes]]) -> None:
    batches = heldout_batches(documents, batch=3, length=16)
    packed = pack([encode(document["text"]) for document in documents], 16)
    for name, whole in packed.items():
        assert all(batch[name].shape == (3, 16) for batch in batches)
        assert all(batch[name].dtype == whole.dtype for batch in batches)
        together = np.concatenate([batch[name] for batch in batches])
        np.testing.assert_array_equal(together[: len(whole)], whole)
        assert not together[len(whole) :].any()


def test_covers_the_real_split(text: Callable[[str], Source]) -> None:
    source = text("heldout")
    batches = heldout_batches(source, batch=16, length=128)
    total = sum(len(example["text"]) + 1 for example in source)
    assert sum(batch["mask"].sum() for batch in batches) == total
    inputs = np.concatenate([batch["inputs"][batch["mask"] == 1] for batch in batches])
    assert bytes(inputs.astype(np.uint8).tolist()) == b"".join(
        bytes([SEPARATOR]) + example["text"] for example in source
    )


def test_a_cap_takes_rows_from_the_whole_split(text: Callable[[str], Source]) -> None:
    source = text("heldout")
    everything = heldout_batches(source, batch=1, length=64)
    capped = heldout_batches(source, batch=4, length=64, max_tokens=6_500)
    rows = np.concatenate([batch["inputs"] for batch in capped])
    mask = np.concatenate([batch["mask"] for batch in capped])
    assert 6_336 <= mask.sum() <= 6_500  # 101 rows, of which the last may be short
    places = {batch["inputs"].tobytes(): place for place, batch in enumerate(everything)}
    found = [places[row.tobytes()] for row in rows[:101]]
    assert found[0] == 0
    assert found[-1] == len(everything) - 1
    # Evenly spaced, but for rows that occur in the split more than once.
    spacing = (len(everything) - 1) / 100
    assert np.median(np.diff(found)) == pytest.approx(spacing, abs=1)


def test_a_cap_above_the_split_changes_nothing(documents: list[dict[str, bytes]]) -> None:
    plain = heldout_batches(documents, batch=2, length=8)
    capped = heldout_batches(documents, batch=2, length=8, max_tokens=10**9)
    assert len(plain) == len(capped)
    for a, b in zip(plain, capped, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)


def test_bad_arguments_are_refused(documents: list[dict[str, bytes]]) -> None:
    with pytest.raises(ValueError, match="batch is 0, but must be at least 1"):
        heldout_batches(documents, batch=0, length=8)
    with pytest.raises(ValueError, match="length is -1, but must be at least 1"):
        heldout_batches(documents, batch=1, length=-1)
    with pytest.raises(ValueError, match="less than one row of length=8"):
        heldout_batches(documents, batch=1, length=8, max_tokens=7)
    with pytest.raises(ValueError, match="no examples to evaluate on"):
        heldout_batches([], batch=1, length=8)
    with pytest.raises(KeyError, match="no field 'body', but 'text'"):
        heldout_batches(documents, batch=1, length=8, field="body")

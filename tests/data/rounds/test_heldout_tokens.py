from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from fedpax.data import SEPARATOR, Source, encode, heldout_token_batches, pack
from fedpax.data.rounds import heldout_tokens as heldout
from fedpax.data.rounds.heldout_tokens import HeldoutRows
from fedpax.text.tokenizer import BYTE_TOKENIZER


def test_batches_are_the_packed_split_with_padding_in_the_last(
    documents: list[dict[str, bytes]],
) -> None:
    batches = heldout_token_batches(documents, batch_size=3, seq_len=16)
    packed = pack([encode(document["text"]) for document in documents], 16)
    for name, whole in packed.items():
        assert all(batch[name].shape == (3, 16) for batch in batches)
        assert all(batch[name].dtype == whole.dtype for batch in batches)
        together = np.concatenate([batch[name] for batch in batches])
        np.testing.assert_array_equal(together[: len(whole)], whole)
        assert not together[len(whole) :].any()


def test_batches_have_all_tokens_of_the_split(text: Callable[[str], Source]) -> None:
    source = text("heldout")
    batches = heldout_token_batches(source, batch_size=16, seq_len=128)
    total = sum(len(example["text"]) + 1 for example in source)
    assert sum(batch["mask"].sum() for batch in batches) == total
    inputs = np.concatenate([batch["inputs"][batch["mask"] == 1] for batch in batches])
    assert bytes(inputs.astype(np.uint8).tolist()) == b"".join(
        bytes([SEPARATOR]) + example["text"] for example in source
    )


def test_max_tokens_selects_rows_evenly_spaced_over_the_split(
    text: Callable[[str], Source],
) -> None:
    source = text("heldout")
    everything = heldout_token_batches(source, batch_size=1, seq_len=64)
    capped = heldout_token_batches(source, batch_size=4, seq_len=64, max_tokens=6_500)
    rows = np.concatenate([batch["inputs"] for batch in capped])
    mask = np.concatenate([batch["mask"] for batch in capped])
    assert 6_336 <= mask.sum() <= 6_500  # 101 rows; the last may have padding
    positions = {batch["inputs"].tobytes(): place for place, batch in enumerate(everything)}
    result = [positions[row.tobytes()] for row in rows[:101]]
    assert result[0] == 0
    assert result[-1] == len(everything) - 1
    # Evenly spaced, except for rows that occur more than once.
    spacing = (len(everything) - 1) / 100
    assert np.median(np.diff(result)) == pytest.approx(spacing, abs=1)


def test_max_tokens_above_the_split_selects_all_rows(documents: list[dict[str, bytes]]) -> None:
    plain = heldout_token_batches(documents, batch_size=2, seq_len=8)
    capped = heldout_token_batches(documents, batch_size=2, seq_len=8, max_tokens=10**9)
    assert len(plain) == len(capped)
    for a, b in zip(plain, capped, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("max_tokens", [None, 90])
def test_processes_count_their_share_and_tokenize_what_they_read(
    documents: list[dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, max_tokens: int | None
) -> None:
    sizes: dict[str, Any] = {"seq_len": 12, "max_tokens": max_tokens}
    alone = HeldoutRows(documents, **sizes)
    whole = alone.read(np.arange(len(alone)))
    lengths = [len(encode(document["text"])) + 1 for document in documents]
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    counted: list[int] = []
    for process in range(3):

        def gather(own: list[int]) -> list[list[int]]:
            counted.extend(own)
            return [lengths]  # of all processes

        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        monkeypatch.setattr(heldout, "gather_json", gather)
        encoded: list[bytes] = []
        tokenizer = BYTE_TOKENIZER._replace(
            encode=lambda text, seen=encoded: seen.append(text) or encode(text)
        )
        rows = HeldoutRows(documents, tokenizer=tokenizer, divide=True, **sizes)
        np.testing.assert_array_equal(rows.num_targets, whole["mask"].sum(axis=1))
        assert len(encoded) <= -(-len(documents) // 3) + 1  # the first one is a check
        own = np.arange(process, len(rows), 3)
        encoded.clear()
        content = rows.read(own[::-1])
        for name, values in whole.items():
            np.testing.assert_array_equal(content[name], values[own[::-1]])
        starts = 12 * rows._chosen[own]
        ends = np.cumsum(lengths)
        needed = {n for s in starts for n in np.flatnonzero((ends > s) & (ends - lengths < s + 12))}
        assert set(encoded) <= {documents[n]["text"] for n in needed}
        assert len(encoded) <= len(needed)
    assert counted == lengths


def test_bad_arguments_raise(documents: list[dict[str, bytes]]) -> None:
    with pytest.raises(ValueError, match="batch_size is 0, expected at least 1"):
        heldout_token_batches(documents, batch_size=0, seq_len=8)
    with pytest.raises(ValueError, match="seq_len is -1, expected at least 1"):
        heldout_token_batches(documents, batch_size=1, seq_len=-1)
    with pytest.raises(ValueError, match="max_tokens is 7, expected at least one row of seq_len=8"):
        heldout_token_batches(documents, batch_size=1, seq_len=8, max_tokens=7)
    with pytest.raises(ValueError, match="no examples to evaluate on"):
        heldout_token_batches([], batch_size=1, seq_len=8)
    with pytest.raises(KeyError, match="no field 'body', but 'text'"):
        heldout_token_batches(documents, batch_size=1, seq_len=8, field="body")

"""Rows are the same for every number of processes, islands and devices, and of every restart."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import chex
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from fedpax.checkpoints.run_position import fill_in
from fedpax.clients import Cohort
from fedpax.data import (
    LocalRows,
    Mixture,
    TokenRounds,
    addressable_rows,
    partition_iid,
    token_rounds,
)
from fedpax.parallel.mesh import make_mesh


def make_documents(count: int, seed: int, longest: int = 12) -> list[dict[str, bytes]]:
    rng = np.random.default_rng(seed)
    return [
        {"text": rng.integers(97, 123, n).astype(np.uint8).tobytes()}
        for n in rng.integers(0, longest, count)
    ]


DOCUMENTS = make_documents(64 * 8, seed=0)  # up to eight shards
OTHERS = make_documents(64 * 3, seed=1)


def sources_of(kind: str, islands: int) -> tuple[Any, dict[str, Any]]:
    """Return a source, and further arguments of token_rounds."""
    if kind == "mixture":
        weights = {"a": 2.0, "b": [(0, 0.0), (4, 1.0)]}
        return Mixture({"a": DOCUMENTS, "b": OTHERS}, weights), {}
    if kind == "partition":
        return DOCUMENTS, {"partition": partition_iid(len(DOCUMENTS), islands)}
    return DOCUMENTS, {}


def deal_rows(shape: tuple[int, ...], processes: int, seed: int) -> list[NDArray[np.bool_]]:
    """Deal the rows of a step out to processes at random; each gets one at least."""
    rng = np.random.default_rng(seed)
    slots = shape[0] * shape[2]
    owner = rng.permutation(np.arange(slots) % processes).reshape(shape[0], 1, shape[2])
    return [np.broadcast_to(owner == process, shape[:3]) for process in range(processes)]


def together(streams: Sequence[TokenRounds], masks: Sequence[NDArray[np.bool_]]) -> Cohort:
    """Draw the next round of all processes, and put their rows into one cohort."""
    cohorts = [next(stream) for stream in streams]
    batches = {}
    for name in cohorts[0].batches:
        whole = np.full(streams[0].shape, -1, np.int32)
        for cohort, mask in zip(cohorts, masks, strict=True):
            array = cohort.batches[name]
            assert array.shape == whole.shape and array.dtype == whole.dtype
            for island, step, row in np.argwhere(mask):
                index = tuple(slice(i, i + 1) for i in (island, step, row))
                whole[index] = array[index]
        batches[name] = whole
    return Cohort(batches)


def complete_state(streams: Sequence[TokenRounds]) -> Any:
    """Return the state that all processes know together, as a checkpoint stores it."""
    state = None
    for stream in streams:
        state = fill_in(state, json.loads(json.dumps(stream.get_state())))
    return state


@given(
    kind=st.sampled_from(["one", "mixture", "partition"]),
    islands=st.integers(1, 3),
    batch_size=st.sampled_from([1, 2, 3, 4, 8]),
    counts=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    seed=st.integers(0, 100),
)
@settings(max_examples=8, deadline=None)
def test_rows_do_not_depend_on_the_processes_nor_on_restarts_with_others(
    kind: str, islands: int, batch_size: int, counts: list[int], seed: int
) -> None:
    shape = (islands, 2, batch_size, 16)
    names = ("islands", "local_steps", "batch_size", "seq_len")
    source, arguments = sources_of(kind, islands)
    arguments |= dict(zip(names, shape, strict=True)) | {"seed": seed, "shuffle_tokens": 800}
    one = token_rounds(source, **arguments)
    state = None
    for processes in (min(count, islands * batch_size) for count in counts):
        masks = deal_rows(shape, processes, seed)
        streams = [token_rounds(source, rows=mask, **arguments) for mask in masks]
        if state is not None:
            for stream in streams:
                stream.set_state(state)
        for _ in range(2):
            expected = next(one)
            if processes == 1:
                chex.assert_trees_all_equal(next(streams[0]), expected)
            else:
                chex.assert_trees_all_equal(together(streams, masks), expected)
        state = complete_state(streams)
        assert state == json.loads(json.dumps(one.get_state()))


def in_order(cohort: Cohort) -> NDArray[np.int32]:
    """Return the rows of a round by number: step by step, and within a step by island."""
    inputs = cohort.batches["inputs"]
    return inputs.transpose(1, 0, 2, 3).reshape(-1, inputs.shape[-1])


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)), min_size=3))
@settings(max_examples=6, deadline=None)
def test_a_run_continues_with_other_islands_steps_and_rows(sizes: list[tuple[int, ...]]) -> None:
    settings = {"seq_len": 8, "shuffle_tokens": 400, "num_shards": 4}
    state, rows = None, []
    for islands, local_steps, batch_size in sizes:
        stream = token_rounds(
            DOCUMENTS, islands=islands, local_steps=local_steps, batch_size=batch_size, **settings
        )
        if state is not None:
            stream.set_state(state)
        rows += [in_order(next(stream)) for _ in range(2)]
        state = stream.get_state()
    result = np.concatenate(rows)
    one = token_rounds(DOCUMENTS, islands=1, local_steps=1, batch_size=len(result), **settings)
    np.testing.assert_array_equal(result, in_order(next(one)))


@pytest.mark.parametrize("kind", ["one", "mixture"])
def test_islands_that_divide_the_same_step_have_the_same_rows(kind: str) -> None:
    source, _ = sources_of(kind, 1)
    streams = [
        token_rounds(source, islands=n, local_steps=3, batch_size=8 // n, seq_len=8)
        for n in (1, 2, 4, 8)
    ]
    for _ in range(3):
        first, *others = (in_order(next(stream)) for stream in streams)
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_a_stream_that_names_no_number_of_shards_continues_with_the_saved_number() -> None:
    sizes: dict[str, Any] = {"local_steps": 2, "batch_size": 2, "seq_len": 8}
    four = token_rounds(DOCUMENTS, islands=4, **sizes)
    next(four)
    two = token_rounds(DOCUMENTS, islands=2, **sizes)
    two.set_state(four.get_state())
    rows = np.concatenate([in_order(next(two)) for _ in range(2)])
    np.testing.assert_array_equal(rows, in_order(next(four)))
    fixed = token_rounds(DOCUMENTS, islands=2, num_shards=4, **sizes)
    with pytest.raises(ValueError, match="num_shards=8, but this stream has 4: set num_shards to"):
        fixed.set_state(four.get_state())


class Counting(Sequence[Mapping[str, Any]]):
    """A source that records which documents are read."""

    def __init__(self, source: Sequence[Mapping[str, Any]]) -> None:
        self.source = source
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> Any:
        self.reads.append(int(index))
        return self.source[index]


def test_a_process_reads_only_documents_of_its_own_rows() -> None:
    shape = (2, 3, 4, 16)
    sizes: dict[str, Any] = {"islands": 2, "local_steps": 3, "batch_size": 4, "seq_len": 16}
    reads = []
    for mask in deal_rows(shape, 4, seed=0):
        source = Counting(DOCUMENTS)
        stream = token_rounds(source, rows=mask, shuffle_tokens=8, **sizes)
        source.reads.clear()  # of the check of the field
        for _ in range(2):
            next(stream)
        reads.append(source.reads)
    assert not any(set(a) & set(b) for k, a in enumerate(reads) for b in reads[:k])
    whole = Counting(DOCUMENTS)
    stream = token_rounds(whole, shuffle_tokens=8, **sizes)
    whole.reads.clear()
    for _ in range(2):
        next(stream)
    assert sorted(whole.reads) == sorted(n for index in reads for n in index)
    assert len(whole.reads) < len(DOCUMENTS)


@pytest.mark.parametrize("axes", [{"islands": 2, "data": 4}, {"islands": 4, "sequence": 2}])
def test_the_rows_of_devices_are_those_of_their_blocks(axes: dict[str, int]) -> None:
    mesh = make_mesh(**axes)
    spec = PartitionSpec("islands", None, "data" if "data" in axes else None, "sequence")
    spec = spec if "sequence" in axes else PartitionSpec(*spec[:3])
    sharding = NamedSharding(mesh, spec)
    shape = (4, 2, 8, 16)
    assert addressable_rows(sharding, shape).all()
    devices = mesh.devices.reshape(-1)
    for own in np.split(devices, 4):
        mask = addressable_rows(sharding, shape, own)
        assert mask.shape == shape[:3]
        assert mask.mean() == {4: 1 / 4, 2: 1 / 4}[len(devices) // axes["islands"]]
        stream = token_rounds(
            DOCUMENTS, islands=4, local_steps=2, batch_size=8, seq_len=16, rows=mask
        )
        array = next(stream).batches["inputs"]
        whole = next(
            token_rounds(DOCUMENTS, islands=4, local_steps=2, batch_size=8, seq_len=16)
        ).batches["inputs"]
        for device, index in sharding.devices_indices_map(shape).items():
            if device in own:
                np.testing.assert_array_equal(array[index], whole[index])
    with pytest.raises(IndexError, match="index only rows of its own devices"):
        array[:]


def test_a_global_array_is_made_from_local_rows() -> None:
    sharding = NamedSharding(make_mesh(islands=2, data=4), PartitionSpec("islands", None, "data"))
    rows = np.random.default_rng(0).integers(0, 9, (2 * 3 * 4, 5), np.int32)
    local = LocalRows(rows, np.ones((2, 3, 4), np.bool_))
    array = jax.make_array_from_callback(local.shape, sharding, local.__getitem__)
    assert array.sharding == sharding
    np.testing.assert_array_equal(array, rows.reshape(2, 3, 4, 5))


def test_a_mask_that_does_not_fit_raises() -> None:
    sizes: dict[str, Any] = {"islands": 2, "local_steps": 1, "batch_size": 2, "seq_len": 8}
    for mask in (np.ones((2, 2), np.bool_), np.zeros((2, 1, 2), np.bool_), np.ones((2, 1, 2))):
        with pytest.raises(ValueError, match=r"expected bool\[2, 1, 2\].*make it by addressable"):
            token_rounds(DOCUMENTS, rows=mask, **sizes)

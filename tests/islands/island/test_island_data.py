"""The rows of one island: bitwise the rows of a stream of all islands, and nothing else is read."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.data import LazyStream, Mixture, partition_iid, token_rounds
from fedpax.islands.island.training_rounds import IslandRows, ShardPrefetch, row_shardings

ISLANDS, SIZES = 3, {"islands": 3, "local_steps": 2, "batch_size": 2, "seq_len": 8}


class CountedDocuments:
    """Random documents that record which of them were read."""

    def __init__(self, number=600, seed=0):
        rng = np.random.default_rng(seed)
        letters = rng.integers(97, 123, (number, 40), np.uint8)
        self.documents = [bytes(row[: 5 + i % 35]) for i, row in enumerate(letters)]
        self.read = set()

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, index):
        self.read.add(index)
        return {"text": self.documents[index]}


def streams(kind, source, **more):
    if kind == "partition":
        more["partition"] = partition_iid(len(source), ISLANDS, seed=1)
    if kind == "mixture":
        other = CountedDocuments(400, seed=1)
        source = Mixture({"a": source, "b": other}, {"a": 2.0, "b": 1.0})
    return token_rounds(source, shuffle_tokens=64, **SIZES, **more)


@pytest.mark.parametrize("kind", ["shared", "partition", "mixture"])
def test_rows_are_those_of_all_islands(kind):
    whole = streams(kind, CountedDocuments())
    rounds = [next(whole).batches for _ in range(5)]
    for k in range(ISLANDS):
        rows = IslandRows(LazyStream(lambda: streams(kind, CountedDocuments())), k)
        for r, batches in enumerate(rounds):
            own = next(rows).batches
            for name, want in batches.items():
                assert isinstance(own[name], np.ndarray)
                np.testing.assert_array_equal(own[name], want[k])
            if r == 2:  # a new process continues
                state = json.loads(json.dumps(rows.get_state()))
                rows = IslandRows(LazyStream(lambda: streams(kind, CountedDocuments())), k)
                rows.set_state(state)


def test_another_shard_begins_at_its_first_round():
    whole = streams("shared", CountedDocuments())
    rounds = [next(whole).batches["inputs"] for _ in range(3)]

    def open_stream():
        return LazyStream(lambda: streams("shared", CountedDocuments()))

    sharding = NamedSharding(jax.make_mesh((1,), ("islands",)), PartitionSpec("islands"))
    rows = IslandRows(open_stream(), 0)
    next(rows)
    state = rows.get_state()
    with ShardPrefetch(open_stream(), open_stream, sharding, 0, state) as data:
        for shard, number in ((0, 1), (0, 2), (2, 0), (2, 1), (0, 0)):
            cohort, state = data.next(shard)
            np.testing.assert_array_equal(cohort.batches["inputs"], rounds[number][shard])
            assert data.shard == shard
    rows.set_state(state)  # of the data of the last shard
    np.testing.assert_array_equal(next(rows).batches["inputs"], rounds[1][0])


def test_only_the_documents_of_the_rows_are_read():
    read = []
    for k in range(ISLANDS):
        source = CountedDocuments()
        rows = IslandRows(streams("shared", source), k)
        source.read.clear()
        for _ in range(40):
            next(rows)
        read.append(source.read)
    assert all(len(own) > 50 for own in read)
    assert not read[0] & read[1] and not read[1] & read[2] and not read[0] & read[2]


def test_a_stream_that_has_begun_continues_with_one_island():
    whole, changed = (streams("shared", CountedDocuments()) for _ in range(2))
    for _ in range(2):
        next(whole), next(changed)
    changed.keep_island(1)
    want, result = next(whole).batches["inputs"], next(changed).batches["inputs"]
    np.testing.assert_array_equal(result[1], want[1])
    with pytest.raises(IndexError, match="index only rows of its own devices"):
        result[0]
    with pytest.raises(ValueError, match="Make the stream with rows=None"):
        changed.keep_island(2)


def test_a_row_keeps_the_shardings_of_its_axes():
    mesh = jax.make_mesh((1, 1), ("islands", "fsdp"))
    cohort = NamedSharding(mesh, PartitionSpec("islands", None, "fsdp"))
    assert tuple(row_shardings(cohort).spec) == (None, "fsdp")

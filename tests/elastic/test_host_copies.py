"""Copies of a state in the host's memory, restored on the same mesh and on a smaller one."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpax.elastic import host_copies
from fedpax.elastic.host_copies import (
    HostCopies,
    list_copies,
    memory_folder,
    remove_copies,
    rounds_of,
    rows_on_this_process,
)


class State(NamedTuple):
    params: Any  # server values
    momentum: Any  # per island
    steps: jax.Array  # per island
    key: jax.Array
    keys: jax.Array  # per island


SPECS = State(
    params={"w": PartitionSpec(None, "fsdp"), "b": PartitionSpec()},
    momentum={"w": PartitionSpec("islands", None, "fsdp"), "b": PartitionSpec("islands")},
    steps=PartitionSpec("islands"),
    key=PartitionSpec(),
    keys=PartitionSpec("islands"),
)


def mesh_of(islands: int) -> Mesh:
    devices = np.array(jax.devices()[: 2 * islands]).reshape(islands, 2)
    return Mesh(devices, ("islands", "fsdp"))


def random_values(islands: int, seed: int) -> State:
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.normal(size=shape).astype(np.float32)
    return State(
        params={"w": normal(3, 4), "b": normal(5).astype(jnp.bfloat16)},
        momentum={"w": normal(islands, 3, 4), "b": normal(islands, 5)},
        steps=random.integers(0, 1000, islands, dtype=np.int32),
        key=jax.random.key(seed),
        keys=jax.random.split(jax.random.key(seed + 1), islands),
    )


def put(values: State, mesh: Mesh) -> State:
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), values, SPECS)


def like(state: State) -> State:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def rows(state: State, numbers: list[int]) -> State:
    """Return the state with some islands of it."""
    take = lambda x: x[np.asarray(numbers)]
    return state._replace(
        momentum=jax.tree.map(take, state.momentum), steps=take(state.steps), keys=take(state.keys)
    )


def plain(state: State) -> State:
    as_numbers = lambda x: (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )
    return jax.tree.map(lambda x: np.array(as_numbers(x)), state)


def check_equal(state: State | None, expected: State) -> None:
    assert state is not None
    chex.assert_trees_all_equal(plain(state), plain(expected))


@pytest.mark.parametrize("stream", [{"round": 7, "shards": [[3, 1], [2, 0]]}, b"\x00\xff"])
def test_a_copy_restores_the_state_bit_by_bit(tmp_path: Path, stream: Any) -> None:
    copies = HostCopies(tmp_path / "memory", "a1")
    state = put(random_values(4, 0), mesh_of(4))
    copies.save(7, state, stream)
    copy = copies.load(7)
    assert copy is not None and (copy.round, copy.stream_state) == (7, stream)
    restored = copy.restore(like(state), None)
    check_equal(restored, state)
    shardings = [x.sharding.spec for x in jax.tree.leaves(restored)]
    assert shardings == [x.sharding.spec for x in jax.tree.leaves(state)]
    assert oct((tmp_path / "memory").stat().st_mode)[-3:] == "700"


def test_each_island_that_is_left_keeps_its_own_state(tmp_path: Path) -> None:
    copies = HostCopies(tmp_path, "a1")
    state = put(random_values(4, 1), mesh_of(4))
    copies.save(2, state, {}, [0, 1, 2, 5])
    copy = copies.load(2)
    assert copy is not None
    fewer = put(rows(state, [0, 2, 3]), mesh_of(3))
    check_equal(copy.restore(like(fewer), [0, 2, 5]), fewer)
    alone = put(rows(state, [3]), mesh_of(1))
    check_equal(copy.restore(like(alone), [5]), alone)
    assert copy.restore(like(fewer), [0, 3, 5]) is None  # the copy has no island 3
    assert copy.restore(like(fewer), None) is None


def test_a_copy_that_lacks_a_shard_restores_nothing(tmp_path: Path) -> None:
    copies = HostCopies(tmp_path, "a1")
    state = put(random_values(4, 2), mesh_of(4))
    copies.save(2, state, {})
    copy = copies.load(2)
    assert copy is not None
    lost = {name: list(blocks) for name, blocks in copy.blocks.items()}
    lost[".momentum['w']"].pop()
    assert copy._replace(blocks=lost).restore(like(state), None) is None
    wider = like(state)._replace(
        steps=jax.ShapeDtypeStruct((4,), np.int16, sharding=state.steps.sharding)
    )
    assert copy.restore(wider, None) is None


def test_an_island_that_returns_has_its_own_state(tmp_path: Path) -> None:
    copies = HostCopies(tmp_path, "a1")
    before = put(random_values(3, 3), mesh_of(3))
    copies.save(2, before, {}, [0, 1, 2])
    now = put(random_values(4, 4), mesh_of(4))
    assert rows_on_this_process(now, [0, 1, 2, 5]) == {0, 1, 2, 5}
    copy = copies.load(2)
    assert copy is not None
    mixed = copy.replace_rows(now, [0, 1, 2, 3], [1, 3])  # the copy has no island 3
    expected, old = plain(now), plain(before)
    for new, saved in (
        *zip(jax.tree.leaves(expected.momentum), jax.tree.leaves(old.momentum), strict=True),
        (expected.steps, old.steps),
        (expected.keys, old.keys),
    ):
        new[1] = saved[1]
    check_equal(mixed, expected)


def test_two_copies_of_one_job_are_kept(tmp_path: Path) -> None:
    state = put(random_values(1, 5), mesh_of(1))
    HostCopies(tmp_path, "b2").save(9, state, {})
    copies = HostCopies(tmp_path, "a1")
    for number in (1, 2, 3, 3):  # taken back to round 2, it trains round 3 again
        copies.save(number, state, {})
    assert copies.rounds() == [2, 3]
    assert rounds_of(list_copies(tmp_path), "b2") == [9]
    assert copies.load(7) is None
    remove_copies(tmp_path, but="b2")
    assert list_copies(tmp_path) == ["b2-9"]
    remove_copies(tmp_path)
    assert not tmp_path.exists()


def test_full_memory_leaves_the_former_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = put(random_values(1, 6), mesh_of(1))
    copies = HostCopies(tmp_path, "a1")
    copies.save(1, state, {})
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(host_copies, "create_draft", lambda path: full)
    with pytest.raises(OSError, match="No space left"):
        copies.save(2, state, {})
    monkeypatch.undo()
    assert copies.rounds() == [1] and [path.name for path in tmp_path.iterdir()] == ["a1-1"]


def test_a_damaged_copy_is_none(tmp_path: Path) -> None:
    state = put(random_values(1, 7), mesh_of(1))
    copies = HostCopies(tmp_path, "a1")
    copies.save(1, state, {})
    content = (tmp_path / "a1-1").read_bytes()
    (tmp_path / "a1-1").write_bytes(content[: len(content) // 2])
    assert copies.load(1) is None


def test_the_folder_depends_on_run_and_process(tmp_path: Path) -> None:
    folders = {
        memory_folder(tmp_path, run, process) for run in ("runs/a", "runs/b") for process in (0, 1)
    }
    assert len(folders) == 4 and all(folder.parent == tmp_path for folder in folders)
    assert os.access(memory_folder(None, "runs/a", 0).parent, os.W_OK)

"""Client stores come back bitwise on any number of devices, which pad them to other numbers."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_states import assert_same_bits

from fedpax.checkpoints import changed_rows, saved_stores
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.checkpoints.checkpoint_files import lineage
from fedpax.checkpoints.saved_state import load_field
from fedpax.clients import ClientStore, client_store
from fedpax.parallel.mesh import make_mesh

NUM_CLIENTS = 509  # 512 rows on 1, 2, 4 and 8 devices, 528 on 3 and 6


class State(NamedTuple):
    params: jax.Array
    controls: ClientStore[Any]
    nested: list[Any]


def random_states(seed: int, count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(count, 4, 6)).astype("f"),
        "half": rng.normal(size=(count, 4)).astype(jnp.bfloat16),
        "seen": rng.random(count) < 0.5,
    }


def new_state(num_clients: int = NUM_CLIENTS) -> State:
    one = jax.tree.map(lambda x: np.ones_like(x[0]), random_states(0, 1))
    stores = [client_store(tree, num_clients) for tree in (one, one["w"])]
    return State(jnp.asarray(np.zeros(3, "f")), stores[0], stores[1:])


def change(state: State, seed: int, count: int) -> State:
    ids = np.random.default_rng(seed).permutation(NUM_CLIENTS)[:count]
    new = random_states(seed, count)

    def write(rows: jax.Array, values: np.ndarray) -> jax.Array:
        changed = np.array(rows)
        changed[ids] = values
        return jax.device_put(changed, rows.sharding)

    stores = state.controls, state.nested[0]
    controls, nested = (
        ClientStore(jax.tree.map(write, store.rows, rows), NUM_CLIENTS)
        for store, rows in zip(stores, (new, new["w"]), strict=True)
    )
    return State(jnp.asarray(np.asarray(state.params) + 1), controls, [nested])


def on_host(state: State) -> Any:
    return np.asarray(state.params), state.controls.to_host(), state.nested[0].to_host()


def like(state: State) -> State:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the bytes of each range of rows that is read."""
    sizes, read_rows = [], saved_stores._read_rows

    def record(*arguments: Any) -> np.ndarray:
        sizes.append((rows := read_rows(*arguments)).nbytes)
        return rows

    monkeypatch.setattr(saved_stores, "_read_rows", record)
    return sizes


@pytest.mark.parametrize("small_stores", [0, 1 << 24], ids=["changed rows", "all rows"])
def test_rows_come_back_on_any_number_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_stores: int
) -> None:
    monkeypatch.setattr(saved_stores, "SMALL_STORES", small_stores)
    monkeypatch.setattr(changed_rows, "CHUNK_BYTES", 1 << 11)
    monkeypatch.setattr(saved_stores, "RANGE_BYTES", 1 << 13)
    read = record_reads(monkeypatch)
    expected: Any = None
    for number, devices in enumerate((8, 3, 6, 1, 8), 1):
        mesh = make_mesh(devices=jax.devices()[:devices], clients=devices)
        with jax.set_mesh(mesh), Checkpoints(tmp_path, keep=1) as checkpoints:
            state = new_state()
            rows = 528 if devices in (3, 6) else 512
            assert state.controls.rows["w"].shape[0] == rows
            if expected is None:
                state = change(state, 0, NUM_CLIENTS)
            else:
                wanted = like(state)
                state = checkpoints.restore_state(wanted)
                assert_same_bits(on_host(state), expected)
                assert jax.tree.map(lambda x: (x.shape, x.sharding), state) == jax.tree.map(
                    lambda x: (x.shape, x.sharding), wanted
                )
            state = change(state, number, 5)
            checkpoints.save(number, state, {}, {})
            checkpoints.wait()
            expected = on_host(state)
    ancestors = [step for step, _ in lineage(tmp_path / "checkpoints", 5)]
    assert ancestors == ([1, 5] if small_stores == 0 else [5])
    # In ranges: the host never has a large part of a large store.
    assert bool(read) == (small_stores == 0)
    assert all(nbytes <= 1 << 13 for nbytes in read)
    saved = load_field(tmp_path, "controls")["rows"]
    assert_same_bits(jax.tree.map(lambda x: x[:NUM_CLIENTS], saved), expected[1])


def test_other_clients_are_told_though_their_rows_are_as_many(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, new_state(510), {}, {})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(ValueError, match="controls has 510 clients, expected 509 for"):
            checkpoints.restore_state(like(new_state()))


def test_without_a_record_of_the_clients_the_numbers_of_rows_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_rows, "record_of_stores", lambda state: None)
    state = change(new_state(), 0, 7)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {}, {})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert_same_bits(checkpoints.restore_state(like(state)), state)
        with pytest.raises(ValueError, match="controls has 512 rows, expected 528 for"):
            checkpoints.restore_state(like(new_state(528)))

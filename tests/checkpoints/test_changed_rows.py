"""A checkpoint writes the rows of client stores that changed, and is restored with all rows."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from random_states import assert_same_bits

from fedpax.checkpoints import checkpoint_files, saved_stores
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.checkpoints.checkpoint_files import (
    DamagedCheckpointError,
    find_damage,
    lineage,
    write_checksums,
)
from fedpax.checkpoints.saved_state import load_field, load_params, load_state
from fedpax.clients import ClientStore
from fedpax.parallel.mesh import make_mesh
from fedpax.run_files.paths import complete_rounds

NUM_CLIENTS = 509


class State(NamedTuple):
    params: Any
    controls: ClientStore[Any]
    nested: list[Any]


@pytest.fixture(autouse=True)
def small_stores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_stores, "SMALL_STORES", 0)


def random_rows(seed: int, shape: tuple[int, ...] = (NUM_CLIENTS + 3,)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(*shape, 4, 6)).astype("f"),
        "half": rng.normal(size=(*shape, 4)).astype(jnp.bfloat16),
        "count": rng.integers(0, 99, shape).astype(np.int32),
        "seen": rng.random((*shape, 2)) < 0.5,
    }


def random_state(seed: int, mesh: jax.sharding.Mesh | None = None) -> State:
    def place(tree: Any, *spec: str) -> Any:
        if mesh is None:
            return jax.tree.map(jnp.asarray, tree)

        def put(x: Any) -> Any:
            names = [n if n in mesh.shape else None for n in spec[: np.ndim(x)]]
            return jax.device_put(x, NamedSharding(mesh, P(*names)))

        return jax.tree.map(put, tree)

    rows = place(random_rows(seed), "clients", "fsdp")
    other = place(random_rows(seed + 1)["w"], "clients")
    params = place({"layers": [np.float32([seed, 2]), np.ones((8, 3), "f")]})
    return State(params, ClientStore(rows, NUM_CLIENTS), [ClientStore(other, NUM_CLIENTS)])


def change(state: State, seed: int, count: int) -> State:
    """Overwrite some rows of both stores, as a rule that no cohort tells."""
    rng = np.random.default_rng(seed)

    def write(store: ClientStore[Any]) -> ClientStore[Any]:
        ids = rng.permutation(NUM_CLIENTS)[:count]
        new = random_rows(seed, (count,))
        new = new["w"] if isinstance(store.rows, jax.Array) else new
        rows = jax.tree.map(
            lambda x, y: jax.device_put(np_set(x, ids, y), x.sharding), store.rows, new
        )
        return ClientStore(rows, NUM_CLIENTS)

    params = jax.tree.map(lambda x: jax.device_put(np.asarray(x) + 1, x.sharding), state.params)
    return State(params, write(state.controls), [write(state.nested[0])])


def np_set(x: Any, ids: np.ndarray, y: np.ndarray) -> np.ndarray:
    x = np.array(x)
    x[ids] = y
    return x


def like(state: Any, other: Any = None) -> Any:
    other = state if other is None else other
    return jax.tree.map(
        lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y.sharding), state, other
    )


def save_some(folder: Path, first: State, saves: int, keep: int = 1, start: int = 1) -> list[State]:
    states = []
    state = first
    with Checkpoints(folder, keep=keep) as checkpoints:
        if start > 1:
            assert_same_bits(checkpoints.restore_state(like(first)), first)
        for number in range(start, start + saves):
            if number > 1:
                state = change(state, number, 5)
            checkpoints.save(number, state, {}, {})
            checkpoints.wait()
            states.append(state)
    return states


def size_of(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("sizes", "other"),
    [
        (None, dict(clients=4)),
        pytest.param(dict(clients=2, fsdp=2), None, marks=pytest.mark.slow),
        pytest.param(dict(clients=4), dict(clients=2, fsdp=2), marks=pytest.mark.slow),
        pytest.param(dict(fsdp=2), dict(clients=8), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_state_comes_back_bitwise_on_other_devices(
    tmp_path: Path, sizes: dict[str, int] | None, other: dict[str, int] | None
) -> None:
    def mesh_of(sizes: dict[str, int] | None) -> Any:
        if sizes is None:
            return None
        return make_mesh(devices=jax.devices()[: np.prod([*sizes.values()])], **sizes)

    states = save_some(tmp_path, random_state(0, mesh_of(sizes)), saves=4)
    folder = tmp_path / "checkpoints"
    # Checkpoint 3 after the first one, its parent 2, and the first one.
    assert complete_rounds(folder) == [1, 3, 4]
    assert [step for step, _ in lineage(folder, 4)] == [1, 3, 4]
    wanted = like(states[-1], random_state(0, mesh_of(other)))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        restored = checkpoints.restore_state(wanted)
    assert_same_bits(restored, states[-1])
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
        lambda x: x.sharding, wanted
    )


def test_a_checkpoint_writes_the_rows_that_changed(tmp_path: Path) -> None:
    state = random_state(0)
    (first,) = save_some(tmp_path, state, saves=1)
    whole = size_of(tmp_path / "checkpoints" / "1")
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        assert_same_bits(checkpoints.restore_state(like(state)), first)
        few, many = change(state, 1, 5), change(state, 2, 80)
        for number, changed in enumerate([few, few, many, few], 2):
            checkpoints.save(number, changed, {}, {})
            checkpoints.wait()
    folder = tmp_path / "checkpoints"
    bases = [lineage(folder, number)[0][0] for number in range(1, 6)]
    # More than an eighth of the rows of `many` differ from the others: all rows are written.
    assert bases == [1, 1, 1, 4, 5]
    rows = sum(leaf.nbytes for leaf in jax.tree.leaves((state.controls, state.nested)))
    assert whole > 0.9 * rows and size_of(folder / "2") < whole - 0.8 * rows
    ids, _ = np.split(saved_ids(folder / "2", 0), [5])
    assert set(ids) == changed_rows(state.controls, few.controls)
    assert (saved_ids(folder / "3", 0) >= 0).sum() == 5  # of two checkpoints, with equal rows


def saved_ids(checkpoint: Path, store: int) -> np.ndarray:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return np.asarray(checkpointer.restore(checkpoint / "rows")[str(store)]["ids"])


def changed_rows(before: ClientStore[Any], after: ClientStore[Any]) -> set[int]:
    rows = [jax.tree.leaves(jax.tree.map(np.asarray, store.rows)) for store in (before, after)]
    pairs = zip(*rows, strict=True)
    return {k for a, b in pairs for k in range(len(a)) if a[k].tobytes() != b[k].tobytes()}


def test_models_and_fields_are_loaded_with_all_rows(tmp_path: Path) -> None:
    states = save_some(tmp_path, random_state(0), saves=4, keep=9)
    for number, state in enumerate(states, 1):
        for loaded, expected in [
            (load_field(tmp_path, "controls", number), {"rows": state.controls.rows}),
            (load_field(tmp_path, "nested", number), [{"rows": state.nested[0].rows}]),
            (load_params(tmp_path, number), state.params),
        ]:
            assert_same_bits(loaded, jax.tree.map(np.asarray, expected))
        assert_same_bits(load_state(tmp_path, number, like(state)), state)
    with pytest.raises(
        KeyError, match=r"no field 'control', expected one of controls, nested, params"
    ):
        load_field(tmp_path, "control")


@pytest.mark.slow
def test_a_run_continues_from_a_part_and_keeps_the_checkpoints_it_needs(tmp_path: Path) -> None:
    alone, resumed = tmp_path / "alone", tmp_path / "resumed"
    states = save_some(alone, random_state(0), saves=6, keep=2)
    state = random_state(0)
    for number in range(1, 7):  # killed after each checkpoint
        (state,) = save_some(resumed, state, saves=1, keep=2, start=number)
    assert_same_bits(state, states[-1])
    for folder in (alone, resumed):
        steps = complete_rounds(folder / "checkpoints")
        assert steps == [1, 5, 6]
        assert [step for step, _ in lineage(folder / "checkpoints", 6)] == [1, 5, 6]
    for number, store in ((5, 0), (6, 0), (6, 1)):
        ids = [
            saved_ids(folder / "checkpoints" / str(number), store) for folder in (alone, resumed)
        ]
        assert ids[0].tolist() == ids[1].tolist()


@pytest.mark.each_value
@pytest.mark.parametrize("round_number", [1, 5, 7, 8])
@pytest.mark.parametrize("how", ["flipped", "missing", "no checksums"])
def test_damage_in_any_checkpoint_that_is_needed_is_told(
    saved: Path, tmp_path: Path, round_number: int, how: str
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "checkpoints"
    harmed = folder / str(round_number)
    assert find_damage(folder / "8") is None
    if how == "flipped":
        files = [path for path in harmed.rglob("d/*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    elif how == "missing":
        shutil.rmtree(harmed)
    else:
        (harmed / "checksums.json").unlink()
    if round_number == 8 and how != "flipped":
        return
    damage = find_damage(folder / "8")
    expected = "has another checksum" if how == "flipped" else "is missing"
    assert damage is not None and expected in damage
    at = f"the checkpoint of round {round_number}, which"
    assert round_number == 8 or (damage.startswith(at) and damage.count("checkpoint") == 1)
    with pytest.raises(DamagedCheckpointError, match="The checkpoint of round 8 is damaged") as e:
        load_field(tmp_path, "controls")
    steps = [1, 5, 7, 8]
    before = [n for n in steps if n < round_number and n in complete_rounds(folder)]
    remedy = f"to resume from the checkpoint of round {before[-1]}" if before else "no earlier"
    assert remedy in str(e.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_stores, "SMALL_STORES", 0)
        save_some(folder, random_state(0), saves=8)
    return folder


def test_a_parent_of_another_run_is_told(saved: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(saved, run)
    save_some(other, random_state(1), saves=5, keep=9)
    shutil.rmtree(run / "checkpoints" / "5")
    shutil.copytree(other / "checkpoints" / "5", run / "checkpoints" / "5")
    with pytest.raises(DamagedCheckpointError, match=r"round 5, which .* is another one than"):
        load_field(run, "controls")


def test_the_newest_checkpoint_alone_has_the_model(saved: Path, tmp_path: Path) -> None:
    newest = tmp_path / "checkpoints" / "8"
    shutil.copytree(saved / "checkpoints" / "8", newest)
    assert_same_bits(load_params(tmp_path), load_params(saved))
    with pytest.raises(DamagedCheckpointError, match=r"the checkpoint of round 7, .* is missing"):
        load_field(tmp_path, "controls")
    damaged = next(path for path in (newest / "state").rglob("d/*") if path.is_file())
    damaged.write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="has 0 bytes"):
        load_params(tmp_path)


class Kept(NamedTuple):
    params: Any
    kept: ClientStore[Any]


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "float8_e5m2"])
def test_rows_of_any_bits_come_back(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(0)

    def bits(*shape: int) -> Any:  # NaN with every sign and payload, infinities, -0.0
        some = rng.integers(0, 256, (*shape, 5, jnp.dtype(dtype).itemsize), np.uint8)
        some[..., :2, -1] |= 0x7F  # most of these are NaN
        some[..., 2, :] = 0
        some[..., 2, -1] = 0x80 * rng.integers(0, 2, shape)
        return some.view(jnp.dtype(dtype))[..., 0]

    rows = bits(512)
    states = []
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for number in range(1, 5):
            rows = np_set(rows, rng.permutation(512)[:5], bits(5)) if number > 1 else rows
            states.append(Kept(jnp.float32(number), ClientStore(jnp.asarray(rows), 512)))
            checkpoints.save(number, states[-1], {}, {})
            checkpoints.wait()
    assert len(lineage(tmp_path / "checkpoints", 4)) == 3
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        restored = checkpoints.restore_state(like(states[-1]))
    loaded = load_state(tmp_path, 3, like(states[2]))
    for state, expected in [(restored, states[3]), (loaded, states[2])]:
        assert np.asarray(state.kept.rows).tobytes() == np.asarray(expected.kept.rows).tobytes()


def test_a_sign_of_zero_and_a_nan_are_changes(tmp_path: Path) -> None:
    zeros = np.zeros((512, 3), np.float32)
    signed, nan = np_set(zeros, 7, np.float32([0, -0.0, 0])), np_set(zeros, 9, np.float32(np.nan))
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for number, rows in enumerate((zeros, signed, nan, nan), 1):
            checkpoints.save(number, Kept(jnp.ones(1), ClientStore(jnp.asarray(rows), 512)), {}, {})
            checkpoints.wait()
    written = [saved_ids(tmp_path / "checkpoints" / str(number), 0) for number in (2, 3, 4)]
    assert [{*ids[ids >= 0].tolist()} for ids in written] == [{7}, {7, 9}, set()]


def test_random_keys_of_clients_are_written_in_full(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(0), 512)
    states = [
        Kept(jnp.ones(1), ClientStore({"key": k, "n": jnp.arange(512)}, 512))
        for k in (keys, keys.at[3].set(jax.random.key(5)))
    ]
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for number, state in enumerate(states, 1):
            checkpoints.save(number, state, {}, {})
            checkpoints.wait()
    assert [step for step, _ in lineage(tmp_path / "checkpoints", 2)] == [2]
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        restored = checkpoints.restore_state(like(states[1]))
    data = [jax.random.key_data(state.kept.rows["key"]) for state in (restored, states[1])]
    assert np.array_equal(*data)


def test_a_run_does_not_start_without_its_parents_records(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)

    def fail(path: Path) -> Any:
        raise TimeoutError(f"{path} cannot be read")

    monkeypatch.setattr(checkpoint_files, "read_json", fail)
    # It would delete the checkpoints that kept ones need.
    with pytest.raises(TimeoutError, match=r"parent\.json cannot be read"):
        Checkpoints(tmp_path, keep=1)


@pytest.mark.parametrize("content", ["[]", '{"round": 8, "position": 1, "stores": []}', "{"])
def test_a_parent_that_is_no_earlier_checkpoint_is_damage(
    saved: Path, tmp_path: Path, content: str
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoints" / "8" / "parent.json").write_text(content)
    write_checksums(tmp_path / "checkpoints" / "8")
    assert "parent.json" in (find_damage(tmp_path / "checkpoints" / "8") or "")


def test_a_checkpoint_whose_parent_was_removed_meanwhile_has_all_rows(tmp_path: Path) -> None:
    state = random_state(0)
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, change(state, number, 5), {}, {})
            checkpoints.wait()
        shutil.rmtree(tmp_path / "checkpoints" / "1")
        checkpoints.save(3, state, {}, {})
    assert [step for step, _ in lineage(tmp_path / "checkpoints", 3)] == [3]


def test_a_run_that_returns_to_an_earlier_checkpoint_writes_what_changed_since(
    tmp_path: Path,
) -> None:
    states = save_some(tmp_path, random_state(0), saves=3, keep=9)
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        assert checkpoints.delete_after(2) == 2
        restored = checkpoints.restore_state(like(states[1]))
        assert_same_bits(restored, states[1])
        after = change(restored, 9, 5)
        checkpoints.save(4, after, {}, {})
    assert [step for step, _ in lineage(tmp_path / "checkpoints", 4)] == [1, 4]
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        assert_same_bits(checkpoints.restore_state(like(after)), after)
        assert checkpoints.delete_after(0) == 0  # a new run, whose rows no checkpoint has
        checkpoints.save(1, change(after, 10, 1), {}, {})
    assert [step for step, _ in lineage(tmp_path / "checkpoints", 1)] == [1]


def test_small_stores_are_written_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_stores, "SMALL_STORES", 1 << 24)
    save_some(tmp_path, random_state(0), saves=2, keep=9)
    assert not (tmp_path / "checkpoints" / "2" / "rows").exists()
    assert [step for step, _ in lineage(tmp_path / "checkpoints", 2)] == [2]

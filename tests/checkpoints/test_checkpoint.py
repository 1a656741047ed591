import shutil
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from random_states import assert_same_bits, like, random_state

from fedpax.checkpoints import changed_rows, checkpoint
from fedpax.checkpoints.checkpoint import Checkpoints, CheckpointWriteError
from fedpax.checkpoints.checkpoint_files import find_damage, write_checksums
from fedpax.checkpoints.exports import write_orbax
from fedpax.checkpoints.saved_state import load_field, load_params
from fedpax.parallel.mesh import make_mesh
from fedpax.run_files.paths import complete_rounds, latest_round


@pytest.mark.parametrize("position", [{"round": 3, "file": "a.txt"}, b"\x00\xffbytes", {}])
def test_everything_comes_back_bitwise(
    tmp_path: Path, sharding: NamedSharding, position: Any
) -> None:
    state = random_state(1, sharding)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_round() is None
        checkpoints.save(3, state, position, {"exp": "x"})
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_round() == 3
        assert checkpoints.restore_position().stream == position
        assert_same_bits(checkpoints.restore_state(like(state)), state)


def test_a_folder_may_have_the_characters_of_patterns(
    tmp_path: Path, sharding: NamedSharding
) -> None:
    state, folder = random_state(1, sharding), tmp_path / "runs[1]*" / "a?"
    with Checkpoints(folder, keep=1) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, state, {}, {"exp": "x"})
    with Checkpoints(folder, keep=1) as checkpoints:
        assert_same_bits(checkpoints.restore_state(like(state)), state)
    assert_same_bits(load_params(folder), jax.tree.map(np.asarray, state.params))
    assert complete_rounds(folder / "checkpoints") == [2]
    with pytest.raises(FileNotFoundError, match=r"of the rounds 2, and none of round 7\. Choose"):
        load_params(folder, 7)
    write_orbax(tmp_path / "out[1]", load_params(folder))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "out[1]" / "params")
    chex.assert_trees_all_equal(restored["w"], state.params["w"])


def test_a_position_is_read_once_and_a_stream_may_change_its_own(
    tmp_path: Path, sharding: NamedSharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = random_state(1, sharding)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, state, {"files": ["a.txt"]}, {})
    reads: list[str] = []
    restore = ocp.JsonCheckpointHandler.restore
    monkeypatch.setattr(
        ocp.JsonCheckpointHandler,
        "restore",
        lambda self, path, **kwargs: reads.append(path.name) or restore(self, path, **kwargs),
    )
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.restore_position().stream["files"].clear()
        assert checkpoints.restore_position().stream == {"files": ["a.txt"]}
        checkpoints.restore_state(like(state))
        assert reads.count("progress") == 1
        checkpoints.delete_after(0)
        checkpoints.save(3, state, {"files": ["b.txt"]}, {})
        checkpoints.wait()
        assert checkpoints.restore_position().stream == {"files": ["b.txt"]}


def test_one_step_holds_round_position_and_configuration(
    tmp_path: Path, sharding: NamedSharding
) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, random_state(1, sharding), {"round": 3}, {"model": {"layers": 2}})
    (saved,) = (tmp_path / "checkpoints" / "3" / "progress").glob("metadata*")
    text = saved.read_text()
    assert '"round": 3' in text and '"layers": 2' in text


@pytest.mark.parametrize("mesh", [dict(clients=2, fsdp=4), dict(fsdp=8), dict(data=1)])
def test_a_state_is_restored_onto_another_mesh(
    tmp_path: Path, sharding: NamedSharding, mesh: dict[str, int]
) -> None:
    state = random_state(1, sharding)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, state, {}, {})
    devices = jax.devices()[: np.prod(list(mesh.values()))]
    other = NamedSharding(make_mesh(devices=devices, **mesh), PartitionSpec(next(iter(mesh))))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        restored = checkpoints.restore_state(like(state, other))
    assert restored.params["w"].sharding == other
    assert_same_bits(restored, state)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((512, 2048), ("clients", "fsdp")), ((512, 2048), ()), ((8, 128), ())],
    ids=["sharded", "replicated", "small and replicated"],
)
def test_the_arrays_may_be_donated_as_soon_as_save_returns(
    tmp_path: Path, sharding: NamedSharding, shape: tuple[int, int], spec: tuple[str, ...]
) -> None:
    sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    advance = jax.jit(lambda x: 2 * x + 1, donate_argnums=0, out_shardings=sharding)
    x = jax.device_put(np.random.default_rng(0).normal(size=shape).astype("f"), sharding)
    expected = np.array(x)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, {"params": x}, {}, {})
        for _ in range(5):
            x = advance(x)
        x.block_until_ready()
    np.testing.assert_array_equal(load_params(tmp_path), expected)


def test_small_replicated_arrays_are_saved_without_a_compilation(
    tmp_path: Path, sharding: NamedSharding, caplog: pytest.LogCaptureFixture
) -> None:
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    x = jax.device_put(np.random.default_rng(0).normal(size=(24, 7)).astype("f"), replicated)
    with Checkpoints(tmp_path, keep=2) as checkpoints, jax.log_compiles():
        checkpoints.save(1, {"params": x}, {}, {})
        checkpoints.wait()
    assert not [text for text in caplog.messages if "ompil" in text]
    np.testing.assert_array_equal(load_params(tmp_path), x)


@pytest.mark.parametrize("second", [1, 2])
def test_a_save_waits_for_the_writes_of_a_failed_one(
    tmp_path: Path, sharding: NamedSharding, second: int
) -> None:
    """Orbax raises an error of a save while other threads still write and complete it."""
    writing = threading.Event()

    def complete_late() -> None:
        writing.set()
        time.sleep(0.5)

    state = random_state(0, sharding)
    with Checkpoints(tmp_path, keep=2, before_complete=complete_late) as checkpoints:
        checkpoints.save(1, state, {}, {})
        assert writing.wait(60)
        checkpoints._lost = CheckpointWriteError("an upload is refused")
        checkpoints.save(second, state, {}, {})
        assert checkpoints.is_saved()
    rounds = complete_rounds(tmp_path / "checkpoints")
    assert rounds == sorted({1, second})
    assert not any(find_damage(tmp_path / "checkpoints" / str(number)) for number in rounds)


def test_training_continues_while_a_checkpoint_is_written(
    tmp_path: Path, sharding: NamedSharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save` returns before its files are complete; the next `save` waits for them."""
    released, reached = threading.Event(), threading.Event()

    def write_checksums_late(folder: Path) -> None:
        reached.set()
        assert released.wait(60)
        write_checksums(folder)

    monkeypatch.setattr(checkpoint, "write_checksums", write_checksums_late)
    state = random_state(1, sharding)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state, {}, {})
        assert reached.wait(60)
        trained = jax.jit(lambda x: x + 1)(state.params["w"])  # a round
        assert np.isfinite(trained).all() and checkpoints.latest_round() is None
        released.set()
        checkpoints.save(2, state, {}, {})
        assert checkpoints.latest_round() == 1
    assert latest_round(tmp_path) == 2


def test_a_save_asks_jax_about_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The training asks before each round. JAX stops all processes one round after the newest
    # question: if a save of an older round asks last, that round has passed, and none stops.
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, {"w": jnp.ones(2)}, {}, {})
    assert latest_round(tmp_path) == 2 and asked == []


def test_a_checkpoint_that_a_kill_left_unfinished_does_not_count(
    tmp_path: Path, sharding: NamedSharding
) -> None:
    state = random_state(1, sharding)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(3, state, {}, {})
    part = tmp_path / "checkpoints" / "5.orbax-checkpoint-tmp"
    (part / "state").mkdir(parents=True)
    (part / "state" / "manifest.ocdbt").write_bytes(b"half")
    assert latest_round(tmp_path) == 3
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        assert checkpoints.latest_round() == 3
        checkpoints.save(4, state, {}, {})
    assert {path.name for path in part.parent.iterdir()} == {"3", "4"}
    part.mkdir()
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(5, state, {}, {})
    assert latest_round(tmp_path) == 5


def test_params_are_loaded_as_numpy_without_the_state(
    tmp_path: Path, sharding: NamedSharding
) -> None:
    state = random_state(1, sharding)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, state, {}, {})
    params = load_params(tmp_path)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))
    assert_same_bits(params, state.params)
    assert load_field(tmp_path, "step", 3) == 1
    with pytest.raises(KeyError, match=r"no field 'clients', expected one of .*step"):
        load_field(tmp_path, "clients")


class ComputedParams(NamedTuple):
    """A state whose model is computed from its fields, as in PAPA or self-tuning."""

    models: dict[str, jax.Array]

    @property
    def params(self) -> dict[str, jax.Array]:
        return jax.tree.map(lambda x: x.mean(axis=0), self.models)


def test_params_that_a_state_computes_are_loaded(tmp_path: Path, sharding: NamedSharding) -> None:
    values = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    state = ComputedParams({"w": jax.device_put(values, sharding), "b": jnp.arange(2.0)})
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, state, {}, {})
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert_same_bits(checkpoints.restore_state(like(state)), state)
    assert_same_bits(load_params(tmp_path), jax.tree.map(np.asarray, state.params))
    over_clients = NamedSharding(sharding.mesh, PartitionSpec("clients"))
    wanted = {
        "w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=over_clients),
        "b": jax.ShapeDtypeStruct(
            (), jnp.float32, sharding=NamedSharding(sharding.mesh, PartitionSpec())
        ),
    }
    loaded = load_params(tmp_path, like=wanted)
    assert_same_bits(loaded, state.params)
    assert loaded["w"].sharding == over_clients


@pytest.mark.parametrize("round_number", [None, 4])
def test_a_missing_checkpoint_raises(tmp_path: Path, round_number: int | None) -> None:
    with pytest.raises(FileNotFoundError, match="Train there first"):
        load_params(tmp_path, round_number)


@pytest.mark.parametrize("islands", [2, 8])
def test_a_state_is_restored_for_another_number_of_participants(
    tmp_path: Path, islands: int
) -> None:
    random = np.random.default_rng(0)

    def state(count: int, fsdp: int) -> tuple[dict[str, Any], Any]:
        mesh = make_mesh(islands=count, fsdp=fsdp)
        spec = {"w": PartitionSpec("fsdp"), "momentum": PartitionSpec("islands", "fsdp")}
        values = {
            "w": random.normal(size=(8, 3)).astype("f"),
            "momentum": random.normal(size=(count, 8, 3)).astype("f"),
        }
        where = {name: NamedSharding(mesh, s) for name, s in spec.items()}
        return values, jax.device_put(values, where)

    values, saved = state(4, 2)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, saved, {}, {})
    _, other = state(islands, 8 // islands)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        restored = checkpoints.restore_state(like(other), num_participants=islands)
        with pytest.raises(ValueError, match=r"momentum has shape \[4, 8, 3\], expected"):
            checkpoints.restore_state(like(other))
        with pytest.raises(ValueError, match=r"momentum in only one.*--training\.begin_from"):
            checkpoints.restore_state(like({"w": other["w"]}))
    np.testing.assert_array_equal(restored["w"], values["w"])
    assert restored["momentum"].sharding == other["momentum"].sharding
    saved_momentum = values["momentum"]
    if islands == 2:
        expected = (saved_momentum[::2] + saved_momentum[1::2]) / 2
    else:
        expected = np.repeat(saved_momentum, 2, axis=0)
    np.testing.assert_allclose(restored["momentum"], expected, rtol=1e-6)


@pytest.mark.parametrize("damage", ["progress", "state", "array"])
def test_damaged_files_raise_and_the_checkpoint_before_can_be_used(
    tmp_path: Path, sharding: NamedSharding, damage: str
) -> None:
    states = [random_state(seed, sharding) for seed in (1, 2)]
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for number, state in enumerate(states, 1):
            checkpoints.save(number, state, {"round": number}, {})
    newest = tmp_path / "checkpoints" / "2"
    if damage == "array":
        paths = [path for path in (newest / "state").rglob("d/*") if path.is_file()]
        assert paths
        for path in paths:
            path.write_bytes(path.read_bytes()[:10])
    else:
        shutil.rmtree(newest / damage)
    words = "The checkpoint of round 2 is damaged: .* delete .*/2 to resume from .* of round 1"
    with Checkpoints(tmp_path, keep=2) as checkpoints, pytest.raises(OSError, match=words):
        checkpoints.restore_position()
        checkpoints.restore_state(like(states[1]))
    shutil.rmtree(newest)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore_position().stream == {"round": 1}
        assert_same_bits(checkpoints.restore_state(like(states[0])), states[0])


def test_large_arrays_are_written_in_chunks(
    tmp_path: Path, sharding: NamedSharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_rows, "CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr(changed_rows, "FILE_BYTES", 1 << 15)
    w = np.random.default_rng(0).normal(size=(2048, 63)).astype("f")
    params = {"w": jnp.asarray(w), "odd": jnp.asarray(w.ravel()[:8191])}
    state = random_state(1, sharding)._replace(params=params)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {}, {})
        checkpoints.wait()
    sizes = [path.stat().st_size for path in (tmp_path / "checkpoints/1/state").rglob("d/*")]
    # An array as one chunk, or a buffer for all chunks, would be one file of half a megabyte.
    assert max(sizes) < 1 << 17 < w.nbytes / 2 and sum(sizes) > w.nbytes / 2
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert_same_bits(checkpoints.restore_state(like(state)), state)
    assert_same_bits(load_params(tmp_path), jax.tree.map(np.asarray, state.params))

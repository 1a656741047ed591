"""Runs that resume with another number of islands and on another mesh, for several methods."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from several_processes import finish, start
from small_regression import RandomRounds

from fedpax import Cohort
from fedpax.aggregators import compressed_mean, quantized_mean
from fedpax.aggregators.codecs import e3m0
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import (
    branch_train_merge,
    data_parallel,
    diloco,
    eager_diloco,
    noloco,
    streaming_diloco,
)
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.checkpoints.participant_states import participant_weights
from fedpax.checkpoints.saved_state import load_params
from fedpax.parallel.mesh import MeshConfig, available_devices
from fedpax.run_files.metrics import read_metrics, select
from fedpax.training.compiled_round import with_shardings
from fedpax.training.experiment import Experiment, Run, Shardings
from fedpax.training.shardings import state_shardings
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

FEATURES, LAYERS, STEPS, BATCH = 4, 6, 6, 4


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict]:
    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        return x + 0.1 * jnp.tanh(x @ kernel), None

    x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2), {}


def make_diloco(islands: int) -> FederatedAlgorithm:
    inner = optax.adamw(optax.cosine_decay_schedule(0.02, 100))
    return diloco(loss_fn, islands=islands, inner_optimizer=inner, aggregator=quantized_mean(4))


def make_streaming(islands: int) -> FederatedAlgorithm:
    return streaming_diloco(
        loss_fn, islands=islands, inner_optimizer=optax.adam(0.02), fragments=2, mixing=0.5
    )


def make_streaming_e3m0(islands: int) -> FederatedAlgorithm:
    return streaming_diloco(
        loss_fn,
        islands=islands,
        inner_optimizer=optax.adam(0.02),
        fragments=3,
        mixing=0.5,
        aggregator=compressed_mean(e3m0(), error_feedback=True),
    )


METHODS = {
    "diloco": make_diloco,
    "streaming_e3m0": make_streaming_e3m0,
    "streaming_diloco": make_streaming,
    "data_parallel": lambda n: data_parallel(loss_fn, islands=n, optimizer=optax.adam(0.02)),
    "eager_diloco": lambda n: eager_diloco(loss_fn, islands=n, inner_optimizer=optax.adam(0.02)),
    "noloco": lambda n: noloco(loss_fn, islands=n, inner_optimizer=optax.adam(0.02)),
    "branch_train_merge": lambda n: branch_train_merge(
        loss_fn, islands=n, optimizer=optax.adam(0.02)
    ),
}
# The fields of a state that hold one entry per island; all others are the server's.
PLACED = {
    "diloco": {"inner_optimizer_state", "aggregator_state"},
    "streaming_diloco": {"inner_optimizer_state", "local_params"},
    "data_parallel": set(),
}
PLACED_IN_RUNS = PLACED | {
    "streaming_e3m0": {"inner_optimizer_state", "local_params", "aggregator_state"},
}


class Layout(NamedTuple):
    """A number of islands, and a mesh for them."""

    islands: int
    mesh: MeshConfig


LAYOUTS = {
    "1 island, fsdp 2": Layout(1, MeshConfig(fsdp=2)),
    "2 islands, islands 2 x fsdp 2": Layout(2, MeshConfig(islands=2, fsdp=2)),
    "2 islands, fsdp 4": Layout(2, MeshConfig(fsdp=4)),
    "4 islands, islands 4 x fsdp 2": Layout(4, MeshConfig(islands=4, fsdp=2)),
    "4 islands, islands 2 x fsdp 4": Layout(4, MeshConfig(islands=2, fsdp=4)),
}
THREE = Layout(3, MeshConfig(islands=3, fsdp=2))
TWO_OF_FOUR = Layout(2, MeshConfig(islands=2, fsdp=4))


def init_params(key: jax.Array) -> Any:
    layers = jax.random.normal(key, (LAYERS, FEATURES, FEATURES))
    return {"layers": layers, "head": jax.random.normal(key, (FEATURES,))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Islands(Experiment):
    """A method of islands on a random regression."""

    method: str
    islands: int

    def build(self) -> Run:
        mesh = self.mesh.make(available_devices()[: self.mesh.size])
        axis = "islands" if "islands" in mesh.shape else None
        fsdp = "fsdp" if "fsdp" in mesh.shape else None
        return Run(
            algorithm=METHODS[self.method](self.islands),
            init=init_params,
            cohorts=Rounds((self.islands, STEPS, BATCH), FEATURES, seed=0),
            evaluate=lambda params: {"loss": float(jnp.sum(params["head"] ** 2))},
            mesh=mesh,
            shardings=Shardings(
                params={
                    "layers": NamedSharding(mesh, PartitionSpec(None, fsdp)),
                    "head": NamedSharding(mesh, PartitionSpec(fsdp)),
                },
                cohort=NamedSharding(mesh, PartitionSpec(axis)),
            ),
            items_per_round=self.islands * STEPS * BATCH,
            placement="islands",
        )


class Rounds(RandomRounds):
    """Cohorts that are a function of their shape and the round."""

    def __next__(self) -> Any:
        return Cohort(super().__next__())

    def get_state(self) -> dict[str, Any]:
        return {"round": self.round, "settings": list(self.shape)}

    def set_state(self, state: dict[str, Any]) -> None:
        if state["settings"] != list(self.shape):
            raise ValueError(f"islands is {self.shape[0]} and was {state['settings'][0]}")
        self.round = state["round"]


def experiment_of(method: str, layout: Layout, rounds: int) -> Islands:
    return Islands(
        method=method,
        islands=layout.islands,
        mesh=layout.mesh,
        training=TrainingConfig(rounds=rounds, evaluate_every=0, checkpoint_every=0),
    )


@functools.cache
def abstract_state(method: str, layout: Layout) -> Any:
    """Return a method's state as shapes, dtypes and shardings."""
    run = experiment_of(method, layout, 1).build()
    params = jax.eval_shape(run.init, jax.random.key(0))
    state = jax.eval_shape(run.algorithm.init, params)
    shardings = state_shardings(
        state,
        params,
        run.shardings.params,
        run.mesh,
        placement="islands",
        num_participants=layout.islands,
    )
    return with_shardings(state, shardings)


@functools.cache
def random_state(method: str, layout: Layout) -> Any:
    """Draw a state as after some rounds: every leaf random, counts too."""
    random = np.random.default_rng(layout.islands)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.device_put(random.integers(9, size=leaf.shape, dtype="i4"), leaf.sharding)
        return jax.device_put(random.normal(size=leaf.shape).astype("f"), leaf.sharding)

    return jax.tree.map(draw, abstract_state(method, layout))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a random state once, and returns its folder."""

    @functools.cache
    def save(method: str, layout: Layout) -> Path:
        folder = tmp_path_factory.mktemp("run")
        with Checkpoints(folder, keep=1) as checkpoints:
            checkpoints.save(3, random_state(method, layout), {}, {}, layout.islands)
        return folder

    return save


def assert_same_bits(one: Any, other: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(one, other)
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


ONE, TWO, TWO_TOGETHER, FOUR, FOUR_IN_PAIRS = LAYOUTS
MOVES = [
    (method, *move)
    for method in PLACED
    for move in (*itertools.permutations(LAYOUTS, 2), (FOUR, None))
]
OFTEN = {
    ("diloco", FOUR, None),
    ("diloco", FOUR_IN_PAIRS, TWO),
    ("diloco", TWO_TOGETHER, FOUR),
    ("streaming_diloco", FOUR, TWO_TOGETHER),
    ("data_parallel", ONE, FOUR),
}


def mark_slow(moves: list[Any]) -> list[Any]:
    return [m if m in OFTEN else pytest.param(*m, marks=pytest.mark.slow) for m in moves]


@pytest.mark.parametrize(("method", "before", "after"), mark_slow(MOVES))
def test_server_values_keep_their_bits_and_island_values_follow_the_rule(
    saved: Any, method: str, before: str, after: str | None
) -> None:
    old, new = LAYOUTS[before], LAYOUTS.get(after or "", THREE)
    state, wanted = random_state(method, old), abstract_state(method, new)
    with Checkpoints(saved(method, old), keep=1) as checkpoints:
        restored = checkpoints.restore_state(wanted, new.islands)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
        lambda x: x.sharding, wanted
    )
    weights = participant_weights(old.islands, new.islands)
    for name in state._fields:
        result, former = getattr(restored, name), getattr(state, name)
        if name not in PLACED[method]:
            assert_same_bits(result, former)
            continue
        leaves = zip(jax.tree.leaves(result), jax.tree.leaves(former), strict=True)
        for x, y in leaves:
            y = np.asarray(y)
            if y.dtype == np.int32:
                assert x.tolist() == y[weights.argmax(axis=1)].tolist()
            else:
                expected = np.einsum("mn,n...->m...", weights, y)
                np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eager_diloco", "noloco"])
def test_the_model_that_is_a_mean_over_islands_is_kept(saved: Any, method: str) -> None:
    old, new = LAYOUTS[FOUR], THREE
    with Checkpoints(saved(method, old), keep=1) as checkpoints:
        restored = checkpoints.restore_state(abstract_state(method, new), new.islands)
    chex.assert_trees_all_close(
        jax.device_get(restored.params),
        jax.device_get(random_state(method, old).params),
        rtol=1e-5,
        atol=1e-6,
    )


def test_states_are_copied_in_turn_when_asked(saved: Any) -> None:
    old, new = LAYOUTS[FOUR], THREE
    with Checkpoints(saved("diloco", old), keep=1) as checkpoints:
        restored = checkpoints.restore_state(abstract_state("diloco", new), new.islands, "copy")
    state = random_state("diloco", old)
    first = jax.tree.map(lambda x: np.asarray(x)[:3], state.inner_optimizer_state)
    assert_same_bits(restored.inner_optimizer_state, first)


def test_experts_of_domains_are_refused_for_another_number(saved: Any) -> None:
    old, new = LAYOUTS[FOUR], LAYOUTS[TWO_TOGETHER]
    method = "branch_train_merge"
    with Checkpoints(saved(method, old), keep=1) as checkpoints:
        with pytest.raises(ValueError, match=r"expert belongs to a domain.*fedpax export"):
            checkpoints.restore_state(abstract_state(method, new), new.islands)
        # Another mesh for the same islands is no other number.
        same = LAYOUTS[FOUR_IN_PAIRS]
        restored = checkpoints.restore_state(abstract_state(method, same), same.islands)
    assert_same_bits(restored, random_state(method, old))


def test_layers_are_not_taken_for_islands(saved: Any) -> None:
    """A model of other layers raises, even where there are as many layers as islands."""
    layout = LAYOUTS[TWO_TOGETHER]
    wanted = abstract_state("diloco", layout)
    fewer = wanted._replace(
        params=wanted.params | {"layers": wanted.params["layers"].update(shape=(2, 4, 4))}
    )
    outer = jax.tree.map(
        lambda x: x.update(shape=(2, 4, 4)) if x.shape == (6, 4, 4) else x,
        wanted.outer_optimizer_state,
    )
    with Checkpoints(saved("diloco", layout), keep=1) as checkpoints:
        for state in (fewer, wanted._replace(outer_optimizer_state=outer)):
            with pytest.raises(ValueError, match=r"layers has shape \[6, 4, 4\], expected \[2, 4"):
                checkpoints.restore_state(state, layout.islands)


# ---- whole runs: training continues from exactly this state, at the same round of the data

RUNS = [
    ("diloco", FOUR, None),
    *itertools.product(PLACED, (TWO, FOUR_IN_PAIRS), (ONE, FOUR, TWO_TOGETHER)),
    *itertools.product(["streaming_e3m0"], (TWO, FOUR_IN_PAIRS), (FOUR, TWO_TOGETHER)),
]


def plain_rounds(method: str, state: Any, islands: int, rounds: range) -> tuple[Any, list[float]]:
    """Run rounds of a method in a plain loop, without a mesh."""
    step, losses = jax.jit(METHODS[method](islands).round), []
    stream = Rounds((islands, STEPS, BATCH), FEATURES, seed=0)
    stream.round = rounds.start
    for _ in rounds:
        state, metrics = step(state, next(stream))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.slow
@pytest.mark.parametrize(("method", "before", "after"), mark_slow(RUNS))
def test_a_run_continues_from_the_resized_state_at_the_same_round_of_the_data(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    before: str,
    after: str | None,
) -> None:
    old, new = LAYOUTS[before], LAYOUTS.get(after or "", THREE)
    train(experiment_of(method, old, 3), tmp_path)
    result = train(experiment_of(method, new, 5), tmp_path, allow_config_change=["islands", "mesh"])
    assert (result.rounds, result.rounds_trained, result.finished) == (5, 2, True)
    if old.islands != new.islands:
        messages = capsys.readouterr().err
        assert f"{new.islands} islands continue from the states of {old.islands}" in messages
        assert "The data continue after round 3" in messages

    # As a state of init for the new islands, with the former values.
    state = METHODS[method](old.islands).init(init_params(jax.random.key(0)))
    state, losses = plain_rounds(method, state, old.islands, range(3))
    weights = participant_weights(old.islands, new.islands)

    def resize(x: jax.Array) -> jax.Array:
        if not x.ndim:  # the aggregator's round
            return x
        if jnp.issubdtype(x.dtype, jnp.integer):
            return x[weights.argmax(axis=1)]
        return jnp.einsum("mn,n...->m...", weights.astype(np.float32), x)

    resized = {name: jax.tree.map(resize, getattr(state, name)) for name in PLACED_IN_RUNS[method]}
    state, further = plain_rounds(method, state._replace(**resized), new.islands, range(3, 5))
    lines = select(read_metrics(tmp_path), "training")
    items = np.cumsum([STEPS * BATCH * n for n in [old.islands] * 3 + [new.islands] * 2])
    assert [line["items"] for line in lines] == items.tolist()
    actual = [line["loss"] for line in lines]
    np.testing.assert_allclose(actual, losses + further, rtol=2e-4)
    chex.assert_trees_all_close(
        load_params(tmp_path), jax.device_get(state.params), rtol=2e-3, atol=2e-4
    )


def diloco_islands() -> Islands:
    """DiLoCo with error feedback on four islands of two devices."""
    return experiment_of("diloco", LAYOUTS[FOUR], 3)


def streaming_islands() -> Islands:
    """Streaming DiLoCo in 4 bits with error feedback on four islands of two devices."""
    return experiment_of("streaming_e3m0", LAYOUTS[FOUR], 5)


@pytest.mark.slow
def test_other_islands_and_other_processes_at_once(tmp_path: Path) -> None:
    """4 islands in 2 processes, 2 islands in 2, 4 in 1: as all of it in one process."""
    layouts = [(2, LAYOUTS[FOUR], 3), (2, TWO_OF_FOUR, 5), (1, LAYOUTS[FOUR], 7)]
    allowed = ["islands", "mesh", "training.rounds"]
    for count, layout, rounds in layouts:
        experiment = experiment_of("diloco", layout, rounds)
        train(experiment, tmp_path / "one", allow_config_change=allowed)
        if count == 1:
            train(experiment, tmp_path / "several", allow_config_change=allowed)
            continue
        fields = (
            f"--islands={layout.islands}",
            f"--mesh.islands={layout.mesh.islands}",
            f"--mesh.fsdp={layout.mesh.fsdp}",
            f"--training.rounds={rounds}",
            f"--allow_config_change={','.join(allowed)}",
        )
        exp = "test_resume_on_other_islands:diloco_islands"
        for status, _, errors in finish(start(count, tmp_path / "several", *fields, exp=exp)):
            assert status == 0, errors
    chex.assert_trees_all_close(
        load_params(tmp_path / "several"), load_params(tmp_path / "one"), rtol=1e-3, atol=1e-5
    )
    losses = [
        [line["loss"] for line in select(read_metrics(tmp_path / name), "training")]
        for name in ("several", "one")
    ]
    assert len(losses[0]) == 7
    np.testing.assert_allclose(*losses, rtol=1e-4)

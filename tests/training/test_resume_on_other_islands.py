"""Runs that resume with another number of islands and on another mesh, for several methods."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from island_layouts import (
    BATCH,
    FEATURES,
    LAYOUTS,
    METHODS,
    PLACED,
    PLACED_IN_RUNS,
    STEPS,
    THREE,
    TWO_OF_FOUR,
    Islands,
    Layout,
    Rounds,
    abstract_state,
    assert_same_bits,
    experiment_of,
    init_params,
    random_state,
)
from several_processes import finish, start

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.checkpoints.participant_states import resize_weights
from fedpax.checkpoints.saved_state import load_params
from fedpax.experiments.fedavg_synthetic import fedavg_synthetic
from fedpax.parallel.mesh import MeshConfig
from fedpax.run_files.metrics import read_metrics, select
from fedpax.settings.client_methods import method
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

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
    weights = resize_weights(old.islands, new.islands)
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
    weights = resize_weights(old.islands, new.islands)

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


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_cohort_of_another_size_continues_from_no_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The state of FedAvg has none of a client, and the store of SCAFFOLD those of all clients."""

    def experiment(size: int, rounds: int) -> Any:
        training = TrainingConfig(rounds=rounds, evaluate_every=0, checkpoint_every=0)
        cohort = CohortConfig(size=size, batch_size=4)
        base = dataclasses.replace(fedavg_synthetic(), cohort=cohort, method=method(name))
        return dataclasses.replace(base, training=training, mesh=MeshConfig(clients=1))

    train(experiment(4, 1), tmp_path)
    result = train(experiment(2, 2), tmp_path, allow_config_change=["cohort"])
    assert result.rounds_trained == 1
    assert "continue from the states" not in capsys.readouterr().err

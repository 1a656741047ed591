"""Parameters that a run reads from a folder: frozen ones, and initial ones."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small_regression import RandomRounds, Regression, regression

import fedpax
from fedpax.algorithms import fedavg
from fedpax.checkpoints import load_params
from fedpax.parallel.mesh import MeshConfig
from fedpax.planning.ahead_of_time import _argument_bytes
from fedpax.training.compiled_round import compile_round, init_state, with_shardings
from fedpax.training.experiment import (
    Experiment,
    Run,
    Shardings,
    StoredParams,
    with_frozen_argument,
)
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

FEATURES, HIDDEN = 96, 128


class Rounds(RandomRounds):
    def __next__(self) -> Any:
        return fedpax.Cohort(super().__next__())


@dataclasses.dataclass(frozen=True)
class FrozenHidden(Experiment):
    """A regression whose hidden layer is frozen and sharded, and whose output layer trains."""

    def build(self) -> Run:
        mesh = self.mesh.make()
        sharded = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
        shapes = with_shardings(
            {"hidden": jax.ShapeDtypeStruct((FEATURES, HIDDEN), np.float32)}, sharded
        )
        values = np.random.default_rng(0).normal(size=(FEATURES, HIDDEN)).astype(np.float32)

        def loss_fn(frozen: Any, params: Any, batch: Any) -> tuple[jax.Array, None]:
            predicted = jnp.tanh(batch["x"] @ frozen["hidden"]) @ params
            return jnp.mean((predicted - batch["y"]) ** 2), None

        def make(frozen: Any) -> Any:
            return fedavg(
                lambda params, batch: loss_fn(frozen, params, batch),
                cohort_size=4,
                client_optimizer=optax.sgd(1e-3),
            )

        def load() -> Any:
            return {"hidden": jax.device_put(values, sharded)}

        return Run(
            algorithm=with_frozen_argument(make, shapes),
            init=lambda key: jnp.zeros(HIDDEN),
            cohorts=Rounds((4, 2, 8), FEATURES, seed=0),
            evaluate=lambda params: {"loss": float(jnp.sum(params))},
            mesh=mesh,
            shardings=Shardings(
                params=NamedSharding(mesh, PartitionSpec()),
                cohort=NamedSharding(mesh, PartitionSpec("clients")),
            ),
            items_per_round=64,
            placement="clients",
            cohort_shapes=jax.eval_shape(lambda: next(Rounds((4, 2, 8), FEATURES, seed=0))),
            frozen=StoredParams("weights=here", shapes, load),
        )


EXPERIMENT = FrozenHidden(
    mesh=MeshConfig(clients=4, fsdp=2),
    training=TrainingConfig(rounds=1, evaluate_every=1, checkpoint_every=1),
)


def test_frozen_values_are_arguments_and_not_constants_of_the_round() -> None:
    run = EXPERIMENT.build()
    assert run.frozen is not None
    frozen = run.frozen.load()
    with jax.set_mesh(run.mesh):
        cohort = jax.device_put(next(run.cohorts), run.shardings.cohort)
        compiled = compile_round(run, cohort)
        state = init_state(run, compiled.state, seed=0)
        new, metrics = compiled.round(state, cohort, frozen)
    # Half of the matrix, as fsdp shards it, among the parameters of the program; no constants.
    text = compiled.round.as_text() or ""
    assert re.search(rf"f32\[{FEATURES},{HIDDEN // 2}\]\S* parameter", text)
    sizes = [re.findall(r"\d+", line.partition("[")[2].partition("]")[0])
             for line in text.splitlines() if " constant(" in line]  # fmt: skip
    assert sizes and max(np.prod([int(n) for n in size]) for size in sizes) <= 16
    assert jax.tree.structure(new) == jax.tree.structure(compiled.state)
    assert not frozen["hidden"].is_deleted()  # donation is for the state
    # The method of a regression on the features that the frozen layer computes.
    batches = jax.device_get(cohort.batches)
    features = np.tanh(batches["x"] @ np.asarray(frozen["hidden"]))
    loss_fn = lambda w, b: (jnp.mean((b["x"] @ w - b["y"]) ** 2), None)
    plain = fedavg(loss_fn, cohort_size=4, client_optimizer=optax.sgd(1e-3))
    expected, expected_metrics = plain.round(
        plain.init(jnp.zeros(HIDDEN)), fedpax.Cohort({"x": features, "y": batches["y"]})
    )
    np.testing.assert_allclose(new.params, expected.params, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-5)


def test_frozen_values_are_in_no_checkpoint_and_in_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(EXPERIMENT, tmp_path)
    assert load_params(tmp_path).shape == (HIDDEN,)
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoints").rglob("*"))
    assert size < 4 * FEATURES * HIDDEN
    assert "reading 12,288 frozen parameters, weights=here" in capsys.readouterr().err
    assert _argument_bytes(EXPERIMENT.build())["frozen values"] == 4 * FEATURES * HIDDEN // 2


@dataclasses.dataclass(frozen=True)
class Continued(Regression):
    """A regression whose initial parameters are read; reading raises where they are `missing`."""

    missing: bool = False

    def build(self) -> Run:
        run = super().build()
        shapes = with_shardings(jax.eval_shape(run.init, jax.random.key(0)), run.shardings.params)

        def load() -> Any:
            if self.missing:
                raise FileNotFoundError("the weights are not there")
            return jax.tree.map(
                lambda leaf: jax.device_put(np.full(leaf.shape, 0.25, np.float32), leaf.sharding),
                shapes,
            )

        return run._replace(initial=StoredParams("weights=here", shapes, load))


def test_a_run_begins_from_what_it_reads_and_resumes_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = regression()
    short = dataclasses.replace(base.training, rounds=1)
    experiment = Continued(training=short, mesh=base.mesh, learning_rate=1e-30)
    train(experiment, tmp_path)
    assert "reading the initial parameters, weights=here" in capsys.readouterr().err
    for leaf in jax.tree.leaves(load_params(tmp_path)):
        np.testing.assert_allclose(leaf, 0.25, atol=2e-3)  # the method adds noise below 1e-3
    longer = dataclasses.replace(
        experiment, training=dataclasses.replace(short, rounds=2), missing=True
    )
    result = train(longer, tmp_path, allow_config_change=["missing", "training.rounds"])
    assert result.rounds_trained == 1
    words = "resuming from round 1; not reading weights=here again"
    assert words in capsys.readouterr().err


def test_weights_that_are_missing_are_told_before_the_folder_is_bound(tmp_path: Path) -> None:
    base = regression()
    experiment = Continued(training=base.training, mesh=base.mesh, missing=True)
    with pytest.raises(FileNotFoundError, match="the weights are not there"):
        train(experiment, tmp_path)
    assert not (tmp_path / "config.json").exists()

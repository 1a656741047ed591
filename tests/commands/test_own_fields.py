"""Experiments of a user whose fields choose a method, an aggregator and a cohort."""

from pathlib import Path

import pytest
from small_runs import Command

OWN = """
import dataclasses, jax.numpy as jnp, numpy as np, optax
from fedpax.data import ClientSampler, cohort_rounds, concatenate_clients
from fedpax.experiments import AggregatorConfig, ClientTraining, MethodConfig, aggregator, method
from fedpax.training import Experiment, Run, TrainingConfig

RANDOM = np.random.default_rng(0)
CLIENTS = [{"x": RANDOM.normal(size=(6, 3)).astype(np.float32)} for _ in range(8)]

def loss_fn(w, batch):
    error = jnp.mean((batch["x"] - w) ** 2, axis=-1)
    return jnp.sum(error * batch["mask"]) / jnp.maximum(batch["mask"].sum(), 1), {}

@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(Experiment):
    method: MethodConfig = method("fedavg")
    aggregator: AggregatorConfig = aggregator("mean")
    cohort_size: int = 4
    chunk_size: int = 1

    def build(self):
        examples, population = concatenate_clients(CLIENTS)
        sampler = ClientSampler(8, self.cohort_size, seed=0)
        training = ClientTraining(
            cohort_size=self.cohort_size, num_clients=8, learning_rate=0.1,
            server_optimizer=optax.sgd(1.0), chunk_size=self.chunk_size,
            aggregator=self.aggregator.make(seed=0, expected_participants=self.cohort_size),
        )
        rounds = cohort_rounds(
            examples, population, sampler, batch_size=2, preprocess=dict,
            chunk_size=self.chunk_size,
        )
        return Run(
            algorithm=self.method.make(loss_fn, training), init=lambda key: jnp.zeros(3),
            cohorts=rounds, cohort_shapes=rounds.shapes, mesh=self.mesh.make(),
            evaluate=lambda w: {"loss": 0.0}, items_per_round=24, placement="clients",
        )

def own():
    return Own(training=TrainingConfig(rounds=1, evaluate_every=1, checkpoint_every=1))
"""
PRIVATE = ("--aggregator=private_mean", "--aggregator.noise_multiplier=1")
FEEDBACK = ("--aggregator=compressed_mean", "--aggregator.bits=8")


@pytest.fixture
def train(command: Command, tmp_path: Path):
    file = tmp_path / f"own_{tmp_path.name}.py"
    file.write_text(OWN)
    common = (f"--exp={file}:own", f"--job_log_dir={tmp_path / 'run'}")
    return lambda *arguments: command("train", *common, *arguments)


def test_a_private_run_of_an_own_experiment_is_checked_and_told(train) -> None:
    status, _, errors = train(*PRIVATE, "--method=scaffold")
    assert status == 2 and "Traceback" not in errors
    assert "method=scaffold with a private aggregator: clients send changes of controls" in errors
    assert " (called by own_" in errors and ", in build)" in errors
    status, _, errors = train(*PRIVATE)
    assert status == 0
    for words in (
        "private: the metric epsilon is of the model",
        "not private: the metrics of clients",
        "simulated in one program: the noise is drawn from the aggregator's seed",
    ):
        assert errors.count(words) == 1


@pytest.mark.parametrize("engine", [[], ["--engine=out_of_core"]])
def test_error_feedback_with_sampled_clients_is_told(train, engine: list[str]) -> None:
    words = "error feedback with 4 of 8 clients in a round: the residual of one client is added"
    status, _, errors = train(*FEEDBACK, "--aggregator.error_feedback=True", *engine)
    assert (status, errors.count(words)) == (0, 1)


@pytest.mark.parametrize("settings", [("--aggregator.error_feedback=True", "--cohort_size=8"), ()])
def test_no_residual_of_another_client_is_told_of_none(train, settings: tuple[str, ...]) -> None:
    status, _, errors = train(*FEEDBACK, *settings)
    assert status == 0 and "error feedback" not in errors


@pytest.mark.parametrize("flag", [("--chunk_size=2",), ("--chunk_size", "2")])
def test_a_field_wins_over_a_flag_of_its_name(train, flag, tmp_path: Path) -> None:
    assert train(*flag)[0] == 0
    assert '"chunk_size": 2' in (tmp_path / "run" / "config.json").read_text()


@pytest.mark.parametrize("name", ["exp", "job_log_dir"])
def test_a_field_with_the_name_of_a_flag_of_all_commands_raises(
    train, name: str, tmp_path: Path
) -> None:
    (tmp_path / f"own_{tmp_path.name}.py").write_text(OWN.replace("chunk_size", name))
    status, _, errors = train()
    assert status == 2 and f"has a field {name}, the name of a flag" in errors


def test_an_error_of_a_call_in_build_has_its_place_and_no_traceback(train) -> None:
    status, _, errors = train("--cohort_size=5000")
    assert status == 2 and "Traceback" not in errors
    assert "cohort_size is 5000, but the population has 8 clients" in errors
    assert ", in build)" in errors

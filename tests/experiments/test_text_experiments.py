"""Tests of the experiments on text."""

import dataclasses
import itertools

import chex
import jax
import numpy as np
import pytest

from fedpax.commands.parts.options import configure
from fedpax.experiments import diloco_text as module
from fedpax.experiments.text_experiment import TextConfig
from fedpax.models.transformer import TransformerConfig
from fedpax.parallel.mesh import MeshConfig
from fedpax.run_files.metrics import read_metrics, select
from fedpax.training.compiled_round import compile_round, with_shardings
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

EXPERIMENTS = (module.diloco_text, module.data_parallel_text, module.single_island_text)
EIGHT_DEVICES = MeshConfig(islands=4, fsdp=2)


@pytest.fixture
def small(tmp_path_factory):
    """Return a function that shrinks an experiment to seconds."""

    def shrink(experiment):
        return dataclasses.replace(
            experiment,
            model=TransformerConfig(
                vocab_size=256, num_layers=1, embed_dim=24, num_heads=2, num_kv_heads=1, mlp_dim=52
            ),
            data=TextConfig(
                local_steps=experiment.data.local_steps,
                batch_size=2,
                seq_len=16,
                heldout_tokens=1024,
            ),
            mesh=EIGHT_DEVICES,
            training=TrainingConfig(rounds=2, evaluate_every=1, checkpoint_every=0),
        )

    return shrink


def test_the_three_differ_in_method_islands_and_tuned_hyperparameters_alone():
    diloco, parallel, single = (e() for e in EXPERIMENTS)
    for name in ("model", "data", "training"):
        assert getattr(diloco, name) == getattr(parallel, name) == getattr(single, name)
    tuned = {"learning_rate": 1.0, "b1": 0.0}
    optimizers = [dataclasses.replace(e.optimizer, **tuned) for e in (diloco, parallel, single)]
    assert optimizers[0] == optimizers[1] == optimizers[2]
    assert diloco.mesh == parallel.mesh and diloco.islands == parallel.islands == 4
    assert single.islands == 1


def test_islands_train_at_least_sixteen_local_steps_with_nesterov_momentum():
    diloco = module.diloco_text()
    assert diloco.data.local_steps >= 16 and diloco.outer.momentum > 0


def test_diloco_and_data_parallel_train_on_the_same_tokens():
    small = TrainingConfig(rounds=2, evaluate_every=0, checkpoint_every=0)
    settings = {"training": small, "mesh": EIGHT_DEVICES}
    streams = [dataclasses.replace(e(), **settings).build().cohorts for e in EXPERIMENTS[:2]]
    for first, second in itertools.islice(zip(*streams, strict=True), 2):
        chex.assert_trees_all_equal(first, second)


def test_a_run_counts_tokens(small):
    run = small(module.diloco_text()).build()
    cohort = next(run.cohorts)
    assert run.item_unit == "tokens"
    assert run.items_per_round == cohort.batches["targets"].size


@pytest.mark.slow
def test_data_parallel_communicates_over_twenty_times_the_bytes_of_diloco(small):
    sent = {}
    for make in EXPERIMENTS[:2]:
        run = small(make()).build()
        batches = with_shardings(run.cohort_shapes, run.shardings.cohort)
        with jax.set_mesh(run.mesh):
            sent[make.__name__] = compile_round(run, batches).bytes_across_placement
    assert sent["data_parallel_text"] > 20 * sent["diloco_text"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("make", EXPERIMENTS[:2])
def test_diloco_and_data_parallel_learn(make, small, tmp_path):
    train(small(make()), tmp_path)
    losses = [line["loss"] for line in select(read_metrics(tmp_path), "evaluation")]
    assert np.log(256) > losses[0] > losses[1]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--outer.num_levels=1", "outer.num_levels=1: expected an int from 2 to 256"),
        ("--outer.learning_rate=-1.0", "expected a positive finite number"),
        ("--outer.momentum=1.0", "at least 0 and below 1"),
        ("--data.local_steps=0", "data.local_steps=0: expected an int of at least 1"),
        ("--data.batch_size=0", "data.batch_size=0: expected an int of at least 1"),
        ("--data.seq_len=-5", "data.seq_len=-5: expected an int of at least 1"),
        ("--data.heldout_batch_size=0", "data.heldout_batch_size=0: expected an int of at least 1"),
    ],
)
def test_the_command_line_rejects_numbers_out_of_range(capsys, override: str, words: str) -> None:
    with pytest.raises(SystemExit) as stop:
        configure("diloco_text", [override])
    assert stop.value.code == 2 and words in " ".join(
        capsys.readouterr().err.replace("│", "").split()
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--mesh.islands=2", "--mesh.clients=2", "--mesh.fsdp=2"], "Leave out --mesh.clients"),
        (["--mesh.fsdp=1", "--mesh.sequence=2", "--data.seq_len=63"], "sequence=2 does not divide"),
        (["--mesh.fsdp=1", "--mesh.tensor=2", "--model.num_heads=3"], "divide --model.num_heads=3"),
        (
            ["--mesh.fsdp=1", "--mesh.expert=2", "--model.num_experts=3"],
            "divide --model.num_experts=3",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_the_experiment_raises(settings: list[str], words: str) -> None:
    experiment = configure(
        "diloco_text", ["--model.embed_dim=96", "--model.num_kv_heads=1", *settings]
    )
    with pytest.raises(ValueError, match=words):
        experiment.build()


def test_float64_without_64_bit_mode_raises() -> None:
    experiment = configure("single_island_text", ["--model.dtype=float64", "--mesh.fsdp=1"])
    with pytest.raises(ValueError, match=r"needs JAX's 64-bit mode.*or use dtype='float32'"):
        experiment.build()


def test_a_run_says_what_its_settings_leave_untrained(small):
    short = small(module.diloco_text())
    assert not short.build().notes
    short = dataclasses.replace(short, data=dataclasses.replace(short.data, local_steps=8))
    (line,) = short.build().notes
    assert "warmup_steps=20, but the schedule has 16 steps" in line
    for experts, k, told in ((4, 1, True), (4, 2, False), (1, 1, False)):
        model = dataclasses.replace(short.model, num_experts=experts, num_experts_per_token=k)
        notes = dataclasses.replace(short, model=model).build().notes
        assert any("num_experts_per_token=1: the weight" in line for line in notes) == told

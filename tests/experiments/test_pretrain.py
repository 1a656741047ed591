"""Tests of the pretraining experiments, on one island and on several."""

import dataclasses
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from fedpax.algorithms.data_parallel import DataParallelState
from fedpax.algorithms.diloco import DiLoCoState
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.experiments import pretrain
from fedpax.experiments.text_experiment import LossConfig, TextConfig
from fedpax.models.transformer import TransformerConfig
from fedpax.parallel.mesh import MeshConfig
from fedpax.run_files.metrics import read_metrics, select
from fedpax.training.compiled_round import compile_round, with_shardings
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

SMALL: dict[str, Any] = {
    "model": TransformerConfig(num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=1, mlp_dim=32),
    "data": TextConfig(
        local_steps=10, batch_size=8, seq_len=16, heldout_batch_size=8, heldout_tokens=1024
    ),
    "training": TrainingConfig(rounds=2, evaluate_every=1, checkpoint_every=0),
}


def small(**changes: Any) -> pretrain.Pretraining:
    """Make an experiment that trains in seconds."""
    return dataclasses.replace(pretrain.pretrain_text(), **SMALL, **changes)


@pytest.mark.parametrize(
    ("make", "islands", "tokens"),
    [
        (pretrain.pretrain_c4_1b, 1, 128 * 1024),
        (pretrain.pretrain_c4_16b, 1, 512 * 1024),
        (pretrain.diloco_c4_1b, 4, 4 * 32 * 1024),
        (pretrain.pretrain_llama_8b, 1, 256 * 8192),
        (pretrain.diloco_llama_8b, 4, 4 * 256 * 8192),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_the_tokens_of_a_step_are_those_of_the_docstring(
    make: Any, islands: int, tokens: int
) -> None:
    experiment = make()
    data = experiment.data
    assert experiment.islands == islands
    assert islands * data.batch_size * data.seq_len == tokens
    assert experiment.model.dtype == "bfloat16" and experiment.model.remat != "none"


@pytest.mark.slow
def test_an_experiment_builds_and_compiles_without_its_data() -> None:
    data = dataclasses.replace(SMALL["data"], dataset="no_such_data_set", tokenizer="none.json")
    run = dataclasses.replace(small(mesh=MeshConfig(fsdp=8)), data=data).build()
    with jax.set_mesh(run.mesh):
        batches = with_shardings(run.cohort_shapes, run.shardings.cohort)
        compiled = compile_round(run, batches)
    assert compiled.num_parameters == SMALL["model"].num_params()
    assert run.flops_per_item == SMALL["model"].flops_per_token(16)
    assert run.items_per_round == 10 * 8 * 16
    with pytest.raises(FileNotFoundError, match=r"tokenizer='none\.json'"):
        next(run.cohorts)


def test_the_cohort_shapes_of_a_run_match_its_cohorts() -> None:
    run = small(mesh=MeshConfig(fsdp=8)).build()
    chex.assert_trees_all_equal_shapes_and_dtypes(next(run.cohorts), run.cohort_shapes)


def test_a_tokenizer_larger_than_the_models_vocabulary_raises() -> None:
    model = dataclasses.replace(SMALL["model"], vocab_size=100)
    run = dataclasses.replace(small(mesh=MeshConfig(fsdp=8)), model=model).build()
    with pytest.raises(ValueError, match=r"has 256 tokens, but model\.vocab_size=100. Set --model"):
        next(run.cohorts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("islands", "mesh", "state"),
    [
        (1, MeshConfig(fsdp=4, tensor=2), DataParallelState),
        pytest.param(2, MeshConfig(islands=2, fsdp=4), DiLoCoState, marks=pytest.mark.slow),
    ],
    ids=["one island", "two islands"],
)
def test_pretraining_learns(islands: int, mesh: MeshConfig, state: type, tmp_path: Path) -> None:
    experiment = small(
        islands=islands, mesh=mesh, loss=LossConfig(z_loss_weight=1e-4, grad_accum_steps=2)
    )
    run = experiment.build()
    assert isinstance(
        jax.eval_shape(lambda: run.algorithm.init(run.init(jax.random.key(0)))), state
    )
    train(experiment, tmp_path)
    losses = [line["loss"] for line in select(read_metrics(tmp_path), "evaluation")]
    assert np.log(256) > losses[0] > losses[1]


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_islands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = small(islands=2, mesh=MeshConfig(islands=2, fsdp=4))
    train(few, tmp_path)
    more = dataclasses.replace(
        few,
        islands=4,
        mesh=MeshConfig(islands=4, fsdp=2),
        training=TrainingConfig(rounds=4, evaluate_every=1, checkpoint_every=0),
    )
    outcome = train(more, tmp_path, allow_config_change=["islands", "mesh"])
    assert (outcome.rounds, outcome.rounds_trained) == (4, 2)
    messages = capsys.readouterr().err
    assert "4 islands continue from the states of 2" in messages and "start again" not in messages
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        position = checkpoints.restore_position().stream
    # Each row of two rounds of 2 islands and two rounds of 4, once.
    rows_of_island = few.data.local_steps * few.data.batch_size
    assert (position["rounds"], position["rows"]) == (4, (2 * 2 + 2 * 4) * rows_of_island)
    losses = [line["loss"] for line in select(read_metrics(tmp_path), "evaluation")]
    assert losses[3] < losses[1]


def test_microbatches_that_do_not_divide_the_rows_raise_before_the_text_is_read() -> None:
    experiment = dataclasses.replace(
        pretrain.pretrain_text(),
        data=TextConfig(batch_size=8, dataset="missing/*.jsonl"),
        loss=LossConfig(grad_accum_steps=3),
    )
    with pytest.raises(ValueError, match=r"grad_accum_steps=3 does not divide --data.batch_size=8"):
        experiment.build()


@pytest.mark.slow
def test_a_run_says_which_steps_follow_the_end_of_its_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = dataclasses.replace(small(), mesh=MeshConfig(fsdp=1))
    model = TransformerConfig(num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1, mlp_dim=8)
    data = dataclasses.replace(base.data, local_steps=4, batch_size=1, seq_len=8)
    training = TrainingConfig(rounds=2, evaluate_every=0, checkpoint_every=0)
    optimizer = dataclasses.replace(base.optimizer, warmup_steps=4)
    base = dataclasses.replace(base, model=model, data=data, training=training, optimizer=optimizer)
    train(base, tmp_path)
    assert "schedule" not in capsys.readouterr().err
    more = dataclasses.replace(
        base,
        data=dataclasses.replace(data, local_steps=1),
        training=dataclasses.replace(training, rounds=4),
    )
    train(more, tmp_path, allow_config_change=["data.local_steps"])
    lines = capsys.readouterr().err
    assert "spans 4 steps (4 rounds of 1) now, and spanned 8 steps (2 rounds of 4)" in lines
    assert "has done 8 steps, and has 2 left: all of them take the schedule's final" in lines

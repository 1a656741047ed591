"""Tests of the experiments with Streaming DiLoCo."""

import dataclasses

import numpy as np
import pytest

from fedpax.commands.parts.options import configure
from fedpax.errors import ArgumentError
from fedpax.experiments import streaming_diloco_text as module
from fedpax.experiments.pretrain import diloco_c4_1b
from fedpax.models.transformer import TransformerConfig
from fedpax.parallel.mesh import MeshConfig
from fedpax.run_files.metrics import read_metrics, select
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig


def test_fragments_divide_the_local_steps():
    for make in (
        module.streaming_diloco_text,
        module.streaming_diloco_c4_1b,
        module.streaming_diloco_llama_8b,
    ):
        experiment = make()
        streaming, steps = experiment.streaming, experiment.data.local_steps
        assert steps % streaming.fragments == 0 and streaming.delay < steps // streaming.fragments
        assert experiment.model.num_layers >= streaming.fragments - 1


def test_the_large_ones_differ_from_diloco_by_the_method_alone():
    streaming, plain = module.streaming_diloco_c4_1b(), diloco_c4_1b()
    for name in ("islands", "mesh", "model", "data", "loss", "optimizer", "training"):
        assert getattr(streaming, name) == getattr(plain, name)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["float32", "e3m0"])
def test_it_learns(compression, tmp_path):
    base = module.streaming_diloco_text()
    experiment = dataclasses.replace(
        base,
        model=TransformerConfig(
            vocab_size=256, num_layers=3, embed_dim=24, num_heads=2, num_kv_heads=1, mlp_dim=52
        ),
        data=dataclasses.replace(base.data, seq_len=16, heldout_tokens=1024),
        mesh=MeshConfig(islands=4, fsdp=2),
        streaming=dataclasses.replace(base.streaming, compression=compression),
        training=TrainingConfig(rounds=4, evaluate_every=2, checkpoint_every=0),
    )
    train(experiment, tmp_path)
    losses = [line["loss"] for line in select(read_metrics(tmp_path), "evaluation")]
    assert np.log(256) > losses[0] > losses[1]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--streaming.fragments=0", "streaming.fragments=0: expected an int of at least 1"),
        ("--streaming.delay=-1", "streaming.delay=-1: expected an int of at least 0"),
        ("--streaming.mixing=1.0", "at least 0 and below 1"),
        ("--streaming.compression=e2m1", "invalid choice"),
    ],
)
def test_the_command_line_rejects_numbers_out_of_range(capsys, override, words):
    with pytest.raises(SystemExit) as stop:
        configure("streaming_diloco_text", [override])
    assert stop.value.code == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", "").split())


@pytest.mark.parametrize("group", ["streaming", "decoupled"])
def test_too_many_fragments_are_told_by_their_flag(group: str) -> None:
    settings = getattr(configure(f"{group}_diloco_text", []), group)
    assign = dataclasses.replace(settings, fragments=5).fragment_fn()
    with pytest.raises(ArgumentError, match=r"^fragments is 5, but layers/x has 2 layers") as error:
        assign("layers/x", np.ones((2, 3)))
    told = str(error.value.in_flags)
    assert told.startswith(f"--{group}.fragments is 5, but layers/x has 2 layers")
    assert told.endswith(f"Set at most --{group}.fragments=3.")

"""Evaluation on several held-out sets: their form, their metrics, and a run that has them."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.data import addressable_rows
from fedpax.experiments.diloco_text import data_parallel_text
from fedpax.experiments.language_model_experiment import TextDataConfig
from fedpax.experiments.parts import client_evaluation
from fedpax.experiments.parts.client_evaluation import (
    HeldoutSets,
    heldout_evaluator,
    parse_heldout_sets,
    place_rows,
)
from fedpax.experiments.text_experiment import TextConfig
from fedpax.models.transformer import TransformerConfig
from fedpax.parallel.mesh import MeshConfig, make_mesh
from fedpax.training.training_config import TrainingConfig


class RandomRows:
    """Rows of random numbers, whose mask says which of them count."""

    def __init__(self, count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.x = random.uniform(0.5, 2, size=(count, 4)).astype(np.float32)
        self.mask = random.integers(0, 2, size=(count, 4)).astype(np.float32)
        self.numbers_read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    @property
    def num_targets(self) -> np.ndarray:
        return self.mask.sum(axis=1).astype(np.int64)

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        self.numbers_read.extend(rows)
        padding = (rows < 0)[:, None]
        return {"x": self.x[rows], "mask": np.where(padding, 0, self.mask[rows])}


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    nats = params * batch["x"] * batch["mask"]
    return jnp.sum(nats) / jnp.sum(batch["mask"]), {"largest": jnp.max(nats)}


def test_each_set_has_its_own_means_and_perplexity() -> None:
    sets = {"": RandomRows(7, 0), "web": RandomRows(13, 1), "code.py": RandomRows(3, 2)}
    rows = HeldoutSets(sets[""], {"web": sets["web"], "code.py": sets["code.py"]})
    sizes: Any = {"batch_size": 3, "placement": "islands", "num_participants": 2}
    result = heldout_evaluator(loss_fn, rows, **sizes)(jnp.float32(1.5))
    names = ("loss", "perplexity", "largest")
    assert set(result) == {
        f"heldout/{name}/{key}" if name else key for name in sets for key in names
    }
    for name, one in sets.items():
        prefix = f"heldout/{name}/" if name else ""
        loss = float((1.5 * one.x * one.mask).sum()) / one.mask.sum()
        assert result[f"{prefix}loss"] == pytest.approx(loss, rel=1e-5)
        assert result[f"{prefix}perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


def test_a_process_reads_only_the_rows_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, mesh = RandomRows(45, 3), make_mesh(islands=2, fsdp=4)
    sharding = NamedSharding(mesh, PartitionSpec("islands", None, "fsdp"))
    expected, weights = place_rows(rows, 8, 2, sharding)
    assert weights.shape == (2, 3) and weights.sum() == rows.mask.sum()
    for island, column in np.ndindex(2, 4):
        devices = [mesh.devices[island, column]]
        own = functools.partial(addressable_rows, devices=devices)
        monkeypatch.setattr(client_evaluation, "addressable_rows", own)
        rows.numbers_read.clear()
        result, same = place_rows(rows, 8, 2, sharding)
        np.testing.assert_array_equal(same, weights)
        assert len(rows.numbers_read) == 3 * 2  # of 3 steps, 2 of 8 rows
        block = (slice(island, island + 1), slice(None), slice(2 * column, 2 * column + 2))
        for name in expected:
            assert result[name].shape == expected[name].shape == (2, 3, 8, 4)
            np.testing.assert_array_equal(result[name][block], expected[name][block])
        monkeypatch.undo()


@pytest.mark.parametrize(("loss", "perplexity"), [(1000.0, math.inf), (math.nan, math.nan)])
def test_a_perplexity_beyond_floats_is_infinite(loss: float, perplexity: float) -> None:
    constant = lambda params, batch: (params, None)
    sizes: Any = {"batch_size": 3, "placement": "islands", "num_participants": 1}
    evaluate = heldout_evaluator(constant, HeldoutSets(RandomRows(2, 0), {}), **sizes)
    np.testing.assert_equal(evaluate(jnp.float32(loss))["perplexity"], perplexity)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["c4"], r"has 'c4', expected NAME=DATASET.*Set for example --data\.heldout_sets web="),
        (["=c4"], "has '=c4', expected NAME=DATASET"),
        (["a b=c4"], "has 'a b=c4', expected"),
        (["a=c4@x@y"], "has 'a=c4@x@y', expected"),
        (["a/b=c4"], "has 'a/b=c4', expected"),
        (["a=c4", "b=c4", "a=lm1b"], "names 'a' 2 times, .* Rename one of the sets"),
    ],
)
def test_malformed_sets_raise(texts: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_heldout_sets(texts)
    with pytest.raises(ValueError, match=words):
        TextDataConfig(heldout_sets=tuple(texts))


@pytest.mark.slow
def test_a_run_evaluates_on_all_of_its_sets() -> None:
    experiment = dataclasses.replace(
        data_parallel_text(),
        islands=1,
        mesh=MeshConfig(fsdp=8),
        model=TransformerConfig(
            vocab_size=256, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, mlp_dim=32
        ),
        data=TextConfig(
            local_steps=1,
            batch_size=8,
            seq_len=16,
            heldout_batch_size=8,
            heldout_tokens=256,
            heldout_sets=("same=stdlib_text", "training=stdlib_text#text@train[:5%]"),
        ),
        training=TrainingConfig(rounds=1, evaluate_every=0, checkpoint_every=0),
    )
    run = experiment.build()
    with jax.set_mesh(run.mesh):
        metrics = run.evaluate(run.init(jax.random.key(0)))
    assert list(metrics)[:2] == ["loss", "perplexity"]
    assert metrics["heldout/same/loss"] == metrics["loss"] != metrics["heldout/training/loss"]
    assert metrics["perplexity"] == math.exp(metrics["loss"])
    assert abs(metrics["heldout/training/loss"] - math.log(256)) < 1

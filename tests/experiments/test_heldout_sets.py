"""Evaluation on several held-out sets: their form, their metrics, and a run that has them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpax.experiments.diloco_text import data_parallel_text
from fedpax.experiments.heldout import HeldoutBatches, heldout_evaluator, parse_heldout_sets
from fedpax.experiments.language_model import TextDataConfig
from fedpax.experiments.text import TextConfig
from fedpax.models.transformer import TransformerConfig
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.experiment import TrainingConfig


def random_batches(count: int, seed: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    return [
        {
            "x": random.uniform(0.5, 2, size=(3, 4)).astype(np.float32),
            "mask": random.integers(0, 2, size=(3, 4)).astype(np.float32),
        }
        for _ in range(count)
    ]


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    nats = params * batch["x"] * batch["mask"]
    return jnp.sum(nats) / jnp.sum(batch["mask"]), {"largest": jnp.max(nats)}


def test_each_set_has_its_own_means_and_perplexity() -> None:
    sets = {"": random_batches(3, 0), "web": random_batches(5, 1), "code.py": random_batches(1, 2)}
    batches = HeldoutBatches(sets[""], {"web": sets["web"], "code.py": sets["code.py"]})
    evaluate = heldout_evaluator(loss_fn, batches, placement="islands", num_participants=2)
    found = evaluate(jnp.float32(1.5))
    names = ("loss", "perplexity", "largest")
    assert set(found) == {
        f"heldout/{name}/{key}" if name else key for name in sets for key in names
    }
    for name, rows in sets.items():
        prefix = f"heldout/{name}/" if name else ""
        masks = sum(batch["mask"].sum() for batch in rows)
        loss = sum(float((1.5 * b["x"] * b["mask"]).sum()) for b in rows) / masks
        assert found[f"{prefix}loss"] == pytest.approx(loss, rel=1e-5)
        assert found[f"{prefix}perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize(("loss", "perplexity"), [(1000.0, math.inf), (math.nan, math.nan)])
def test_a_perplexity_beyond_floats_is_infinite(loss: float, perplexity: float) -> None:
    batches = HeldoutBatches(random_batches(1, 0), {})
    constant = lambda params, batch: (params, None)
    evaluate = heldout_evaluator(constant, batches, placement="islands", num_participants=1)
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

"""The methods of docs/experiments.md for batch normalization equal loops over clients."""

import dataclasses
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

PAGE = Path(__file__).parents[2] / "docs" / "experiments.md"


@pytest.fixture
def norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, code in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return importlib.import_module("norms")


def train(norms: Any, params: Any, batches: Any) -> Any:
    """Train a client by nnx, which updates the statistics in place."""
    params = jax.tree.map(jnp.asarray, params)  # nnx would write into arrays of NumPy
    module = nnx.merge(norms.GRAPH, *params.values(), copy=True)

    def loss_of(module: Any, batch: Any) -> jax.Array:
        rngs = nnx.Rngs(dropout=jax.random.key(batch["dropout_seed"][0]))
        logits = module(batch["image"], batch["mask"], rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])

    for batch in batches:
        gradient = nnx.grad(loss_of)(module, batch)
        weights = nnx.state(module, nnx.Param)
        nnx.update(module, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient))
    parts = nnx.split(module, nnx.BatchStat, nnx.PathContains("norm"), ...)[1:]
    return dict(zip(("stats", "norm", "shared"), map(nnx.to_pure_dict, parts), strict=True))


@pytest.mark.parametrize("own_norms", [False, True])
def test_statistics_are_averaged_or_kept(norms: Any, own_norms: bool) -> None:
    run = dataclasses.replace(norms.normalized(), own_norms=own_norms).build()
    own_parts = ("stats", "norm") if own_norms else ()
    start = norms.init(jax.random.key(0))
    state, expected, kept = run.algorithm.init(start), start, {}
    for _ in range(2):
        cohort = next(run.cohorts)
        ends = []
        for k, client in enumerate(cohort.client_ids.tolist()):
            steps = range(int(cohort.num_steps[k]))
            batches = [{name: x[k, i] for name, x in cohort.batches.items()} for i in steps]
            own = kept.get(client, {name: start[name] for name in own_parts})
            ends.append(train(norms, {**expected, **own}, batches))
            kept[client] = {name: ends[-1][name] for name in own_parts}
        mean = functools.partial(np.average, axis=0, weights=cohort.num_examples)
        expected = jax.tree.map(lambda *x, mean=mean: mean(x), *ends)
        state, _ = jax.jit(run.algorithm.round)(state, cohort)
    assert np.abs(expected["stats"]["norm"]["mean"]).max() > 0.01
    assert_close(state.params, expected)
    rows = state.own.to_host() if own_norms else {}
    for client, own in kept.items():
        assert_close(jax.tree.map(lambda x, client=client: x[client], rows), own)


def assert_close(one: Any, other: Any) -> None:
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(compare, one, other)

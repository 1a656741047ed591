"""fedavg_table with each method and each aggregator of the library, by its flag."""

from pathlib import Path

import jax
import numpy as np
import pytest

from fedpax.commands.parts.options import configure
from fedpax.settings.client_aggregators import AggregatorConfig
from fedpax.settings.client_methods import MethodConfig

SETTINGS = {
    "private_mean": ["--aggregator.noise_multiplier=0.1"],
    "private_secure_mean": ["--aggregator.noise_multiplier=0.1"],
    "hypcluster": ["--method.num_clusters=2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make 12 hospitals of different sizes, with missing values."""
    path, rng = tmp_path_factory.mktemp("hospitals"), np.random.default_rng(0)
    for client in range(12):
        x = rng.normal(50, 9, (rng.integers(6, 30), 2))
        ill = x.sum(1) + rng.normal(size=len(x)) > 100
        values = np.where(rng.random(x.shape) < 0.1, "", np.char.mod("%.3f", x))
        rows = [",".join((*row, str(int(y)))) for row, y in zip(values, ill, strict=True)]
        (path / f"Krankenhaus {client}é.csv").write_text("\n".join(["a,b,ill", *rows, ""]))
    return path


def cases() -> list[tuple[str, str]]:
    return [
        *(("method", name) for name in MethodConfig.functions()),
        *(("aggregator", name) for name in AggregatorConfig.functions()),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), cases())
def test_two_rounds(folder: Path, group: str, name: str) -> None:
    ranges = ["a=number(0..100)", "b=number(0..100)", "ill=category(0|1)"]
    flags = [f"--data.files={folder}/*.csv", "--data.label=ill", f"--{group}={name}"]
    run = configure(
        "fedavg_table", [*flags, *SETTINGS.get(name, []), "--data.columns", *ranges]
    ).build()
    with jax.set_mesh(run.mesh):
        state = run.algorithm.init(jax.jit(run.init)(jax.random.key(0)))
        step = jax.jit(run.algorithm.round)
        before = state.params
        for _ in range(2):
            state, metrics = step(state, next(run.cohorts))
        assert all(np.isfinite(float(np.mean(value))) for value in jax.tree.leaves(metrics))
        changed = jax.tree.map(lambda a, b: bool((a != b).any()), before, state.params)
        assert any(jax.tree.leaves(changed))
        result = run.evaluate(state.params) if run.evaluate_state is None else {}
        own = {} if run.evaluate_state is None else run.evaluate_state(state)
    assert result.keys() >= {"loss", "accuracy"} or own.keys() >= {"personal_loss"}
    assert all(np.isfinite(value) for value in (*result.values(), *own.values()))

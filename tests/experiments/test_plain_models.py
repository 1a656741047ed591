"""A model of plain functions in an experiment: `FunctionalModel(init, apply)` is enough."""

import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fedpax.checkpoints import load_params
from fedpax.experiments import find_experiment
from fedpax.main import main
from fedpax.models import FunctionalModel
from fedpax.settings.optimizer_settings import OptimizerConfig

EXPERIMENT = """
    import dataclasses

    import jax
    import jax.numpy as jnp
    from fedpax.experiments.fedavg_synthetic import FedAvgSynthetic, fedavg_synthetic
    from fedpax.models import FunctionalModel


    def init(key):
        return {"w": 0.1 * jax.random.normal(key, (60, 10)), "b": [jnp.zeros(10), ()]}


    def apply(params, x):
        return x @ params["w"] + params["b"][0]


    class Plain(FedAvgSynthetic):
        def make_model(self):
            return FunctionalModel(init, apply)


    def plain():
        given = vars(fedavg_synthetic())
        names = [field.name for field in dataclasses.fields(Plain)]
        return Plain(**{name: given[name] for name in names})
"""


def test_init_and_apply_are_enough_on_each_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text(textwrap.dedent(EXPERIMENT))
    flags = "train --exp=./plain.py:plain --training.rounds=2 --cohort.size=4 --job_log_dir="
    for name, mesh in {"one": "1 1 1", "all": "2 2 2"}.items():
        sizes = zip(("clients", "fsdp", "tensor"), mesh.split(), strict=True)
        axes = [f"--mesh.{axis}={size}" for axis, size in sizes]
        assert main([*f"{flags}{name}".split(), *axes]) == 0
    one, of_all = load_params("one"), load_params("all")
    assert np.abs(one["w"]).max() > 0.01
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, of_all)
    with jax.set_mesh((run := find_experiment("./plain.py:plain")().build()).mesh):
        assert {s.spec for s in jax.tree.leaves(run.shardings.params)} == {PartitionSpec()}


def test_a_missing_module_and_missing_axes_are_told() -> None:
    model = FunctionalModel(lambda key: {"w": jax.random.normal(key)}, lambda params, x: x)
    with pytest.raises(ValueError, match=r"without one\. Call apply\(params, \.\.\.\)"):
        model.bind({})
    with pytest.raises(ValueError, match=r"muon.* logical_axes is None"):
        OptimizerConfig(name="muon").make(3, model.logical_axes)

"""The experiment of docs/experiments.md over two sites equals its training in one place."""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from site_processes import free_port, run_script

from fedpax.checkpoints.saved_state import load_params
from fedpax.data import partition_natural
from fedpax.experiments import ClientExperiment
from fedpax.experiments.catalog import find_experiment
from fedpax.main import main
from fedpax.run_files.metrics import read_metrics, select
from fedpax.settings.client_methods import method
from fedpax.sites.site_experiment import ClientRange
from fedpax.training import ExampleOwners, classification_by_client
from fedpax.training.training_config import TrainingConfig
from sites.federation import run
from sites.test_equals_training import train_together

ROOT = Path(__file__).parents[2]
EXP = "--exp=./clinics.py:clinics"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write the files of the page's section, and return its commands."""
    page = (ROOT / "docs" / "experiments.md").read_text()
    section = page.partition("\n## Clients at sites\n")[2].partition("\n## ")[0]
    experiment, data, _ = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("clinics.py").write_text(experiment)
    exec(data, {"np": np})
    yield re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S)[0]
    sys.modules.pop("clinics", None)


def clinics(files: str, rounds: int = 3) -> ClientExperiment:
    """Make the experiment on some files."""
    experiment = find_experiment("./clinics.py:clinics")()
    training = TrainingConfig(rounds=rounds, evaluate_every=rounds, checkpoint_every=0)
    data = dataclasses.replace(experiment.data, files=files)
    return dataclasses.replace(experiment, data=data, training=training)


@pytest.mark.usefixtures("commands")
def test_equals_training_in_one_place(tmp_path: Path) -> None:
    sites = {name: clinics(f"clinics/{name}.npz") for name in ("bergen", "lund")}
    outcome = run(clinics("no/data"), sites, tmp_path / "runs", personal=True)
    whole = clinics("clinics/*.npz")
    for leaf, other in zip(outcome.params, train_together(whole, 3), strict=True):
        assert np.abs(other).max() > 0.01
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)

    # `--personal`: one more round of a site's clients alone. It has 9, and a round 20.
    alone = sites["bergen"].sized(9).build()
    state = alone.algorithm.init(outcome.coordinator.params)
    state, _ = alone.algorithm.round(state, next(alone.cohorts))
    tuned = jax.tree.leaves(load_params("runs/bergen/fine_tuned", 3))
    pairs = zip(tuned, jax.tree.leaves(state.params), outcome.params, strict=True)
    for leaf, other, shared in pairs:
        assert np.abs(leaf - shared).max() > 1e-4
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)

    for folder in ("runs/bergen", "runs/bergen/fine_tuned"):
        of = [EXP, f"--job_log_dir={folder}"]
        assert main(["evaluate", *of]) == 0
        assert main(["export", *of, f"--out={folder}.npz"]) == 0
        exported = np.load(f"{folder}.npz")
        assert {name.partition(".")[0] for name in exported} == {"hidden", "out"}


@pytest.mark.usefixtures("commands")
def test_ditto_at_a_site_is_fine_tuned_too() -> None:
    site = dataclasses.replace(clinics("clinics/bergen.npz"), method=method("ditto"))
    made = site.at_site(ClientRange(0, 9, 23))
    params = made.init(jax.random.key(0))
    assert made.fine_tune is not None
    tuned = made.fine_tune(params)
    assert made.evaluate(tuned)["loss"] < made.evaluate(params)["loss"]

    # A site of more clients than a round has takes their steps in several cohorts.
    cohort = dataclasses.replace(site.cohort, size=4)
    parts = dataclasses.replace(site, cohort=cohort).at_site(ClientRange(0, 9, 23))
    assert parts.fine_tune is not None
    pairs = zip(jax.tree.leaves(parts.fine_tune(params)), jax.tree.leaves(tuned), strict=True)
    for leaf, other in pairs:
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("commands")
def test_held_out_batches_need_no_mask() -> None:
    experiment = clinics("clinics/bergen.npz")
    count = experiment.count_heldout()
    batches = experiment.open_heldout(experiment.make_preprocess())()
    without = [{"x": batch["x"], "y": batch["y"]} for batch in batches]

    class Unmasked(type(experiment)):
        def open_heldout(self, preprocess):
            return lambda: without

    assert 0 < count < Unmasked(**vars(experiment)).count_heldout() == 256 * len(batches)


@pytest.mark.usefixtures("commands")
def test_the_auc_of_each_client_of_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = {name: clinics(f"clinics/{name}.npz", rounds=1) for name in ("bergen", "lund")}

    def make_client_evaluation(self, model):
        source = self.load("heldout")
        parts = partition_natural(source, "patient")
        owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        x, y = (source.column(name)[np.concatenate(parts)] for name in ("x", "y"))

        def evaluate(params):
            outputs = np.asarray(model.apply(params, np.float32(x)))
            logits = np.stack([np.zeros_like(outputs), outputs], axis=1)
            clients = ExampleOwners([str(name) for name in parts.names], owners)
            return classification_by_client(logits, np.int32(y > 0), clients)

        return evaluate

    monkeypatch.setattr(type(sites["lund"]), "make_client_evaluation", make_client_evaluation)
    outcome = run(clinics("no/data", rounds=1), sites, tmp_path / "runs")
    assert (
        main(["evaluate", EXP, "--job_log_dir=runs/lund", "--by_client", "--json=lund.json"]) == 0
    )
    measured = json.loads(Path("lund.json").read_text())["clients"]

    source = sites["lund"].load("heldout")
    model = sites["lund"].make_model()
    outputs = np.asarray(model.apply(outcome.coordinator.params, np.float32(source.column("x"))))
    expected = {}
    for name in sorted({*source.column("patient")}):
        own = source.column("patient") == name
        positive, negative = (
            outputs[own & (is_one == (source.column("y") > 0))] for is_one in (True, False)
        )
        pairs = positive[:, None] > negative
        expected[str(name)] = float(pairs.mean()) if pairs.size else None
    assert any(value is not None for value in expected.values())
    assert {row["client"]: row["auc"] for row in measured} == pytest.approx(expected)


@pytest.mark.slow
def test_the_commands_of_the_page(commands: str) -> None:
    alone = f"fedpax train {EXP} --job_log_dir=runs/clinics\n"
    script = alone + commands.replace(":7000", f":{free_port()}") + "wait\n"
    run_script(script, Path.cwd())
    wanted = jax.tree.leaves(load_params("runs/clinics"))
    for folder in ("coordinator", "bergen", "lund"):
        for leaf, other in zip(jax.tree.leaves(load_params(f"runs/{folder}")), wanted, strict=True):
            np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)
    assert Path("runs/bergen/fine_tuned/checkpoints/10").exists()
    assert Path("model").exists()


@pytest.mark.usefixtures("commands")
def test_a_site_without_held_out_examples_trains_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    sites = {name: clinics(f"clinics/{name}.npz", rounds=1) for name in ("bergen", "lund")}
    class_ = type(sites["lund"])
    opened = class_.open_heldout

    def open_heldout(self, preprocess):
        return (lambda: []) if "bergen" in self.data.files else opened(self, preprocess)

    monkeypatch.setattr(class_, "open_heldout", open_heldout)
    run(clinics("no/data", rounds=1), sites, tmp_path / "runs")
    folder = tmp_path / "runs" / "coordinator"
    (line,), (measured,) = (select(read_metrics(folder), k) for k in ("training", "evaluation"))
    assert line["sites"] == 2
    assert measured["loss"] == measured["site/lund/loss"] and "site/bergen/loss" not in measured
    assert "site bergen sends no metrics of held-out examples: it has none" in notes

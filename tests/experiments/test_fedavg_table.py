"""fedavg_table: files become the arrays, and the model, that one would make by hand."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hospital_tables import make, read_by_hand, write_hospitals

from fedpax.aggregators import PrivacyAccountant
from fedpax.algorithms import fedavg
from fedpax.checkpoints import load_field
from fedpax.commands.parts.options import configure
from fedpax.data import ClientSampler, cohort_rounds, load, prepare
from fedpax.main import main
from fedpax.models.losses import classification_loss, squared_error_loss
from fedpax.run_files.metrics import read_metrics, select
from fedpax.settings.client_aggregators import AggregatorConfig, aggregator
from fedpax.settings.client_methods import method


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hospitals")
    write_hospitals(path)
    return path


def features_by_hand(columns: dict[str, np.ndarray], training: np.ndarray) -> np.ndarray:
    def standardized(texts: np.ndarray) -> np.ndarray:
        x = np.array([float(text) if text else np.nan for text in texts])
        known = x[training & ~np.isnan(x)]
        return np.nan_to_num((x - known.mean()) / known.std())

    sex = columns["kön"]
    parts = [
        standardized(columns["age"]), columns["age"] == "", standardized(columns["lab_värde"]),
        sex == "kvinna", sex == "man", sex == "",
    ]  # fmt: skip
    return np.stack(parts, axis=1).astype(np.float32)


def test_the_fingerprint_of_heldout_rows_tells_other_files(folder: Path, tmp_path: Path) -> None:
    write_hospitals(tmp_path)

    def fingerprint() -> dict[str, str]:
        return dict(make(tmp_path, "outcome").build().heldout_fingerprint())

    before = fingerprint()
    assert before == make(folder, "outcome").build().heldout_fingerprint()
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace("kvinna", "man"))
    assert before.keys() == {"of the run"} and fingerprint() != before


@pytest.mark.parametrize("label", ["outcome", "score"])
def test_equals_the_same_arrays_passed_in_python(folder: Path, label: str) -> None:
    experiment = make(folder, label)
    run = experiment.build()
    names, columns = read_by_hand(folder)
    table = experiment.opened
    assert list(table.names) == names
    training = table.training
    assert 0.6 < training.mean() < 0.95
    features = features_by_hand(columns, training)
    np.testing.assert_allclose(experiment.prepared.examples["features"], features, atol=3e-4)

    if label == "outcome":
        labels = (columns["outcome"] == "sjuk").astype(np.int32)
        np.testing.assert_array_equal(experiment.prepared.examples["label"], labels)
    else:
        score = columns["score"].astype(float)
        labels = ((score - score[training].mean()) / score[training].std()).astype(np.float32)
        np.testing.assert_allclose(experiment.prepared.examples["label"], labels, atol=3e-5)

    # The model by hand: a matrix and a bias from 0, and FedAvg of all hospitals.
    def apply(params: Any, x: Any) -> Any:
        return x @ params["w"] + params["b"]

    outputs = 2 if label == "outcome" else 1
    loss_fn = (
        classification_loss(apply, field="features") if outputs == 2 else squared_error_loss(apply)
    )
    parts = [np.flatnonzero(training & (columns["client"] == name)) for name in names]
    parts = [part for part in parts if len(part)]
    rounds = cohort_rounds(
        {"features": features, "label": labels},
        parts,
        ClientSampler(len(parts), len(parts), 0),
        batch_size=8,
        preprocess=dict,
    )
    algorithm = fedavg(loss_fn, cohort_size=len(parts), client_optimizer=optax.sgd(0.1))
    state = algorithm.init({"w": np.zeros((6, outputs), np.float32), "b": np.zeros(outputs)})
    run_state = run.algorithm.init(jax.jit(run.init)(jax.random.key(0)))
    step, own_step = jax.jit(algorithm.round), jax.jit(run.algorithm.round)
    with jax.set_mesh(run.mesh):
        for _ in range(3):
            run_state, _ = own_step(run_state, next(run.cohorts))
    for _ in range(3):
        state, _ = step(state, next(rounds))
    result = run_state.params["layers"]["dense_0"]
    np.testing.assert_allclose(result["kernel"], state.params["w"], atol=2e-4)
    np.testing.assert_allclose(result["bias"], state.params["b"], atol=2e-4)


def test_metrics_of_clients_are_those_of_all_examples(folder: Path) -> None:
    experiment = make(folder, "outcome", heldout_clients=0.3)
    run = experiment.build()
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(run.init, jax.random.key(0))
    params = jax.tree.map(lambda x: rng.normal(0, 1, x.shape).astype(x.dtype), shapes)
    with jax.set_mesh(run.mesh):
        together, result = run.evaluate(params), run.evaluate_clients(params)
    is_new = np.array([name.endswith(" (new)") for name in result.names])
    assert 1 <= is_new.sum() < 8 and len(result.names) == 12
    np.testing.assert_array_equal(np.isnan(result.metrics["loss"]), result.num_examples == 0)
    assert set(together) == {"loss", "accuracy", "new_clients/loss", "new_clients/accuracy"}
    for name in ("loss", "accuracy"):
        for chosen, key in ((~is_new, name), (is_new, f"new_clients/{name}")):
            chosen &= result.num_examples > 0
            values, weights = result.metrics[name][chosen], result.num_examples[chosen]
            assert np.average(values, weights=weights) == pytest.approx(together[key], rel=1e-4)
    # No example of a new client is trained on.
    owners = np.concatenate(list(experiment.training_parts.values()))
    assert not experiment.opened.is_new[experiment.opened.owners[owners]].any()
    one_class = [name.startswith("東京") for name in result.names].index(True)
    assert np.isnan(result.metrics["auc"][one_class])


def test_numbers_are_measured_in_their_own_unit(folder: Path) -> None:
    experiment = make(folder, "score")
    run = experiment.build()
    params = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(run.init, jax.random.key(0))
    )
    with jax.set_mesh(run.mesh):
        together, result = run.evaluate(params), run.evaluate_clients(params)
    _, columns = read_by_hand(folder)
    score = columns["score"].astype(float)
    table = experiment.opened
    errors = score[table.heldout] - score[table.training].mean()
    assert together["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-4)
    explained = 1 - np.mean(errors**2) / np.var(score[table.heldout])
    assert together["r2"] == pytest.approx(explained, abs=1e-3)
    total = np.nansum(result.metrics["rmse"] ** 2 * result.num_examples)
    assert total == pytest.approx(np.sum(errors**2), rel=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        *("mean", "private_mean", "secure_mean", "coordinate_median", "compressed_mean"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("clipped_mean", "krum", "private_secure_mean", "trimmed_mean", "bulyan",
                         "geometric_median", "quantized_mean")
        ),
    ],
)  # fmt: skip
def test_every_aggregator_standardizes(folder: Path, name: str) -> None:
    assert name in AggregatorConfig.functions()
    settings = {"noise_multiplier": 0.01} if "private" in name else {}
    columns = ("age=number(0..120)", "lab_värde=number(9950..10050)", "score=left_out")
    experiment = make(folder, "outcome", columns=columns, aggregator=aggregator(name, **settings))
    assert {c.treatment.name for c in experiment.prepared.features.columns} == {
        "age", "lab_värde", "kön",
    }  # fmt: skip
    exact = make(folder, "outcome", columns=columns).prepared.features
    for result, expected in zip(experiment.prepared.features.columns, exact.columns, strict=True):
        if expected.treatment.kind == "number":
            assert abs(result.mean - expected.mean) < expected.scale
            assert 0.3 * expected.scale < result.scale < 4 * expected.scale


def test_private_statistics_need_ranges_and_noise_of_their_own(folder: Path) -> None:
    private = aggregator("private_mean", noise_multiplier=0.5)
    with pytest.raises(ValueError, match=r"2 columns of numbers or dates have no range, such as"):
        _ = make(folder, "outcome", aggregator=private).prepared
    first = private.for_statistics(0, 12).aggregator
    again = private.for_statistics(0, 12).aggregator
    assert first is not again
    ranged = make(
        folder, "outcome", aggregator=private, standardize="range",
        columns=("age=number(0..120)", "lab_värde=number(9000..11000)", "score=left_out"),
    )  # fmt: skip
    column = ranged.prepared.features.columns[0]
    assert (column.mean, column.scale) == (60, 60)


@pytest.mark.parametrize("name", [pytest.param("ditto", marks=pytest.mark.slow), "hypcluster"])
def test_personal_models_are_evaluated_on_their_own_examples(folder: Path, name: str) -> None:
    experiment = make(folder, "outcome", method=method(name), size=5)
    run = experiment.build()
    with jax.set_mesh(run.mesh):
        state = run.algorithm.init(jax.jit(run.init)(jax.random.key(0)))
        state, _ = jax.jit(run.algorithm.round)(state, next(run.cohorts))
        result, own = run.evaluate_state(state), run.evaluate_own_models(state)
    assert set(result) == {"personal_loss", "personal_accuracy"}
    assert list(own.names) == list(experiment.opened.names)
    present = own.num_examples > 0
    for metric in ("loss", "accuracy"):
        mean = np.average(own.metrics[metric][present], weights=own.num_examples[present])
        assert mean == pytest.approx(result[f"personal_{metric}"], rel=1e-4)
    if name == "ditto":  # models that stayed at 0 predict both classes alike
        assert 0 < result["personal_loss"] < 0.8
    else:
        assert run.evaluate_clients is None


def test_the_start_tells_what_is_left_out(folder: Path) -> None:
    run = make(folder, "outcome").build()
    text = "\n".join(run.notes)
    assert "12 clients, 214 examples: " in text and "cohort.size=100: a round has all" in text
    assert "label 'outcome': classification, frisk, sjuk; text" in text
    assert "left out: 'note' (text of " in text and "'score' (stated)" in text
    assert "with missing values: 'age' (mean), 'kön' (category)" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], r"data.files=\(\) and data.label=None, expected files"),
        (["--data.files={}/Oslo.csv", "--data.label=outcome"], "one table without clients.* 'age'"),
        (["--data.files={}", "--data.label=outcome"], r"such as --data.files='FOLDER/\*.csv'"),
        (
            ["--data.files={}/*.csv", "--data.label=kön"],
            r"The label 'kön' has no value in .*, the first of them example \d+ of client '",
        ),
        (
            ["--data.files={}/*.csv", "--data.label=outcome", "--data.heldout_fraction=0.99999"],
            r"heldout_fraction=0.99999 leaves none of the 214 examples to train on",
        ),
        (
            ["--data.files={}/*.csv", "--data.label=outcome", "--data.heldout_fraction=0"],
            "holds out none of 214 examples",
        ),
        (
            ["--data.files={}/*.csv", "--data.label=outcome", "--data.columns", "agee=number"],
            "states 'agee', expected one of the columns 'age'",
        ),
    ],
)
def test_what_is_missing_is_told(folder: Path, flags: list[str], message: str) -> None:
    experiment = configure("fedavg_table", [flag.format(folder) for flag in flags])
    with pytest.raises(ValueError, match=message):
        experiment.build()


def test_examples_without_a_label_can_be_left_out(folder: Path) -> None:
    experiment = make(folder, "kön", missing_label="skip", columns=("outcome=category",))
    _, columns = read_by_hand(folder)
    missing = int((columns["kön"] == "").sum())
    assert missing and f"left out: {missing} examples without 'kön'" in experiment.opened.notes
    assert len(experiment.prepared.examples["label"]) == 214 - missing
    assert experiment.prepared.label.classes == ("kvinna", "man")


def test_types_of_columns_are_stated(tmp_path: Path) -> None:
    rows = [(f"{k % 3:03}", k % 2) for k in range(60)]
    text = "zip,y\n" + "".join(f"{z},{y}\n" for z, y in rows)
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(text)
    number = make(tmp_path, "y", columns=()).prepared.features
    texts = make(tmp_path, "y", columns=(), types=("zip=string",)).prepared.features
    assert [column.treatment.kind for column in number.columns] == ["number"]
    assert texts.columns[0].categories == ("000", "001", "002")


def test_splits_in_paths(folder: Path, tmp_path: Path) -> None:
    for split, names in {"train": ("Oslo", "Lund"), "test": ("Oslo",)}.items():
        (tmp_path / split).mkdir()
        for name in names:
            (tmp_path / split / f"{name}.csv").write_bytes((folder / f"{name}.csv").read_bytes())
    experiment = make(tmp_path, "outcome")
    data = dataclasses.replace(experiment.data, files=(f"{tmp_path}/{{split}}/{{client}}.csv",))
    experiment = dataclasses.replace(experiment, data=data)
    assert experiment.opened.heldout.sum() == 25 and experiment.opened.training.sum() == 33
    result = {name: len(rows) for name, rows in experiment.training_parts.items()}
    assert result == {"Oslo": 25, "Lund": 8} or result == {"Lund": 8, "Oslo": 25}


def test_a_partition_makes_the_clients(folder: Path) -> None:
    flags = [f"--data.files={folder}/*.csv", "--data.label=outcome"]
    data = configure("fedavg_table", [*flags, "--data.partition=dirichlet:0.5:7"]).data
    result = data.open()
    expected = load(folder / "*.csv", label="outcome", partition="dirichlet:0.5:7")
    assert result.names == [str(k) for k in range(7)]
    np.testing.assert_array_equal(np.bincount(result.owners), np.diff(expected.client_starts))
    split = dataclasses.replace(data, files=(f"{folder}/{{split}}.csv",))
    with pytest.raises(ValueError, match=r"data.partition='dirichlet:0.5:7' divides the examples"):
        split.open()


def test_a_partition_of_a_prepared_folder_is_an_index(folder: Path, tmp_path: Path) -> None:
    prepare(folder / "*.csv", tmp_path / "prepared")
    flags = [f"--data.files={tmp_path}/prepared", "--data.label=outcome"]
    experiment = configure("fedavg_table", [*flags, "--data.partition=dirichlet:0.5:7"])
    expected = load(tmp_path / "prepared", label="outcome", partition="dirichlet:0.5:7")
    opened = experiment.opened
    np.testing.assert_array_equal(np.bincount(opened.owners), np.diff(expected.client_starts))
    assert opened.columns._source.table.drop_columns(["client"]) == load(
        tmp_path / "prepared"
    ).table.drop_columns(["client"])
    ages = opened.columns.read(np.arange(len(opened.owners)))["age"]
    assert ages.to_pylist() == expected.table["age"].to_pylist()
    assert len(experiment.training_parts) == 7


def test_a_private_run_tells_what_is_not_private(folder: Path) -> None:
    private = aggregator("private_mean", noise_multiplier=0.5)
    ranges = ("age=number(0..120)", "lab_värde=number(9000..11000)", "score=left_out")
    experiment = make(folder, "outcome", aggregator=private, columns=ranges)
    notes = experiment.build().notes
    assert "the means and variances are one more private release, which epsilon counts" in notes
    told = [line for line in notes if line.startswith("not private: ")]
    metrics, kinds, task, values, missing = told
    assert metrics.startswith("not private: the metrics of clients")
    assert kinds.startswith("not private: the kinds of 'kön', which follow from values; state the")
    assert task.endswith(
        "whether 'outcome' is a class or a number, which follows from values; "
        "state it: --data.task=classification"
    )
    assert "not private: the set of values of 'kön', 'outcome', which clients disclose" in values
    having = [c.treatment.name for c in experiment.features.columns if c.has_missing]
    assert having and missing.startswith(
        f"not private: which columns have missing values ({len(having)} of 3: {having[0]!r}"
    )
    assert all(repr(name) in missing for name in having)
    assert "'age=number(0..120):error'" in missing
    assert experiment.releases_before == 1

    stated = (*ranges, "kön=category(kvinna|man)", "outcome=category(frisk|sjuk)")
    experiment = make(folder, "outcome", aggregator=private, columns=stated, standardize="range")
    told = [line for line in experiment.build().notes if line.startswith("not private: ")]
    assert told == [
        metrics,
        *(line for line in told if "which columns have missing values" in line),
    ]
    assert len(told) == 2
    without = make(folder, "outcome", columns=stated).build().notes
    assert not [line for line in without if "private" in line]
    assert experiment.releases_before == 0


@pytest.mark.parametrize(
    "name", ["private_secure_mean", pytest.param("private_mean", marks=pytest.mark.slow)]
)
def test_a_private_run_has_one_epsilon_everywhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    """The start, the metrics and `fedpax show` count the statistics."""
    flags = ["--data.label=outcome", f"--aggregator={name}", "--aggregator.noise_multiplier=4"]
    flags += ["--aggregator.delta=0.01", "--cohort.size=5", "--training.rounds=2"]
    flags += ["--data.columns", "age=number(0..120)", "lab_värde=number(9000..11000)"]
    command = ["train", "--exp=fedavg_table", f"--data.files={folder}/*.csv", *flags]
    assert main([*command, "score=left_out", f"--job_log_dir={tmp_path}/run"]) == 0
    captured = capsys.readouterr()
    epsilon = PrivacyAccountant(4.0, 0.01, discrete=name != "private_mean").epsilon(2 + 1)
    told = f"epsilon {epsilon:.4g} of the model for delta 0.01, after 2 rounds and the release"
    assert told in captured.err + captured.out
    last = select(read_metrics(tmp_path / "run"), "training")[-1]
    assert last["epsilon"] == pytest.approx(epsilon, rel=1e-5)
    assert main(["show", f"--job_log_dir={tmp_path}/run"]) == 0
    shown = capsys.readouterr().out
    assert f"epsilon {epsilon:.4g} for delta 0.01 of the model after round 2" in shown


@pytest.mark.parametrize("name", ["apfl", pytest.param("hypcluster", marks=pytest.mark.slow)])
def test_the_command_measures_own_models(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    run, report = tmp_path / "run", tmp_path / "clients.json"
    flags = ["--data.label=outcome", "--data.columns", "score=left_out", "--cohort.size=5"]
    training = ["--training.rounds=2", "--training.evaluate_every=2", f"--method={name}"]
    files = f"--data.files={folder}/*.csv"
    command = ["train", "--exp=fedavg_table", files, *flags, *training, f"--job_log_dir={run}"]
    assert main(command) == 0
    evaluate = ["evaluate", f"--job_log_dir={run}", "--by_client", f"--json={report}"]
    assert main(evaluate) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["export", f"--job_log_dir={run}", f"--out={tmp_path}/model.npz"]) == 0
    place = f"fedpax.checkpoints.load_field({str(run)!r}, 'personal', 2)['rows']"
    printed = capsys.readouterr().out
    assert (place in printed) == ("is the shared model" in printed) == (name == "apfl")
    if name == "apfl":
        assert load_field(run, "personal", 2)["rows"]
    content = json.loads(report.read_text("utf-8"))
    kinds = ["loss", "accuracy", "auc", "average_precision", "precision", "recall"]
    own = {f"personal_{kind}" for kind in [*kinds, "calibration_error"]}
    shared = {name.removeprefix("personal_") for name in own} if name == "apfl" else set()
    assert set(content["clients"][0]) == {"client", "examples"} | own | shared
    examples = np.array([line["examples"] for line in content["clients"]])
    losses = [line["personal_loss"] for line in content["clients"] if line["examples"]]
    evaluations = select(read_metrics(run), "evaluation")
    mean = np.average(losses, weights=examples[examples > 0])
    assert mean == pytest.approx(evaluations[-1]["personal_loss"], rel=1e-4)

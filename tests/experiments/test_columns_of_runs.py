"""Tests of the columns that a model of a table keeps: in other files, when exported and resumed."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hospital_tables import make, write_hospitals

from fedpax.data import prepare
from fedpax.data.tables import Label, TableFeatures
from fedpax.main import main
from fedpax.run_files.metrics import read_metrics, select


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hospitals")
    write_hospitals(path)
    return path


def test_the_exported_model_has_its_columns(folder: Path, tmp_path: Path) -> None:
    experiment = make(folder, "score", hidden_sizes=(4,))
    run = experiment.build()
    params = jax.jit(run.init)(jax.random.key(0))
    assert {leaf.shape for leaf in jax.tree.leaves(params)} == {(6, 4), (4,), (4, 1), (1,)}
    experiment.write_model(tmp_path / "model", params, "fedavg_table")
    content = json.loads((tmp_path / "model" / "table.json").read_text("utf-8"))
    features = TableFeatures.from_json(content["columns"])
    assert features == experiment.prepared.features
    assert Label.from_json(content["label"]) == experiment.prepared.label
    inputs = features({"age": [None], "kön": ["man"], "lab_värde": [1e4]})
    assert model_output(run, params, inputs).shape == (1, 1)


def model_output(run: Any, params: Any, inputs: np.ndarray) -> Any:
    hidden = np.maximum(inputs @ params["layers"]["dense_0"]["kernel"], 0)
    return hidden @ params["layers"]["dense_1"]["kernel"]


def test_a_column_that_only_some_files_have(folder: Path, tmp_path: Path) -> None:
    for name in ("Oslo", "Lund", "Bonn"):
        text = (folder / f"{name}.csv").read_text("utf-8")
        if name == "Bonn":
            lines = text.splitlines()
            extra = [f"{line},{value}" for value, line in enumerate(lines[1:])]
            text = "\n".join([f"{lines[0]},blodtryck", *extra]) + "\n"
        (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"no column 'blodtryck'.*optional_columns=\['blodtryck'\]"
    ):
        make(tmp_path, "outcome").build()
    experiment = make(tmp_path, "outcome", optional_columns=("blodtryck",))
    names = experiment.prepared.features.names
    values = experiment.prepared.examples["features"][:, names.index("blodtryck")]
    missing = experiment.prepared.examples["features"][:, names.index("blodtryck is missing")]
    is_bonn = np.array(experiment.opened.names)[experiment.opened.owners] == "Bonn"
    np.testing.assert_array_equal(missing, ~is_bonn)
    assert not values[~is_bonn].any()
    own = values[is_bonn & experiment.opened.training]
    assert abs(own.mean()) < 1e-5 and own.std() == pytest.approx(1, abs=1e-4)


def test_prepared_files_equal_the_files(folder: Path, tmp_path: Path) -> None:
    prepare([str(folder / "*.csv")], tmp_path / "prepared", label="outcome")
    experiment = make(folder, "outcome")
    data = dataclasses.replace(experiment.data, files=(str(tmp_path / "prepared"),))
    prepared = dataclasses.replace(experiment, data=data)
    assert list(prepared.training_parts) == list(experiment.training_parts)
    for name, rows in experiment.training_parts.items():
        np.testing.assert_array_equal(prepared.training_parts[name], rows)
    for name, values in experiment.prepared.examples.items():
        np.testing.assert_array_equal(prepared.prepared.examples[name], values)


def test_a_model_keeps_its_columns_on_other_files(folder: Path, tmp_path: Path) -> None:
    trained = make(folder, "outcome")
    (tmp_path / "run").mkdir()
    trained.write_inputs(tmp_path / "run")
    other = tmp_path / "other"
    other.mkdir()
    text = (folder / "Oslo.csv").read_text("utf-8").replace("kvinna", "annat")
    for name in ("Ny", "Äldre"):
        (other / f"{name}.csv").write_text(text, encoding="utf-8")
    again = make(other, "outcome")
    again.read_inputs(tmp_path / "run")
    assert again.prepared.features == trained.prepared.features
    assert again.prepared.label == trained.prepared.label
    features = again.prepared.examples["features"]
    assert features.shape[1] == 6 and not features[:, 3].any()  # no "kvinna" there
    # Other settings, and a lost column, are told.
    changed = make(other, "outcome", columns=("age=left_out", "score=left_out"))
    with pytest.raises(ValueError, match=r"data.columns=.* but the model was trained with"):
        changed.read_inputs(tmp_path / "run")
    for name in ("Ny", "Äldre"):
        lines = [line.split(",", 1)[1] for line in text.splitlines()]
        (other / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lost = make(other, "outcome")
    lost.read_inputs(tmp_path / "run")
    with pytest.raises(ValueError, match=r"has no column 'age', which the model was trained with"):
        _ = lost.prepared
    optional = make(other, "outcome", optional_columns=("age",))
    optional.read_inputs(tmp_path / "run")
    assert np.all(optional.prepared.examples["features"][:, 1] == 1)
    (tmp_path / "run" / "table.json").write_text("{")
    with pytest.raises(ValueError, match=r"table.json is damaged"):
        optional.read_inputs(tmp_path / "run")


def test_a_run_resumes_with_the_columns_that_it_began_with(folder: Path, tmp_path: Path) -> None:
    flags = ["--exp=fedavg_table", f"--data.files={folder}/*.csv", "--data.label=outcome"]
    flags += ["--training.evaluate_every=2", "--data.columns", "score=left_out"]
    for name, stops in {"once": [4], "twice": [2, 4]}.items():
        for rounds in stops:
            run = [f"--job_log_dir={tmp_path / name}", f"--training.rounds={rounds}"]
            assert main(["train", *flags, *run]) == 0
    losses = {
        name: select(read_metrics(tmp_path / name), "evaluation")[-1]["loss"]
        for name in ("once", "twice")
    }
    assert losses["once"] == losses["twice"]


def test_values_that_training_has_not_are_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    random = np.random.default_rng(0)

    def write(path: Path, missing: int) -> None:
        rows = ["smokes,ward,age,outcome"]
        for k in range(30):
            known = [random.choice(["true", "false"]), random.choice(["A", "B"]), k]
            known[1] = "C" if k in (4, 5) and missing else known[1]
            rows.append(",".join(map(str, [*("   " if k < missing else known)])) + f",{k % 2}")
        path.mkdir()
        (path / "Oslo.csv").write_text("\n".join(rows).replace(" ", "") + "\n")
        (path / "Lund.csv").write_text("\n".join(rows[:1] + rows[8:]) + "\n")

    write(tmp_path / "whole", 0)
    write(tmp_path / "holed", 3)
    run = f"--job_log_dir={tmp_path / 'run'}"
    files, label = f"--data.files={tmp_path}/whole/*.csv", "--data.label=outcome"
    assert main(["train", "--exp=fedavg_table", files, label, "--training.rounds=1", run]) == 0
    assert main(["evaluate", run]) == 0
    assert "that training" not in capfd.readouterr().err
    assert main(["evaluate", run, f"--data.files={tmp_path}/holed/*.csv"]) == 0
    line = (
        "fedavg_table: missing values, of which training has none: 3 of 'smokes' become false, 3 "
        "of 'ward' become no category, 3 of 'age' become the mean "
    )
    told = capfd.readouterr().err
    assert line in told and "have no feature: 2 of 'ward', such as 'C'" in told
    columns = json.loads((tmp_path / "run" / "table.json").read_text())["columns"]
    features = TableFeatures.from_json(columns)
    features({"smokes": [None, None], "ward": ["D", None], "age": [3, None]})
    assert "1 of 'ward' become no category, 1 of 'age' become the mean" in caplog.text
    assert "1 of 'ward', such as 'D'" in caplog.text


def train_one_round(folder: Path, tmp_path: Path) -> str:
    """Train on the folder's files, and return the flag that names the run."""
    run, files = f"--job_log_dir={tmp_path / 'run'}", f"--data.files={folder}/*.csv"
    train = ["train", "--exp=fedavg_table", files, "--data.label=outcome", "--training.rounds=1"]
    assert main([*train, run]) == 0
    return run


def test_one_file_is_evaluated_as_one_client(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train_one_round(folder, tmp_path)
    prepare([str(folder / "*.csv")], tmp_path / "prepared", label="outcome")
    for path, clients in ((folder / "Lund.csv", {"Lund"}), (tmp_path / "prepared", None)):
        report = tmp_path / "report.json"
        evaluate = ["evaluate", run, f"--data.files={path}", "--by_client", f"--json={report}"]
        assert main(evaluate) == 0
        measured = json.loads(report.read_text())["clients"]
        names = {client["client"] for client in measured}
        assert names == clients if clients else {"Oslo", "Lund"} < names
        held_out = sum(client["examples"] for client in measured)
        rows = len((folder / "Lund.csv").read_text("utf-8").splitlines()) - 1
        of_all = rf"{rows}" if clients else r"\d+"
        expected = (
            rf"\nmeasured {held_out:.0f} of {of_all} examples: the held-out part; on these files, "
            r"(--data\.heldout_fraction=0\.\d+) measures the most\n"
        )
        told = re.search(expected, capfd.readouterr().out)
        assert told is not None
        assert main([*evaluate, told[1]]) == 0
        assert "part\n" in capfd.readouterr().out  # no flag measures more


def test_a_few_rows_are_measured_with_the_fraction_that_is_told(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command recommended 0.99 for any file, which leaves none of 12 rows, and raises."""
    run = train_one_round(folder, tmp_path)
    rows = (folder / "Lund.csv").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "few.csv").write_text("".join(rows[:13]), "utf-8")
    evaluate = ["evaluate", run, f"--data.files={tmp_path / 'few.csv'}"]
    assert main([*evaluate, "--data.heldout_fraction=0.99"]) == 2
    (count,) = re.findall(r"leaves none of the (\d+) examples", capfd.readouterr().err)
    assert main([*evaluate, "--data.heldout_fraction=0.3"]) == 0
    told = re.search(r"on these files, (\S+=0\.[589]) measures", capfd.readouterr().out)
    assert told is not None and main([*evaluate, told[1]]) == 0
    (measured,) = re.findall(rf"measured (\d+) of {count} .* part\n", capfd.readouterr().out)
    assert int(count) / 2 < int(measured) < int(count)


def test_a_class_as_a_client_gives_metrics_by_class(folder: Path, tmp_path: Path) -> None:
    """The held-out examples and the weighted mean are those of the clients."""
    run = f"--job_log_dir={tmp_path / 'run'}"
    files = f"--data.files={folder}/{{client}}.csv"
    train = ["train", "--exp=fedavg_table", files, "--data.label=outcome", "--training.rounds=1"]
    assert main([*train, run]) == 0
    reports = []
    for more in ([], ["--data.client=outcome"]):
        path = tmp_path / f"{len(reports)}.json"
        assert main(["evaluate", run, "--by_client", f"--json={path}", *more]) == 0
        reports.append(json.loads(path.read_text())["clients"])
    assert {row["client"] for row in reports[1]} <= {"frisk", "sjuk"}
    means = [
        np.average([r["accuracy"] for r in rows], weights=[r["examples"] for r in rows])
        for rows in ([r for r in report if r["examples"]] for report in reports)
    ]
    assert means[0] == pytest.approx(means[1], rel=1e-6) and len(reports[1]) == 2


def test_groups_of_other_held_out_examples_are_refused(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The names of files are a column of the examples, whose values choose the held-out ones."""
    run = train_one_round(folder, tmp_path)
    evaluate = ["evaluate", run, "--by_client", "--data.client=outcome"]
    for files in ([], [f"--data.files={folder}/*.csv"]):
        assert main([*evaluate, *files]) == 2
        assert "would hold out other examples" in capfd.readouterr().err
    assert main([*evaluate, f"--data.files={folder}/{{client}}.csv"]) == 0
    assert main([*evaluate, f"--data.files={folder}/Oslo.csv"]) == 0  # not the run's files


def test_the_command_line_names_flags_where_python_names_arguments(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Oslo.csv").write_text("age,outcome\n1,0\n2,1\n")
    (tmp_path / "Lund.csv").write_text("age,my dose,outcome\n1,3,0\n2,4,1\n")
    with pytest.raises(ValueError, match=r"give optional_columns=\['my dose'\] if .* columns=\["):
        make(tmp_path, "outcome").build()
    arguments = [f"--data.files={tmp_path}/*.csv", "--data.label=outcome"]
    run = f"--job_log_dir={tmp_path / 'run'}"
    assert main(["train", "--exp=fedavg_table", *arguments, run]) == 2
    error = capfd.readouterr().err
    assert "Add the column, or give --data.optional_columns 'my dose' if its values are" in error
    assert "columns=" not in error
    (tmp_path / "Lund.csv").write_text("age,outcome\n'a',0\n2,1\n")
    assert main(["train", "--exp=fedavg_table", *arguments, run]) == 2
    assert "or set --data.types age=string." in capfd.readouterr().err


def test_the_start_tells_how_clients_are_sampled(folder: Path) -> None:
    experiment = make(folder, "outcome")
    cohort = dataclasses.replace(experiment.cohort, sampling_probability=0.25)
    notes = dataclasses.replace(experiment, cohort=cohort).build().notes
    number = len(experiment.training_parts)
    assert f"a round has each of all {number} clients with probability 0.25" in notes[-1]


def test_the_range_of_a_label_holds_everywhere(folder: Path, tmp_path: Path) -> None:
    stated = ("outcome=left_out", "score=number(8..12)", "age=number(40..70)")
    experiment = make(folder, "score", columns=stated)
    prepared, opened = experiment.prepared, experiment.opened
    values = np.asarray(opened.columns["score"], np.float64)
    clipped = np.clip(values, 8, 12)
    kept = clipped[opened.training]
    label = prepared.label
    assert np.allclose([label.mean, label.scale], [kept.mean(), kept.std()], rtol=1e-4)
    scaled = (clipped - label.mean) / label.scale
    assert np.allclose(prepared.labels, scaled, atol=1e-5)
    assert np.allclose(prepared.examples["label"], scaled, atol=1e-5)

    # Metrics of the model 0, which predicts the mean.
    run = experiment.build()
    params = jax.jit(run.init)(jax.random.key(0))
    error = np.sqrt(np.mean((clipped[opened.heldout] - label.mean) ** 2))
    assert run.evaluate is not None and run.evaluate_clients is not None
    assert run.evaluate(params)["rmse"] == pytest.approx(error, rel=1e-4)
    by_client = run.evaluate_clients(params)
    for name, rmse in zip(by_client.names, by_client.metrics["rmse"], strict=True):
        own = opened.heldout & (np.array(opened.names)[opened.owners] == name)
        if own.any():
            assert rmse == pytest.approx(np.sqrt(np.mean((clipped[own] - label.mean) ** 2)), 1e-4)

    # The model keeps the range, and each value beyond it is counted.
    experiment.write_inputs(tmp_path)
    again = make(folder, "score", columns=stated)
    again.read_inputs(tmp_path)
    assert np.array_equal(again.prepared.labels, prepared.labels)
    content = json.loads((tmp_path / "table.json").read_text("utf-8"))
    del content["label"]["bounds"]  # an earlier version clipped the label for its mean alone
    (tmp_path / "table.json").write_text(json.dumps(content), "utf-8")
    old = make(folder, "score", columns=stated)
    old.read_inputs(tmp_path)
    assert np.allclose(old.prepared.labels, (values - label.mean) / label.scale, atol=1e-5)
    age = np.ma.filled(opened.columns["age"].to_numpy(), 50)
    outside = [int(((age < 40) | (age > 70)).sum()), int((clipped != values).sum())]
    (line,) = run.cautions
    assert min(outside) and line == (
        "values beyond the stated ranges, clipped to them: "
        f"{outside[0]} of 214 of 'age', {outside[1]} of 214 of 'score'"
    )
    assert again.build().cautions == run.cautions and line in run.notes

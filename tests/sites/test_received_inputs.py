"""A coordinator sends inputs that no agreement of sites makes, over loopback."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fedpax.errors import ArgumentError
from fedpax.experiments.fedavg_table import FedAvgTable
from sites.federation import write_hospitals
from sites.test_equals_training import experiment
from sites.test_hostile_coordinators import COMMON, Liar, joined

STATED = ("dose=number(0..1)", "patient=left_out", "zip=category(A|B)")


def write(folder: Path) -> None:
    """Write hospitals whose rows have a name, a zip code, and a note of one example each."""
    write_hospitals(folder, {"a": (40, 25)})
    for path in (folder / "a").iterdir():
        head, *rows = path.read_text().splitlines()
        rows = [f"{row},name {k // 2},{'AB'[k % 2]},note {k}" for k, row in enumerate(rows)]
        path.write_text("\n".join([f"{head},patient,zip,note", *rows]) + "\n")


def at_site(folder: Path, columns: tuple[str, ...] = STATED) -> FedAvgTable:
    return experiment(f"{folder}/data/a/*.csv", columns=columns)


def honest(folder: Path) -> Any:
    """Return the inputs that this site and no other would agree on."""
    return json.loads(json.dumps(at_site(folder).inputs)) | {"sites": 1}


def texts(name: str, *categories: str) -> dict[str, Any]:
    """Return a column of categories."""
    treatment = {"name": name, "kind": "category", "missing": "category", "values": None}
    column = {"treatment": {**treatment, "bounds": None, "reason": "x"}, "categories": categories}
    column |= {"mean": 0.0, "scale": 1.0, "has_missing": False, "has_other": False}
    return column | {"features": []}


def change(name: str, **fields: Any) -> Any:
    """Return a function that changes a column of inputs."""

    def apply(inputs: Any) -> None:
        (column,) = (c for c in inputs["columns"] if c["treatment"]["name"] == name)
        of_treatment = fields.keys() & column["treatment"].keys()
        column["treatment"] |= {n: fields[n] for n in of_treatment}
        column |= {n: x for n, x in fields.items() if n not in of_treatment}

    return apply


def add(name: str, *categories: str) -> Any:
    return lambda inputs: inputs["columns"].append(texts(name, *categories))


def with_label(**fields: Any) -> Any:
    return lambda inputs: inputs["label"].update(fields)


LIES: dict[str, tuple[Any, str]] = {
    "stated left out": (
        add("patient", "name 1", "name 2"),
        r"'patient' as category:category, expected left_out \(stated\)",
    ),
    "left out": (add("note", "note 1"), r"'note' as category:category, expected left_out \(text"),
    "label as feature": (add("outcome", "ill"), "'outcome' as a feature, expected no label"),
    "twice": (add("sex", "f"), "'sex' as twice, expected each column once"),
    "kind": (change("age", kind="category", missing="category"), "'age' as category:category"),
    "bounds": (change("dose", bounds=[0.5, 0.50001]), r"'dose' as number\(0.5..0.50001\):mean"),
    "stated values": (
        change("zip", categories=["A", "name 1"]),
        "'zip' as the categories",
    ),
    "categories": (
        change("sex", categories=[f"name {k}" for k in range(51)]),
        "'sex' as 51 categories, expected at most --data.max_categories=50",
    ),
    "mean": (change("dose", mean=1.5), "'dose' as the mean 1.5, expected a finite one from 0 to 1"),
    "scale": (change("age", scale=1e-20), "'age' as the scale 1e-20, expected at least 0.01"),
    "no scale": (change("age", scale=-1.0), "'age' as the scale -1.0"),
    "other label": (with_label(name="age"), "'age' as the label, expected 'outcome'"),
    "other task": (
        with_label(task="regression", classes=[]),
        "'outcome' as a label for regression, expected classification",
    ),
    "text": (change("age", mean="x"), "inputs are malformed"),
    "none": (lambda inputs: inputs.pop("columns"), "inputs are malformed"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("lie", LIES)
def test_a_site_trains_on_no_inputs_that_its_description_excludes(
    tmp_path: Path, notes: list[str], lie: str
) -> None:
    write(tmp_path / "data")
    apply, message = LIES[lie]
    liar = Liar(())
    liar.inputs = honest(tmp_path)
    apply(liar.inputs)
    with (
        pytest.raises(ArgumentError, match=message),
        joined(liar, at_site(tmp_path), tmp_path / "site"),
    ):
        pass
    assert not [note for note in notes if "trains on" in note]


def test_a_site_prints_the_features_that_it_trains_on(tmp_path: Path, notes: list[str]) -> None:
    write(tmp_path / "data")
    liar = Liar(())
    liar.inputs = honest(tmp_path)
    change("age", mean=90.0, scale=3.0)(liar.inputs)  # other sites differ
    change("sex", categories=["f", "m", "x"], features=["sex=f", "sex=m", "sex=x"])(liar.inputs)
    with joined(liar, at_site(tmp_path), tmp_path / "site") as site:
        assert site._has_inputs
    told = "trains on the features 'age', 'sex=f', 'sex=m', 'sex=x', 'dose', 'dose is missing'"
    assert f"{told}, 'zip=A', 'zip=B'" in notes


def test_values_that_a_site_has_sent_are_among_the_categories(tmp_path: Path) -> None:
    write(tmp_path / "data")
    liar = Liar(())
    inputs, liar.inputs = honest(tmp_path), None
    with joined(liar, at_site(tmp_path), tmp_path / "site") as site:
        liar.task = {**COMMON, "task": "values", "columns": ["sex", "patient", "note"]}
        site._step()
        assert set(liar.replies[0]["values"]) == {"sex"}
        liar.inputs = copy.deepcopy(inputs)
        change("sex", categories=["f"])(liar.inputs)
        with pytest.raises(ArgumentError, match="'sex' as no category 'm', expected each value"):
            site._step()
        liar.inputs = inputs
        site._step()
        assert site._has_inputs


def test_a_label_of_whole_numbers_can_be_numbers_at_all_sites_together(tmp_path: Path) -> None:
    write(tmp_path / "data")
    for path in (tmp_path / "data" / "a").iterdir():
        path.write_text(path.read_text().replace(",ill,", ",1,").replace(",well,", ",0,"))
    liar = Liar(())
    liar.inputs = honest(tmp_path)
    with_label(task="regression", classes=[], mean=20.0, scale=9.0)(liar.inputs)
    with joined(liar, at_site(tmp_path), tmp_path / "site") as site:
        assert site._has_inputs

"""Tests of `fedpax export --flower`."""

import ast
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from small_runs import TINY_TRANSFORMER, Command

from fedpax.deploy.flower.app_files import PACKAGE, app_name, write_app
from fedpax.deploy.nodes.node import Node
from fedpax.deploy.round_program import Settings, program_file, read_program
from fedpax.errors import ArgumentError
from fedpax.experiments.fedavg_table import FedAvgTable
from fedpax.experiments.node_data import experiment_data
from fedpax.run_files.configuration import read_configuration

SIZES = [9, 14, 5]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(0)
    for k, size in enumerate(SIZES):
        rows = [
            f"{a:.4f},{b:.4f},{'yes' if a > b else 'no'}" for a, b in random.normal(size=(size, 2))
        ]
        (folder / f"h{k}.csv").write_text("\n".join(["a,b,outcome", *rows]) + "\n")
    return folder


FLAGS = ("--exp=fedavg_table", "--data.label=outcome", "--training.rounds=7", "--cohort.size=2")


@pytest.fixture
def app(command: Command, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    out = tmp_path / "app"
    monkeypatch.chdir(files.parent)
    relative = f"--data.files={files.name}/*.csv"
    status, output, _ = command("export", "--flower", *FLAGS, relative, f"--out={out}")
    assert status == 0
    assert output.startswith("fedavg_table: a Flower app for 2 of 3 clients, program ")
    assert output.endswith(f"Next: flwr run {out} --stream\n")
    monkeypatch.chdir(tmp_path)
    return out


def test_an_app_has_what_flower_reads(app: Path) -> None:
    project = tomllib.loads((app / "pyproject.toml").read_text())
    flower = project["tool"]["flwr"]["app"]
    assert project["project"]["name"] == "fedavg-table"
    assert flower["config"]["rounds"] == 7
    for module, _, name in (ref.partition(":") for ref in flower["components"].values()):
        path = app / f"{module.replace('.', '/')}.py"
        assert f"\n{name} = " in path.read_text()
        compile(path.read_text(), path, "exec")
    # Flower bundles files with these endings alone, and no tests.
    endings = {path.suffix for path in app.rglob("*") if path.is_file()}
    assert endings == {".py", ".toml", ".md", ".json"}
    program = read_program(app / PACKAGE / "program.json")
    assert (program.size, program.settings.num_clients) == (2, 3)
    assert "'num-supernodes=3'" in (app / "README.md").read_text()


def test_a_participant_has_the_batches_of_a_run(app: Path, files: Path) -> None:
    configuration = read_configuration(app / PACKAGE)
    assert configuration is not None
    experiment = configuration[1]
    assert isinstance(experiment, FedAvgTable)
    assert experiment.data.files == (str(files / "*.csv"),)  # Flower copies the app elsewhere
    stream = experiment.build().cohorts
    program = read_program(app / PACKAGE / "program.json")
    steps = program.batch[0] if program.batch else 0
    for k in range(3):
        for config in ({}, {"files": str(files / f"h{k}.csv")}):
            result = experiment_data(app / PACKAGE, Node(k, 3, config, steps))
            for number in (0, 2):
                own = result.read_clients(number, np.array([k]))  # type: ignore[union-attr]
                want = stream.read_clients(number, np.array([k]))  # type: ignore[attr-defined]
                mask = want.batches["mask"]
                np.testing.assert_array_equal(own.batches["mask"], mask)
                for name in ("features", "label"):
                    np.testing.assert_array_equal(own.batches[name][mask], want.batches[name][mask])
                assert own.num_examples == want.num_examples


def test_a_participant_without_data_is_told(app: Path) -> None:
    with pytest.raises(ArgumentError, match="have 3 clients, and this node is participant 3"):
        experiment_data(app / PACKAGE, Node(3, 9, {}, 1))


def test_islands_read_rows_of_their_own(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "islands"
    status, output, _ = command(
        "export", "--flower", "--exp=diloco_text", *TINY_TRANSFORMER, f"--out={out}"
    )
    assert status == 0 and "for 4 of 4 islands" in output
    configuration = read_configuration(out / PACKAGE)
    assert configuration is not None
    stream = configuration[1].build().cohorts
    cohorts = [next(stream) for _ in range(3)]
    rows = experiment_data(out / PACKAGE, Node(2, 4, {}, 1))
    for number in (0, 2, 1, 1):
        result = rows(number)  # type: ignore[operator]
        for name, values in cohorts[number].batches.items():
            np.testing.assert_array_equal(result.batches[name], np.asarray(values)[2:3])
    with pytest.raises(ArgumentError, match="reads no files"):
        experiment_data(out / PACKAGE, Node(0, 4, {"files": "a.csv"}, 1))


def test_flags_of_models_are_refused(command: Command, tmp_path: Path) -> None:
    status, _, errors = command(
        "export", "--flower", "--round=1", *FLAGS, f"--out={tmp_path / 'x'}"
    )
    assert status == 2 and "--round is of an exported model, and --flower" in errors


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fedavg_table", "fedavg-table"),
        ("a/b.py:f", "a-b-py-f"),
        ("9", "a-9"),
        ("x" * 50, "x" * 30),
    ],
)
def test_names_of_apps(name: str, expected: str) -> None:
    assert app_name(name) == expected


def test_the_app_states_its_program(app: Path) -> None:
    content: Mapping[str, object] = json.loads((app / PACKAGE / "program.json").read_text())
    assert content["program"] == read_program(app / PACKAGE / "program.json").program


def test_an_experiment_is_exported_once(app: Path, tmp_path: Path) -> None:
    configuration = read_configuration(app / PACKAGE)
    assert configuration is not None
    path = program_file(configuration[1], tmp_path / "programs")
    again = read_program(path)
    assert again.program == read_program(app / PACKAGE / "program.json").program
    changed = path.stat().st_mtime_ns
    assert program_file(configuration[1], tmp_path / "programs") == path
    assert path.stat().st_mtime_ns == changed


@pytest.mark.parametrize(
    "name",
    ['my "file".py:f', "C:\\new\\users.py:f", 'a\n[b]\nc="d"', 'x"""\nimport os\n"""', "\ud800"],
    ids=ascii,
)
def test_names_of_any_characters_are_texts_in_the_files_of_an_app(
    tmp_path: Path, name: str
) -> None:
    settings = Settings(rounds=1, num_clients=2)
    write_app(
        tmp_path / "app", name=name, program="{}", settings=settings, size=2, participants=name
    )
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["components"]["serverapp"] == f"{PACKAGE}.server_app:app"
    for file, statements in {"__init__.py": 1, "server_app.py": 4}.items():
        tree = ast.parse((tmp_path / "app" / PACKAGE / file).read_text())
        assert len(tree.body) == statements

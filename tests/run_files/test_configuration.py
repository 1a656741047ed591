import dataclasses
import json
from pathlib import Path

import pytest
from small_regression import regression

from fedpax.errors import ConfigurationError
from fedpax.parallel.mesh import MeshConfig
from fedpax.run_files.configuration import (
    differences,
    from_json,
    is_within_fedpax,
    moved_out_of_main,
    own_classes,
    read_configuration,
    to_json,
    write_configuration,
)
from fedpax.run_files.paths import CONFIGURATION, resolve_folder, resolve_job_log_dir
from fedpax.training.training_config import TrainingConfig


@dataclasses.dataclass(frozen=True)
class Everything:
    name: str
    rate: float
    betas: tuple[float, ...]
    shapes: tuple[tuple[int, str], ...]
    limit: int | None
    bias: bool
    training: TrainingConfig
    meshes: tuple[MeshConfig, ...] = ()


EVERYTHING = Everything(
    name='quoted "name", ünïcode',
    rate=0.1 + 0.2,
    betas=(0.9, 1e-300),
    shapes=((1, "a"), (2, "b")),
    limit=None,
    bias=True,
    training=TrainingConfig(rounds=3, evaluate_every=0, checkpoint_every=2),
    meshes=(MeshConfig(clients=4), MeshConfig(fsdp=-1)),
)


def test_reading_gives_an_equal_dataclass(tmp_path: Path) -> None:
    for number, configuration in enumerate((EVERYTHING, regression())):
        folder = tmp_path / str(number)
        write_configuration(folder, configuration, exp="some:name")
        assert read_configuration(folder, configuration) == ("some:name", configuration)
    # Python takes 1, True and 1.0 for equal.
    reloaded = read_configuration(tmp_path / "0", EVERYTHING)[1]
    assert isinstance(reloaded.bias, bool) and isinstance(reloaded.betas, tuple)
    assert isinstance(reloaded.meshes[0], MeshConfig)


def test_a_folder_without_configuration_gives_none(tmp_path: Path) -> None:
    assert read_configuration(tmp_path / "nowhere") is None


@pytest.mark.parametrize("value", [[1], {"a": 1}, print, 1j, b"x", {1}])
def test_values_that_json_cannot_restore_raise(value: object) -> None:
    bad = dataclasses.replace(EVERYTHING, betas=(0.9, value))
    with pytest.raises(ConfigurationError, match=r"betas\[1\].*Store a name or a number"):
        to_json(bad)


def test_differences_are_listed_by_the_path_of_the_field() -> None:
    other = dataclasses.replace(
        EVERYTHING,
        rate=1.0,
        training=dataclasses.replace(EVERYTHING.training, rounds=9),
        meshes=(MeshConfig(clients=4),),
    )
    assert differences(EVERYTHING, EVERYTHING) == {}
    changes = differences(EVERYTHING, other)
    assert list(changes) == ["rate", "training.rounds", "meshes"]
    assert changes["rate"] == "0.30000000000000004 -> 1.0"
    assert changes["training.rounds"] == "3 -> 9"


def test_another_class_is_a_difference() -> None:
    changes = differences(MeshConfig(), EVERYTHING.training)
    assert "MeshConfig" in changes["class"]
    assert changes["islands"] == "null -> (no such field)"


def test_a_field_added_to_the_class_takes_its_default() -> None:
    value = to_json(EVERYTHING.training)
    del value["keep_checkpoints"]
    assert from_json(value) == EVERYTHING.training


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gone": 1}, "gone"),
        ({"class": "fedpax.training.experiment:Gone"}, "Gone"),
        ({"class": "fedpax.nowhere:Gone"}, "nowhere"),
        ({"rounds": 0}, "rounds=0: expected an int of at least 1"),
        ({"rounds": {"a": 1}}, "names None"),
    ],
)
def test_a_configuration_that_cannot_be_rebuilt_raises(change: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        from_json(to_json(EVERYTHING.training) | change)
    assert "start in an empty folder" in str(caught.value)


@pytest.mark.parametrize("group", [None, 3, [], to_json(MeshConfig())])
def test_a_group_of_fields_that_is_something_else_raises(group: object) -> None:
    value = to_json(EVERYTHING) | {"training": group}
    with pytest.raises(ConfigurationError, match=r"runs/x names .*: training is ") as caught:
        from_json(value, "runs/x", own_classes(EVERYTHING))
    assert "start in an empty folder" in str(caught.value)


@pytest.mark.parametrize("value", [3, [], True, {"class": "fedpax.parallel.mesh:MeshConfig"}])
def test_a_text_that_is_something_else_raises(value: object) -> None:
    with pytest.raises(ConfigurationError, match="checkpoint_dir is"):
        from_json(to_json(EVERYTHING.training) | {"checkpoint_dir": value})


def test_a_kill_while_writing_leaves_the_old_file_complete(tmp_path: Path) -> None:
    write_configuration(tmp_path, EVERYTHING, "a")
    # A kill between the first byte and the rename leaves this behind.
    (tmp_path / f".{CONFIGURATION}.draft").write_text('{"version": 1, "exp')
    assert read_configuration(tmp_path, EVERYTHING) == ("a", EVERYTHING)
    write_configuration(tmp_path, EVERYTHING, "a")
    assert [path.name for path in tmp_path.iterdir()] == [CONFIGURATION]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"version": 1, "exp',
        "[]",
        '{"version": 1}',
        '{"version": 1, "exp": "", "configuration": 3}',
    ],
)
def test_a_damaged_file_raises(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIGURATION).write_text(text)
    with pytest.raises(ConfigurationError, match="delete it and start the run's former command"):
        read_configuration(tmp_path)


def test_a_later_version_raises(tmp_path: Path) -> None:
    write_configuration(tmp_path, EVERYTHING, "a")
    content = json.loads((tmp_path / CONFIGURATION).read_text())
    (tmp_path / CONFIGURATION).write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(ConfigurationError, match="version 2, expected version 1"):
        read_configuration(tmp_path)


@pytest.mark.parametrize(
    "change", [{"rounds": 0}, {"evaluate_every": -1}, {"keep_checkpoints": 0}, {"keep_every": -1}]
)
def test_training_settings_out_of_range_raise(change: dict) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=f"--training.{name} to"):
        dataclasses.replace(EVERYTHING.training, **change)


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_job_log_dir("~/run") == tmp_path / "run"
    assert resolve_job_log_dir(Path("~")) == tmp_path
    with pytest.raises(ConfigurationError, match="Set the folder's full path"):
        resolve_job_log_dir("~no_such_user/run")


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://b", "file:///tmp/x", Path("gs://b/r")])
def test_a_url_is_no_folder(url: str | Path) -> None:
    with pytest.raises(ConfigurationError, match=r"URL, expected a folder.*(Mount the b|chec)"):
        resolve_job_log_dir(url)


def test_a_colon_in_a_path_is_no_url(tmp_path: Path) -> None:
    assert resolve_job_log_dir(tmp_path / "a:b/c") == tmp_path / "a:b/c"


@pytest.mark.parametrize("name", ["x", "xy", "a" * 64, "My-bucket", "-abc"])
def test_a_wrong_name_of_a_bucket_is_told(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"bucket '{name}', expected a name of 3 to 63"):
        resolve_folder(f"gs://{name}/run")
    with pytest.raises(ConfigurationError, match="is not a folder of a bucket that a run can use"):
        resolve_folder("s3://x/run")


def test_classes_are_named_and_never_run() -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json names the class"):
        from_json({"class": "os:system", "command": "ls"})
    moved = moved_out_of_main({"class": "__main__:Model", "hidden": 8}, "mine")
    assert moved == {"class": "mine:Model", "hidden": 8}
    assert is_within_fedpax("fedpax.parallel.mesh:MeshConfig") and not is_within_fedpax(
        "mine:Model"
    )

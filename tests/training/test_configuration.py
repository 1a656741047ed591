import dataclasses
import json
from pathlib import Path

import pytest
from small_regression import regression

from fedpax.parallel.mesh import MeshConfig
from fedpax.training.configuration import (
    FILE,
    ConfigurationError,
    claim,
    differences,
    from_json,
    read,
    to_json,
    write,
)
from fedpax.training.experiment import TrainingConfig


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


def test_reload_gives_an_equal_dataclass(tmp_path: Path) -> None:
    for number, configuration in enumerate((EVERYTHING, regression())):
        write(tmp_path / str(number), configuration, exp="some:name")
        assert read(tmp_path / str(number)) == ("some:name", configuration)
    # Equality alone would take 1 for True and 1.0.
    reloaded = read(tmp_path / "0")[1]
    assert isinstance(reloaded.bias, bool) and isinstance(reloaded.betas, tuple)
    assert isinstance(reloaded.meshes[0], MeshConfig)


def test_a_folder_without_configuration_has_none(tmp_path: Path) -> None:
    assert read(tmp_path / "nowhere") is None


@pytest.mark.parametrize("value", [[1], {"a": 1}, print, 1j, b"x", {1}])
def test_values_that_json_cannot_give_back_are_refused(value: object) -> None:
    bad = dataclasses.replace(EVERYTHING, betas=(0.9, value))
    with pytest.raises(ConfigurationError, match=r"betas\[1\].*Store a name or a number"):
        to_json(bad)


def test_differences_are_lines_with_the_path_of_the_field() -> None:
    other = dataclasses.replace(
        EVERYTHING,
        rate=1.0,
        training=dataclasses.replace(EVERYTHING.training, rounds=9),
        meshes=(MeshConfig(clients=4),),
    )
    assert differences(EVERYTHING, EVERYTHING) == []
    lines = differences(EVERYTHING, other)
    assert lines[:2] == ["rate: 0.30000000000000004 -> 1.0", "training.rounds: 3 -> 9"]
    assert len(lines) == 3 and lines[2].startswith("meshes: ")


def test_another_class_is_a_difference() -> None:
    lines = differences(MeshConfig(), EVERYTHING.training)
    assert any(line.startswith("class: ") and "MeshConfig" in line for line in lines)
    assert "islands: 1 -> (not there)" in lines


def test_a_field_that_the_class_gained_takes_its_default() -> None:
    value = to_json(EVERYTHING.training)
    del value["keep_checkpoints"]
    assert from_json(value) == EVERYTHING.training


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gone": 1}, "gone"),
        ({"class": "fedpax.training.experiment:Gone"}, "Gone"),
        ({"class": "fedpax.nowhere:Gone"}, "nowhere"),
        ({"rounds": 0}, "too small"),
    ],
)
def test_what_cannot_be_rebuilt_says_so(change: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        from_json(to_json(EVERYTHING.training) | change)
    assert "start in an empty folder" in str(caught.value)


def test_a_claimed_folder_takes_the_same_configuration_alone(tmp_path: Path) -> None:
    claim(tmp_path, EVERYTHING, "a")
    claim(tmp_path, EVERYTHING, "a")
    other = dataclasses.replace(EVERYTHING, rate=0.5)
    with pytest.raises(ConfigurationError) as caught:
        claim(tmp_path, other, "a")
    message = str(caught.value)
    assert "rate: 0.30000000000000004 -> 0.5" in message
    assert "another --job_log_dir" in message and "--accept_changes" in message
    assert read(tmp_path) == ("a", EVERYTHING)  # a refusal changes nothing
    claim(tmp_path, other, "b", accept_changes=True)
    assert read(tmp_path) == ("b", other)


def test_another_process_does_not_write(tmp_path: Path) -> None:
    claim(tmp_path, EVERYTHING, "a", writes=False)
    assert read(tmp_path) is None


def test_a_kill_while_writing_leaves_the_old_file_whole(tmp_path: Path) -> None:
    claim(tmp_path, EVERYTHING, "a")
    # What a kill between the first byte and the rename leaves behind.
    (tmp_path / f".{FILE}.draft").write_text('{"version": 1, "exp')
    assert read(tmp_path) == ("a", EVERYTHING)
    claim(tmp_path, EVERYTHING, "a", accept_changes=True)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("text", ["", '{"version": 1, "exp', "[]", '{"version": 1}'])
def test_a_file_that_something_else_damaged_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigurationError, match="Delete it to go on"):
        claim(tmp_path, EVERYTHING, "a")


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path, EVERYTHING, "a")
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(ConfigurationError, match="version 2; this fedpax reads version 1"):
        read(tmp_path)


@pytest.mark.parametrize("change", [{"rounds": 0}, {"evaluate_every": -1}, {"keep_checkpoints": 0}])
def test_training_settings_out_of_range(change: dict) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=f"--training.{name} to"):
        dataclasses.replace(EVERYTHING.training, **change)

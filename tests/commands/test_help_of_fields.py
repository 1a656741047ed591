"""The descriptions of fields in `--help`."""

import ast
import dataclasses
import re

import pytest

from fedpax.commands.parts.options import configure, override
from fedpax.experiments.catalog import EXPERIMENTS
from fedpax.training.experiment import Experiment, Run
from fedpax.training.training_config import TrainingConfig


@dataclasses.dataclass(frozen=True)
class Digits(Experiment):
    """An experiment.

    Attributes:
        classes: the labels of
            "digits" or
            `letters`, at least
            10 of them.

            A new paragraph.
    """

    classes: int = 10

    def build(self) -> Run:
        """Build nothing."""
        raise NotImplementedError


@pytest.mark.parametrize("argument", ["--help", "--classes=x"])
def test_only_a_blank_line_begins_a_new_line(
    capsys: pytest.CaptureFixture[str], argument: str
) -> None:
    with pytest.raises(SystemExit):
        override(Digits(training=TrainingConfig(1, 0, 0)), [argument], "fedpax train", "")
    lines = [line.strip("│ ") for line in "".join(capsys.readouterr()).splitlines()]
    first = lines.index('the labels of "digits" or `letters`, at least 10 of them.')
    assert lines[first + 1 : first + 3] == ["", "A new paragraph. (default: 10)"]


def test_the_help_says_that_adapters_need_weights(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        configure("fedavg_lora_text", ["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "random parameters. Adapters (`lora.rank` above 0) need a folder." in text


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_help_of_an_experiment_states_no_other_default(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit):
        configure(name, ["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    fields = re.split(r" --(?=\w)", text)
    assert any(" (default: " in field for field in fields)
    for field in fields:
        stated = re.search(r"\bDefault (\S+?)(?::|\.(?=\s)).*\(default: (.*?)\)", field)
        if stated and stated[1] != "()":
            assert ast.literal_eval(stated[1]) == ast.literal_eval(stated[2]), field


def test_the_help_keeps_the_meaning_of_another_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        configure("decoupled_diloco_text", ["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "islands of one certificate count once. (default: 2)" in text
    with pytest.raises(SystemExit):
        configure("diloco_c4_1b", ["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert re.search(r"(?<!Default )None: [^()]* \(default: 128\)", text)


@dataclasses.dataclass(frozen=True)
class Tables(Digits):
    """An experiment with a field that no configuration file can hold."""

    sizes: dict[str, int] = dataclasses.field(default_factory=lambda: {"small": 3})


def test_an_experiment_that_cannot_be_saved_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        override(Tables(training=TrainingConfig(1, 0, 0)), ["--help"], "fedpax train", "")
    assert "--classes INT" in capsys.readouterr().out

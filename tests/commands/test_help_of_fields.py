"""The descriptions of fields in `--help`."""

import dataclasses

import pytest

from fedpax.commands.parts.options import configure, override
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


@dataclasses.dataclass(frozen=True)
class Tables(Digits):
    """An experiment with a field that no configuration file can hold."""

    sizes: dict[str, int] = dataclasses.field(default_factory=lambda: {"small": 3})


def test_an_experiment_that_cannot_be_saved_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        override(Tables(training=TrainingConfig(1, 0, 0)), ["--help"], "fedpax train", "")
    assert "--classes INT" in capsys.readouterr().out

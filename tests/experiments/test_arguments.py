"""Command line options that take several values."""

import argparse

import pytest

from fedpax.experiments.benchmarks import client_drift, goodput
from fedpax.experiments.benchmarks.arguments import integers, numbers


@pytest.mark.parametrize("text", ["", "a", "1,", "1;2", ",1", "1 2"])
def test_other_texts_are_refused_with_an_example(text: str) -> None:
    for parse, example in ((integers, "2,8"), (numbers, "0.1,0.3")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r}.*such as {example}"):
            parse(text)


def test_integers_are_not_fractions() -> None:
    assert numbers("1.5, 2") == [1.5, 2.0]
    with pytest.raises(argparse.ArgumentTypeError, match="expected integers"):
        integers("1.5")


def test_a_command_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    for command, arguments in (
        (client_drift, ["--local_steps=ten"]),
        (goodput, ["--chips=1,", "--out=unused"]),
    ):
        with pytest.raises(SystemExit) as error:
            command.main(arguments)
        assert error.value.code == 2
        option = arguments[0].split("=")[0]
        assert f"argument {option}: " in capsys.readouterr().err

"""Command line options that take several values."""

import argparse

import pytest

from fedpax.experiments.benchmarks import client_drift, fedavg_round, site_memory
from fedpax.experiments.benchmarks.harness import integers, numbers


@pytest.mark.parametrize("text", ["", "a", "1,", "1;2", ",1", "1 2"])
def test_other_texts_are_refused_with_an_example(text: str) -> None:
    for parse, example in ((integers, "2,8"), (numbers, "0.1,0.3")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r}.*such as {example}"):
            parse(text)


def test_integers_are_not_fractions() -> None:
    assert numbers("1.5, 2") == [1.5, 2.0]
    with pytest.raises(argparse.ArgumentTypeError, match="expected integers"):
        integers("1.5")


@pytest.mark.parametrize("text", ["-1", "1,-1", "nan", "inf"])
def test_numbers_are_finite_and_not_negative(text: str) -> None:
    assert numbers("0") == [0.0]
    with pytest.raises(argparse.ArgumentTypeError, match="expected numbers of at least 0"):
        numbers(text)


@pytest.mark.parametrize("text", ["0", "8,-5"])
def test_integers_are_positive(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected integers of at least 1"):
        integers(text)


def test_a_command_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    for command, arguments in (
        (client_drift, ["--local_steps=ten"]),
        (site_memory, ["--sites=1,", "--out=unused"]),
        (fedavg_round, ["--chunk_size=auto,a"]),
    ):
        with pytest.raises(SystemExit) as error:
            command.main(arguments)
        assert error.value.code == 2
        option = arguments[0].split("=")[0]
        assert f"argument {option}: " in capsys.readouterr().err

"""Tests of `fedpax partition`."""

from pathlib import Path

import pytest
from small_runs import REGRESSION, Command

from fedpax.commands.parts.options import configure
from fedpax.data import partition_statistics


def test_the_clients_of_an_experiment_are_shown(command: Command, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "clients.png"
    fields = ("--population.num_clients=12", "--cohort.seed=3")
    status, output, errors = command(
        "partition", "--exp=fedavg_digits", f"--picture={picture}", *fields
    )
    assert (status, errors) == (0, "")
    population, labels = configure("fedavg_digits", fields).read_population()
    assert len(population) == 12
    assert output == f"{partition_statistics(population, labels)}\n"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "`fedpax partition` has no --exp"),
        ((f"--exp={REGRESSION}",), "has no population, expected an experiment with a method"),
        (("--exp=fedavg_digits", "--picture=x.svg"), "--picture=x.svg is not a PNG"),
    ],
)
def test_arguments_that_are_refused(
    command: Command, arguments: tuple[str, ...], words: str
) -> None:
    status, output, errors = command("partition", *arguments)
    assert (status, output) == (2, "") and words in errors

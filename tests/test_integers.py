"""Tests of the ranges of integers: no run starts with a number that JAX or NumPy cannot take."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import pytest
from small_regression import regression

from fedpax.aggregators import private_mean
from fedpax.checks import SEED, check_integer_fields
from fedpax.commands.parts.options import configure
from fedpax.errors import ConfigurationError
from fedpax.experiments.catalog import find_experiment
from fedpax.main import main
from fedpax.run_files.configuration import from_json, to_json
from fedpax.training.trainer import train

NINES = int("9" * 23)


@pytest.mark.parametrize(
    ("exp", "field"),
    [
        ("fedavg_digits", "--training.seed"),
        ("fedavg_digits", "--cohort.seed"),
        ("fedavg_digits", "--seed"),
        ("diloco_text", "--data.seed"),
        ("diloco_text", "--training.rounds"),
        ("diloco_text", "--training.keep_every"),
        ("diloco_text", "--data.seq_len"),
        ("diloco_text", "--model.num_layers"),
        ("methods_digits:fedac", "--cohort.size"),
    ],
)
def test_an_integer_out_of_range_is_told_with_its_field(
    capsys: pytest.CaptureFixture, tmp_path: Path, exp: str, field: str
) -> None:
    command = ["train", f"--exp={exp}", f"--job_log_dir={tmp_path / 'run'}"]
    for value in (NINES, "inf"):
        assert main([*command, f"{field}={value}"]) == 2
        errors = " ".join(capsys.readouterr().err.replace("│", "").split())
        assert str(value) in errors and "Traceback" not in errors
        assert field.removeprefix("--") in errors
    assert not (tmp_path / "run").exists()


def test_seeds_that_jax_would_shorten_to_others_are_refused() -> None:
    key = jax.random.key_data(jax.random.key(1))
    assert (jax.random.key_data(jax.random.key(2**32 + 1)) == key).all()
    with pytest.raises(ValueError, match=r"training\.seed=4294967297: expected an int from -2"):
        dataclasses.replace(regression().training, seed=2**32 + 1)
    with pytest.raises(ValueError, match="seed is 4294967297, expected an int from -2147483648 to"):
        private_mean(noise_multiplier=1.0, max_norm=1.0, seed=2**32 + 1)
    for seed in (SEED.least, SEED.most):
        jax.random.key(seed)
        assert configure("fedavg_digits", [f"--training.seed={seed}"]).training.seed == seed


def test_the_seed_and_the_number_of_tokens_of_a_generation_are_checked(
    capsys: pytest.CaptureFixture,
) -> None:
    for flag in ("seed", "num_tokens"):
        assert main(["generate", "--job_log_dir=x", "--prompt=x", f"--{flag}={NINES}"]) == 2
        assert f"--{flag}={NINES}" in capsys.readouterr().err


@pytest.mark.parametrize("value", [math.inf, math.nan, 2.5, True, "3", 2**31])
def test_rounds_that_are_no_number_of_rounds_are_told(value: Any) -> None:
    training = regression().training
    with pytest.raises(ValueError, match=r"training\.rounds=.*expected an int from -2147"):
        dataclasses.replace(training, rounds=value)
    with pytest.raises(ConfigurationError, match=r"training\.rounds=.*expected an int "):
        from_json(to_json(training) | {"rounds": value})


def test_fields_of_own_experiments_and_groups_are_checked(tmp_path: Path) -> None:
    @dataclasses.dataclass(frozen=True)
    class Own:
        limit: int | None = None
        sizes: tuple[int, ...] = (1, 2)
        noise_seed: int = 0
        rate: float = 1.0

    check_integer_fields(Own(rate=math.inf))
    for changes in ({"limit": NINES}, {"sizes": (1, math.inf)}, {"noise_seed": 2**32}):
        (name,) = changes
        with pytest.raises(ValueError, match=rf"^{name}=.*Set --{name} to a value in this range"):
            check_integer_fields(Own(**changes))
    experiment = find_experiment("fedavg_digits")()
    with pytest.raises(ValueError, match=r"cohort\.size=inf: expected an int of at least 1"):
        dataclasses.replace(experiment.cohort, size=math.inf)
    cohort = dataclasses.replace(experiment.cohort)
    object.__setattr__(cohort, "size", math.inf)  # as a configuration without ranges
    with pytest.raises(ValueError, match=r"cohort\.size=inf: expected an int from"):
        train(dataclasses.replace(experiment, cohort=cohort), tmp_path / "run")
    assert not (tmp_path / "run").exists()

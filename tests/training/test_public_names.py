"""Tests of the public names of fedpax.training."""

import subprocess
import sys

import pytest

import fedpax.training


@pytest.mark.parametrize("name", fedpax.training.__all__)
def test_a_name_is_imported_from_the_package(name: str) -> None:
    assert getattr(fedpax.training, name) is not None and name in dir(fedpax.training)


def test_an_unknown_name_raises() -> None:
    with pytest.raises(AttributeError, match=r"fedpax\.training' has no attribute 'unknown"):
        fedpax.training.unknown  # noqa: B018


def test_shows_and_runs_without_a_model_of_flax_do_not_load_it() -> None:
    code = "import sys, fedpax.commands.show, fedpax.training.trainer; print('flax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

"""Tests of the public names of fedpax.training."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedpax.training


@pytest.mark.parametrize("name", fedpax.training.__all__)
def test_a_name_is_imported_from_the_package(name: str) -> None:
    assert getattr(fedpax.training, name) is not None and name in dir(fedpax.training)


def test_the_stub_has_every_public_name() -> None:
    stub = (Path(fedpax.training.__file__).parent / "__init__.pyi").read_text()
    exported = re.findall(r"^from (\S+) import (\w+) as \2$", stub, re.MULTILINE)
    names = fedpax.training._NAMES
    assert set(exported) == {(module, n) for module in names for n in names[module].split()}


def test_an_unknown_name_raises() -> None:
    with pytest.raises(AttributeError, match=r"fedpax\.training' has no attribute 'unknown"):
        fedpax.training.unknown  # noqa: B018


def test_commands_that_do_not_train_load_no_models() -> None:
    code = "import sys, fedpax.commands.show; print('flax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

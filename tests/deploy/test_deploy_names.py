"""Tests of the public names of fedpax.deploy, and of what processes without JAX import."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedpax.deploy
from fedpax.deploy.flower.app_files import _plain


@pytest.mark.parametrize("name", fedpax.deploy.__all__)
def test_a_name_is_imported_from_the_package(name):
    assert getattr(fedpax.deploy, name) is not None and name in dir(fedpax.deploy)


def test_the_stub_has_every_public_name():
    stub = (Path(fedpax.deploy.__file__).parent / "__init__.pyi").read_text()
    exported = re.findall(r"^from (\S+) import (\w+) as \2$", stub, re.MULTILINE)
    names = fedpax.deploy._NAMES
    assert set(exported) == {(module, n) for module in names for n in names[module].split()}


def test_an_unknown_name_raises():
    with pytest.raises(AttributeError, match=r"fedpax\.deploy' has no attribute 'unknown"):
        fedpax.deploy.unknown  # noqa: B018


def test_a_process_that_forwards_messages_imports_no_jax():
    code = "import sys, fedpax.deploy.flower.app; print({'jax', 'flwr'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_text_in_an_app_ends_no_text_of_toml() -> None:
    assert _plain(r'C:\new\my "file".py:f') == "C:_new_my _file_.py:f"

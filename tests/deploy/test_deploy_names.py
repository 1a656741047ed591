"""Tests of the public names of fedpax.deploy, and of what processes without JAX import."""

import subprocess
import sys

import pytest

import fedpax.deploy
from fedpax.deploy.flower.app_files import _plain


@pytest.mark.parametrize("name", fedpax.deploy.__all__)
def test_a_name_is_imported_from_the_package(name):
    assert getattr(fedpax.deploy, name) is not None and name in dir(fedpax.deploy)


def test_an_unknown_name_raises():
    with pytest.raises(AttributeError, match=r"fedpax\.deploy' has no attribute 'unknown"):
        fedpax.deploy.unknown  # noqa: B018


def test_a_process_that_forwards_messages_imports_no_jax():
    code = "import sys, fedpax.deploy.flower.app; print({'jax', 'flwr'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_text_in_an_app_ends_no_text_of_toml() -> None:
    assert _plain(r'C:\new\my "file".py:f') == "C:_new_my _file_.py:f"

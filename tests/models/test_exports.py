"""The exports of `fedpax.models` and `fedpax.models.attention`."""

import importlib
import subprocess
import sys
from types import ModuleType

import pytest


@pytest.mark.parametrize("package", ["fedpax.models", "fedpax.models.attention"])
def test_every_exported_name_is_public_and_no_module(package: str) -> None:
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(module.__all__)
    for name in module.__all__:
        assert not name.startswith("_") and not isinstance(getattr(module, name), ModuleType), name


def test_transformer_is_the_function_even_after_its_module_was_imported() -> None:
    module = importlib.import_module("fedpax.models.transformer")
    from fedpax.models import transformer

    assert transformer is module.transformer and callable(transformer)


@pytest.mark.slow
def test_importing_the_models_imports_no_kernels() -> None:
    """Pallas takes as long to import as flax; only programs for TPUs need it."""
    program = "import sys, fedpax.models; print('jax.experimental.pallas' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr

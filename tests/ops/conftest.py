"""Fixture: fast compilation."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def quick(quick_compilation: None) -> None:
    """Compile without optimizations."""

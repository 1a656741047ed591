"""The embedded data sets, prepared once for all tests in this folder."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpax.data import Source, load


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data_dir")


@pytest.fixture(scope="session")
def text(data_dir: Path) -> Callable[[str], Source]:
    """Return a function that opens a split of the standard library's text."""
    return lambda split: load("stdlib_text", split, data_dir=data_dir)


@pytest.fixture(scope="session")
def digits(data_dir: Path) -> Callable[[str], Source]:
    """Return a function that opens a split of the digits."""
    return lambda split: load("digits", split, data_dir=data_dir)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def documents(rng: np.random.Generator) -> list[dict[str, bytes]]:
    """Make twenty texts of random letters, of 0 to 99 bytes."""
    lengths: NDArray[np.int64] = rng.integers(0, 100, 20)
    lengths[3] = 0
    return [{"text": rng.integers(97, 123, n).astype(np.uint8).tobytes()} for n in lengths]

"""Fixtures: random parameters, larger than freshly initialized ones, and fast compilation."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from fedpax.models.nnx_functional import FunctionalModel


@pytest.fixture
def random_params() -> Callable[[FunctionalModel], Any]:
    """Draw a model's parameters, float32: standard deviation 0.4, mean 1 for scales, else 0."""
    random = np.random.default_rng(0)

    def one(path: Any, leaf: Any) -> Any:
        center = 1.0 if path[-1].key == "scale" else 0.0
        return (center + 0.4 * random.normal(size=leaf.shape)).astype(np.float32)

    def draw(model: FunctionalModel) -> Any:
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        return jax.tree_util.tree_map_with_path(one, shapes)

    return draw


@pytest.fixture(autouse=True, scope="module")
def quick(quick_compilation: None) -> None:
    """Compile all models of the folder without optimizations."""

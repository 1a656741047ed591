"""Helpers of the primitives' tests: random data, shardings on a mesh, searches in jaxprs."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import numpy as np
from jax.sharding import PartitionSpec as P


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).uniform(0.2, 2, size=shape).astype(np.float32)


def place(x: Any, *spec: str | None) -> Any:
    """Shard an array over the current mesh; axes that the mesh lacks are ignored."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.device_put(x, P(*[s if s in mesh.axis_names else None for s in spec]))


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compare structures, shapes and values; `tolerance` is both relative and absolute."""
    actual, expected = jax.tree.map(np.asarray, (actual, expected))
    chex.assert_trees_all_equal_shapes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yield the jaxprs among an equation's parameters, open or closed, alone or in sequences."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else [value]:
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def equations(jaxpr: Any, into: Callable[[Any], bool] = lambda eqn: True) -> Iterator[Any]:
    """Yield all equations of a jaxpr and of the jaxprs inside it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        if into(eqn):
            for inner in inner_jaxprs(eqn):
                yield from equations(inner, into)


def primitive_names(fn: Callable, *args: Any) -> Counter:
    """Count each primitive in the jaxpr of a function, at every depth."""
    return Counter(eqn.primitive.name for eqn in equations(jax.make_jaxpr(fn)(*args)))


def federated_names(fn: Callable, *args: Any) -> Counter:
    """Count the primitives of fedpax, without their prefix and without the program itself."""
    names = primitive_names(fn, *args)
    prefix = "federated_"
    return Counter(
        {k.removeprefix(prefix): v for k, v in names.items() if k.startswith(prefix)}
    ) - Counter(program=names["federated_program"])

"""A check that shardings divide their arrays, with an error message that names the array."""

from __future__ import annotations

import math

import chex
import jax
from jax.sharding import NamedSharding, Sharding

from fedpax.errors import ArgumentError
from fedpax.parallel.axes import ShardingTree


def check_divisible(name: str, shapes: chex.ArrayTree, shardings: ShardingTree) -> None:
    """Raise a ValueError if a mesh axis does not divide the array axis that it shards."""
    # JAX's own errors name neither the array nor the mesh axis. `name` is the tree's in the
    # message, such as "params". `shardings` may be a prefix of `shapes`; only instances of
    # NamedSharding are checked.

    def check(prefix: tuple, sharding: Sharding, below: chex.ArrayTree) -> None:
        if not isinstance(sharding, NamedSharding):
            return
        for path, leaf in jax.tree.leaves_with_path(below):
            _check_array(f"{name}{jax.tree_util.keystr((*prefix, *path))}", leaf.shape, sharding)

    jax.tree.map_with_path(check, shardings, shapes, is_leaf=lambda x: isinstance(x, Sharding))


def _check_array(name: str, shape: tuple[int, ...], sharding: NamedSharding) -> None:
    spec = sharding.spec
    if len(spec) > len(shape):
        raise ArgumentError(
            f"The sharding {spec} has {len(spec)} entries, but {name} has shape {tuple(shape)}: "
            f"pass at most {len(shape)}, one for each axis of the array."
        )
    for index, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        axes = (entry,) if isinstance(entry, str) else entry
        if not isinstance(axes, tuple):
            continue  # None, or unconstrained
        devices = math.prod(sharding.mesh.shape[axis] for axis in axes)
        if size % devices:
            named = " x ".join(f"{axis}={sharding.mesh.shape[axis]}" for axis in axes)
            below, above = size // devices * devices, -(-size // devices) * devices
            fitting = f"{below} or {above}" if below else f"{above}"
            raise ArgumentError(
                f"The mesh {'axis' if len(axes) == 1 else 'axes'} {named} "
                f"{'does' if len(axes) == 1 else 'do'} not divide axis {index} of {name}, of size "
                f"{size}: make that size {fitting}, change the mesh (--mesh.{axes[0]}), or leave "
                f"the axis unsharded, None instead of {entry!r} in {spec}."
            )

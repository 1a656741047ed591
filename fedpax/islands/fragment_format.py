"""The format of a fragment on the wire: float32 outer parameters, and updates of a codec."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedpax.aggregators.codecs.update_coder import UpdateCoder
from fedpax.algorithm import AlgorithmParts

SEED = 0
"""Seed of the codec's random keys, which island and syncer share."""


class FragmentFormat:
    """The arrays of one fragment's update, encoded on an island and decoded at the syncer."""

    # Without a codec an update is the outer gradient in float32. The random key of a codec's words
    # depends on the island's shard and the fragment's number of merges.

    def __init__(self, parts: AlgorithmParts, part: chex.ArrayTree) -> None:
        self._codec = parts.codec
        leaves, self._tree = jax.tree.flatten(part)
        paths = [path for path, _ in jax.tree.leaves_with_path(part)]
        self.names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
        types = [jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in leaves]
        self.shapes = dict(zip(self.names, types, strict=True))
        encoded = jax.eval_shape(self.encode, jax.tree.unflatten(self._tree, types), 0, 0)
        self.wire_shapes: dict[str, jax.ShapeDtypeStruct] = encoded

    def encode(
        self, gradient: chex.ArrayTree, shard: jax.Array | int, count: jax.Array | int
    ) -> dict[str, jax.Array]:
        """Encode an outer gradient at `count` merges of the fragment; may be traced."""
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(gradient)]
        if self._codec is not None:
            coder = self._coder(leaves, count, model_axes())
            leaves = coder.encode(jnp.asarray(shard, jnp.int32), leaves)
        return dict(zip(self.names, leaves, strict=True))

    def decode(
        self,
        arrays: Mapping[str, Any],
        shard: jax.Array | int,
        count: jax.Array | int,
        axes: Sequence[str] = (),
    ) -> Any:
        """Decode an update to float32; `axes`: mesh axes that shard the fragment. May be traced."""
        leaves = [jnp.asarray(arrays[name]) for name in self.names]
        if self._codec is not None:
            like = [jnp.zeros(self.shapes[name].shape, jnp.float32) for name in self.names]
            coder = self._coder(like, count, axes)
            leaves = coder.decode(jnp.asarray(shard, jnp.int32), leaves)
        return jax.tree.unflatten(self._tree, leaves)

    def from_arrays(self, arrays: Mapping[str, Any]) -> Any:
        """Arrange arrays by name as the fragment's pytree."""
        return jax.tree.unflatten(self._tree, [arrays[name] for name in self.names])

    def to_arrays(self, part: chex.ArrayTree) -> dict[str, np.ndarray]:
        """Return a fragment's arrays by name, in the host's memory."""
        leaves = jax.tree.leaves(part)
        return {name: np.asarray(x) for name, x in zip(self.names, leaves, strict=True)}

    def _coder(self, like: list[Any], count: Any, axes: Sequence[str]) -> UpdateCoder:
        assert self._codec is not None
        key = jax.random.fold_in(jax.random.key(SEED), count)
        return UpdateCoder(self._codec, key, [jax.typeof(x) for x in like], axes)


def model_axes() -> tuple[str, ...]:
    """Return the mesh axes that can shard a fragment: all but the axes of placements."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return tuple(name for name in names if name not in ("islands", "clients"))


def largest_fragment(formats: Sequence[FragmentFormat]) -> int:
    """Return the bytes of the largest message of arrays: a fragment, or an update of one."""
    return max(
        sum(like.dtype.itemsize * math.prod(like.shape) for like in types.values())
        for form in formats
        for types in (form.shapes, form.wire_shapes)
    )


def describe_other_arrays(
    arrays: Mapping[str, np.ndarray], expected: Mapping[str, jax.ShapeDtypeStruct]
) -> str | None:
    """Describe how arrays differ from the expected names, shapes and dtypes; None if equal."""
    if arrays.keys() != expected.keys():
        missing, unknown = sorted(expected.keys() - arrays), sorted(arrays.keys() - expected)
        return f"arrays {missing[:3]} are missing and {unknown[:3]} are unknown"
    for name, like in expected.items():
        if arrays[name].shape != like.shape or arrays[name].dtype != like.dtype:
            return (
                f"array {name!r} is {arrays[name].dtype}{list(arrays[name].shape)}, expected "
                f"{like.dtype}{list(like.shape)}"
            )
    return None

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
    """The arrays of one fragment's update, encoded on an island and decoded at the syncer.

    Without a codec an update is the outer gradient in float32. With one, it is the codec's words.
    Their random key depends on the island's shard and on the fragment's number of merges, as in
    `fedpax.aggregators.compressed_mean`.

    Args:
        parts: the method.
        part: the fragment's parameters, or their shapes and dtypes.

    Attributes:
        names: the paths of the parameters, the arrays' names in messages.
        shapes: the types of the parameters as float32, by name.
        wire_shapes: the types of an update's arrays, by name.

    Example:
        >>> import optax
        >>> from fedpax.aggregators import codecs
        >>> from fedpax.algorithms import decoupled_diloco_parts
        >>> parts = decoupled_diloco_parts(
        ...     lambda w, x: (0.0, None), islands=2, inner_optimizer=optax.sgd(0.1),
        ...     steps_per_sync=1, codec=codecs.e3m0())
        >>> gradient = {"w": jnp.array([2.0, -1.0, 0.25]), "b": None}
        >>> fragment = FragmentFormat(parts, gradient)
        >>> words = fragment.encode(gradient, shard=1, count=7)
        >>> words["w"].dtype, fragment.wire_shapes["w"].shape
        (dtype('uint32'), (2, 1))
        >>> fragment.decode(words, shard=1, count=7)["w"].tolist()
        [2.0, -1.0, 0.25]
    """

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
        """Encode an outer gradient; may be traced.

        Args:
            gradient: the outer gradient, of the structure of the fragment.
            shard: the island's shard.
            count: number of merges of the fragment that the island has when it sends the update.
        """
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(gradient)]
        if self._codec is not None:
            mesh = jax.sharding.get_abstract_mesh()
            axes = [name for name in mesh.axis_names if name not in ("islands", "clients")]
            coder = self._coder(leaves, count, axes)
            leaves = coder.encode(jnp.asarray(shard, jnp.int32), leaves)
        return dict(zip(self.names, leaves, strict=True))

    def decode(
        self,
        arrays: Mapping[str, Any],
        shard: jax.Array | int,
        count: jax.Array | int,
        axes: Sequence[str] = (),
    ) -> Any:
        """Decode an update to float32; may be traced.

        Args:
            arrays: the arrays by name, as `encode` returns them.
            shard: as in `encode`.
            count: as in `encode`.
            axes: the mesh axes that shard the fragment. Default (): none.

        Returns:
            The outer gradient, of the structure of the fragment.
        """
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


def largest_message(formats: Sequence[FragmentFormat]) -> int:
    """Return the bytes of the largest message of arrays: a fragment, or an update of one.

    Args:
        formats: the formats of all fragments.
    """
    return max(
        sum(like.dtype.itemsize * math.prod(like.shape) for like in types.values())
        for form in formats
        for types in (form.shapes, form.wire_shapes)
    )


def check_arrays(
    found: Mapping[str, np.ndarray], expected: Mapping[str, jax.ShapeDtypeStruct]
) -> str | None:
    """Compare the names, shapes and dtypes of arrays with the expected ones.

    Args:
        found: arrays of a message.
        expected: their types.

    Returns:
        The first difference in words; None if there is none.

    Example:
        >>> check_arrays({"w": np.zeros(2)}, {"w": jax.ShapeDtypeStruct((3,), "float32")})
        "array 'w' is float64[2], expected float32[3]"
    """
    if found.keys() != expected.keys():
        missing, unknown = sorted(expected.keys() - found), sorted(found.keys() - expected)
        return f"arrays {missing[:3]} are missing and {unknown[:3]} are unknown"
    for name, like in expected.items():
        if found[name].shape != like.shape or found[name].dtype != like.dtype:
            return (
                f"array {name!r} is {found[name].dtype}{list(found[name].shape)}, expected "
                f"{like.dtype}{list(like.shape)}"
            )
    return None

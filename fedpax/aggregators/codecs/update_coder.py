"""Encode and decode whole updates, leaf by leaf, on any mesh."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Key, UInt32

from fedpax.aggregators.codecs.blocks import choose_blocks, from_blocks, to_blocks
from fedpax.aggregators.codecs.codec import Codec


class UpdateCoder(NamedTuple):
    """A codec for the updates of one round.

    The words of a large leaf are sharded over the model axes, for any sharding of the leaf: no
    block spans two devices, and each device sends its part. For this the axes behind the one that
    is divided into blocks are merged. A projection to 8 heads of 128 features has a minor axis of
    1,024 entries then, which 256 devices can share.

    Attributes:
        codec: the codec.
        round_key: the random key of the round.
        types: the types of one participant's leaves.
        model_axes: the mesh axes within a participant, automatic or explicit.
    """

    codec: Codec
    round_key: Key[Array, ""]
    types: Sequence[Any]
    model_axes: Sequence[str]

    def encode(
        self, index: Int[Array, ""], leaves: Sequence[jax.Array]
    ) -> list[UInt32[Array, "words ..."]]:
        """Encode the leaves of the participant at `index`."""

        def encode(keys: Key[Array, " leaves"], leaves: Sequence[jax.Array]) -> list[jax.Array]:
            return list(map(self._encode_leaf, keys, leaves))

        specs = [P(None, *self._spec(leaf) or [None]) for leaf in leaves]
        return self._with_automatic_axes(encode, specs)(self._keys(index), leaves)

    def decode(
        self, index: Int[Array, ""], words: Sequence[UInt32[Array, "words ..."]]
    ) -> list[Float[Array, "..."]]:
        """Decode the leaves of the participant at `index`, to float32."""

        def decode(keys: Key[Array, " leaves"], words: Sequence[jax.Array]) -> list[jax.Array]:
            return self._unmerge(self._decode(keys, words))

        specs = [like.sharding.spec for like in self.types]
        return self._with_automatic_axes(decode, specs)(self._keys(index), words)

    def decode_sum(
        self,
        indices: Int[Array, " participants"],
        words: Sequence[UInt32[Array, "participants words ..."]],
    ) -> list[Float[Array, "..."]]:
        """Decode the leaves of several participants, one after another, and add them in float32."""

        def decode_sum(
            keys: Key[Array, "participants leaves"], words: Sequence[jax.Array]
        ) -> list[jax.Array]:
            def add(totals: list[jax.Array], participant: tuple) -> tuple[list[jax.Array], None]:
                decoded = self._decode(*participant)
                return [t + x for t, x in zip(totals, decoded, strict=True)], None

            zeros = [jnp.zeros(self._merged_shape(like), jnp.float32) for like in self.types]
            return self._unmerge(jax.lax.scan(add, zeros, (keys, words))[0])

        specs = [like.sharding.spec for like in self.types]
        keys = jax.vmap(self._keys)(indices)
        return self._with_automatic_axes(decode_sum, specs)(keys, words)

    def minor_axes(self, like: Any) -> tuple[str, ...] | None:
        """Return the mesh axes over which a leaf's words are sharded; None if some are explicit."""
        mesh = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if any(kinds[name] == AxisType.Explicit for name in self.model_axes):
            return None
        spec = self._spec(like)
        return () if spec is None or spec[-1] is None else spec[-1]

    def _keys(self, index: Int[Array, ""]) -> Key[Array, " leaves"]:
        """Return the random keys that a participant and the server share, one per leaf."""
        return jax.random.split(jax.random.fold_in(self.round_key, index), len(self.types))

    def _encode_leaf(self, key: Key[Array, ""], leaf: jax.Array) -> UInt32[Array, "words ..."]:
        blocks = choose_blocks(self.codec, leaf.shape)
        merged = self._constrain(leaf.reshape(self._merged_shape(leaf)), leaf)
        return self.codec.encode(key, to_blocks(merged, blocks))

    def _decode(
        self, keys: Key[Array, " leaves"], words: Sequence[jax.Array]
    ) -> list[Float[Array, "..."]]:
        """Decode leaves; their axes remain merged."""
        decoded = []
        for key, own, like in zip(keys, words, self.types, strict=True):
            blocks = choose_blocks(self.codec, like.shape)
            values = self.codec.decode(key, own, blocks.size)
            merged = from_blocks(values, blocks, self._merged_shape(like))
            decoded.append(self._constrain(merged, like))
        return decoded

    def _unmerge(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        return [leaf.reshape(like.shape) for leaf, like in zip(leaves, self.types, strict=True)]

    def _merged_shape(self, like: Any) -> tuple[int, ...]:
        """Return the shape of a leaf with the axes behind the divided one merged into one axis."""
        axis = choose_blocks(self.codec, like.shape).axis
        if axis is None or axis == len(like.shape) - 1:
            return tuple(like.shape)
        return (*like.shape[: axis + 1], math.prod(like.shape[axis + 1 :]))

    def _spec(self, like: Any) -> list | None:
        """Return a spec that shards the minor axis of a merged leaf; None for a flattened leaf."""
        if choose_blocks(self.codec, like.shape).axis is None:
            return None
        shape = self._merged_shape(like)
        mesh, names, shards = jax.sharding.get_abstract_mesh(), [], 1
        for name in self.model_axes:
            if shape[-1] % (shards * mesh.shape[name]) == 0:
                names.append(name)
                shards *= mesh.shape[name]
        return [*[None] * (len(shape) - 1), tuple(names) or None]

    def _constrain(self, merged: jax.Array, like: Any) -> jax.Array:
        spec = self._spec(like)
        if spec is None or spec[-1] is None:
            return merged
        return jax.lax.with_sharding_constraint(merged, P(*spec))

    def _with_automatic_axes(self, fn: Callable, out_specs: list[P]) -> Callable:
        """Run a function with explicit model axes automatic: it can then reshape sharded axes."""
        mesh = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        explicit = tuple(n for n in self.model_axes if kinds[n] == AxisType.Explicit)
        return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=out_specs) if explicit else fn

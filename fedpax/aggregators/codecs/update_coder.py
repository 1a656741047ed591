"""Encode and decode whole updates, leaf by leaf, on any mesh."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Key, Shaped, UInt32

from fedpax.aggregators.codecs.blocks import (
    Blocks,
    choose_blocks,
    from_blocks,
    num_words,
    to_blocks,
)
from fedpax.aggregators.codecs.codec import Codec


class UpdateCoder(NamedTuple):
    """A codec for the updates of one round."""

    # The words of a large leaf are sharded over the model axes, for any sharding of the leaf: no
    # block spans two devices, and each device sends its part. For this the axes behind the divided
    # one are merged: 8 heads of 128 features are 1,024 entries, which 256 devices can share.

    codec: Codec
    round_key: Key[Array, ""]
    types: Sequence[Any]  # of one participant's leaves
    model_axes: Sequence[str]  # the mesh axes within a participant, automatic or explicit
    # Default None: the mean is exact.
    mean_codec: Codec | None = None

    def encode(
        self, index: Int[Array, ""], leaves: Sequence[jax.Array]
    ) -> list[UInt32[Array, "words ..."]]:
        """Encode the leaves of the participant at `index`."""

        def encode(keys: Key[Array, " leaves"], leaves: Sequence[jax.Array]) -> list[jax.Array]:
            blocks = map(self._to_blocks, leaves)
            return list(map(self.codec.encode, keys, blocks))

        specs = [P(None, *self._spec(leaf)) for leaf in leaves]
        return self._with_automatic_axes(encode, specs)(self._keys(index), leaves)

    def decode(
        self, index: Int[Array, ""], words: Sequence[UInt32[Array, "words ..."]]
    ) -> list[Float[Array, "..."]]:
        """Decode the leaves of the participant at `index`, to float32."""

        def decode(keys: Key[Array, " leaves"], words: Sequence[jax.Array]) -> list[jax.Array]:
            return list(map(self._decode_leaf, keys, words, self.types))

        specs = [like.sharding.spec for like in self.types]
        return self._with_automatic_axes(decode, specs)(self._keys(index), words)

    def send_words(
        self,
        words: Sequence[UInt32[Array, "participants words ..."]],
        axis: str,
        parts: Sequence[int],
    ) -> list[UInt32[Array, "participants shards parts rows 128"]]:
        """Send the words of all participants over a mesh axis: the first transfer of their mean."""

        def send(words: Sequence[jax.Array]) -> list[jax.Array]:
            sent = []
            for words_of_leaf, like, count in zip(words, self.types, parts, strict=True):
                tiles = to_tiles(divide_blocks(words_of_leaf, self._num_shards(like), count))
                after = (None, axis if count > 1 else None)
                sent.append(self._move(tiles, like, (axis, None), after))
            return sent

        specs = [
            self._explicit(P(None, self._minor_axes(like), axis if count > 1 else None, None, None))
            for like, count in zip(self.types, parts, strict=True)
        ]
        return self._with_automatic_axes(send, specs, axis)(words)

    def average_words(
        self,
        indices: Int[Array, " participants"],
        tiles: Sequence[UInt32[Array, "participants shards parts rows 128"]],
        axis: str,
        parts: Sequence[int],
    ) -> list[Float[Array, "..."]]:
        """Average the updates of which each device has one part: the second transfer of a mean."""
        # A device decodes one participant after another, and adds them in float32.
        participants = len(indices)

        def average(
            keys: Key[Array, "participants leaves"],
            mean_keys: Key[Array, " leaves"],
            tiles: Sequence[jax.Array],
        ) -> list[jax.Array]:
            words = []
            for leaf_words, like, count in zip(tiles, self.types, parts, strict=True):
                length = num_words(self.codec, self._blocks(like).size)
                shape = (participants, length, *self._divided_shape(like, count))
                words.append(from_tiles(leaf_words, shape))

            def add(totals: list[jax.Array], participant: tuple) -> tuple[list[jax.Array], None]:
                decoded = []
                for total, key, leaf_words, like, count in zip(
                    totals, *participant, self.types, parts, strict=True
                ):
                    where = P(None, self._minor_axes(like), axis if count > 1 else None)
                    values = self.codec.decode(key, leaf_words, total.shape[0])
                    decoded.append(jax.lax.with_sharding_constraint(values, where))
                return [t + x for t, x in zip(totals, decoded, strict=True)], None

            zeros = [
                jnp.zeros((self._blocks(like).size, *leaf_words.shape[2:]), jnp.float32)
                for leaf_words, like in zip(words, self.types, strict=True)
            ]
            totals, _ = jax.lax.scan(add, zeros, (keys, words))
            means = zip(mean_keys, totals, self.types, parts, strict=True)
            return [
                self._send_mean(key, total / participants, like, axis, count)
                for key, total, like, count in means
            ]

        specs = [
            self._mean_spec(like, count) for like, count in zip(self.types, parts, strict=True)
        ]
        keys = jax.vmap(self._keys)(indices), self._keys(participants)
        return self._with_automatic_axes(average, specs, axis)(*keys, tiles)

    def join_means(
        self, participants: int, means: Sequence[jax.Array], axis: str, parts: Sequence[int]
    ) -> list[Float[Array, "..."]]:
        """Join the parts of the means that `average_words` returns."""

        def join(keys: Key[Array, " leaves"], means: Sequence[jax.Array]) -> list[jax.Array]:
            return [
                self._receive_mean(key, mean, like, count) if count > 1 else mean
                for key, mean, like, count in zip(keys, means, self.types, parts, strict=True)
            ]

        specs = [like.sharding.spec for like in self.types]
        return self._with_automatic_axes(join, specs, axis)(self._keys(participants), means)

    def round_mean(
        self, participants: int, means: Sequence[Float[Array, "..."]]
    ) -> list[Float[Array, "..."]]:
        """Encode and decode means by the codec of the mean."""
        codec = self.mean_codec
        if codec is None:
            return list(means)

        def round_mean(keys: Key[Array, " leaves"], means: Sequence[jax.Array]) -> list[jax.Array]:
            rounded = []
            for key, mean, like in zip(keys, means, self.types, strict=True):
                blocks = self._to_blocks(mean)
                words = codec.encode(key, blocks)
                rounded.append(self._join(codec.decode(key, words, len(blocks)), like))
            return rounded

        specs = [like.sharding.spec for like in self.types]
        return self._with_automatic_axes(round_mean, specs)(self._keys(participants), means)

    def _send_mean(
        self,
        key: Key[Array, ""],
        mean: Float[Array, "entries shards parts blocks"],
        like: Any,
        axis: str,
        parts: int,
    ) -> jax.Array:
        codec = self.mean_codec
        words = mean if codec is None else codec.encode(key, mean)
        if parts == 1:
            return self._decode_mean(key, words, like)
        return self._move(to_tiles(words[None]), like, (None, axis), (None, None))

    def _receive_mean(
        self,
        key: Key[Array, ""],
        tiles: Shaped[Array, "1 shards parts rows 128"],
        like: Any,
        parts: int,
    ) -> Float[Array, "..."]:
        entries = self._blocks(like).size
        length = entries if self.mean_codec is None else num_words(self.mean_codec, entries)
        words = from_tiles(tiles, (1, length, *self._divided_shape(like, parts)))[0]
        return self._decode_mean(key, words, like)

    def _decode_mean(
        self, key: Key[Array, ""], words: Shaped[Array, "words shards parts blocks"], like: Any
    ) -> Float[Array, "..."]:
        joined = join_blocks(words, self._grid(like))
        if self.mean_codec is not None:
            joined = self.mean_codec.decode(key, joined, self._blocks(like).size)
        return self._join(joined, like)

    def _mean_spec(self, like: Any, parts: int) -> P:
        if parts == 1:
            return like.sharding.spec
        return self._explicit(P(None, self._minor_axes(like), None, None, None))

    def _move(
        self,
        tiles: Shaped[Array, "participants shards parts rows 128"],
        like: Any,
        *wheres: tuple[str | None, str | None],
    ) -> Shaped[Array, "participants shards parts rows 128"]:
        """Send tiles: from one sharding of the participants and of the parts to another one."""
        for participants, parts in wheres:
            spec = P(participants, self._minor_axes(like), parts)
            tiles = jax.lax.with_sharding_constraint(tiles, spec)
        return tiles

    def _num_shards(self, like: Any) -> int:
        mesh = jax.sharding.get_abstract_mesh()
        return math.prod(mesh.shape[name] for name in self._minor_axes(like) or ())

    def _divided_shape(self, like: Any, parts: int) -> tuple[int, int, int]:
        """Return the numbers of shards of a leaf, of parts of a shard, and of blocks of a part."""
        shards = self._num_shards(like)
        return shards, parts, -(-math.prod(self._grid(like)) // shards // parts)

    def _explicit(self, spec: P) -> P:
        """Return a spec without automatic axes."""
        mesh = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

        def keep(entry: Any) -> Any:
            names = (entry,) if isinstance(entry, str) else entry or ()
            return tuple(name for name in names if kinds[name] == AxisType.Explicit) or None

        return P(*map(keep, spec))

    def _keys(self, index: Int[Array, ""] | int) -> Key[Array, " leaves"]:
        """Return the random keys that a participant and the server share, one per leaf."""
        return jax.random.split(jax.random.fold_in(self.round_key, index), len(self.types))

    def _decode_leaf(
        self, key: Key[Array, ""], words: UInt32[Array, "words ..."], like: Any
    ) -> Float[Array, "..."]:
        decoded = self.codec.decode(key, words, self._blocks(like).size)
        return self._join(self._constrain(decoded, like), like)

    def _to_blocks(self, leaf: jax.Array) -> Float[Array, "entries ..."]:
        blocks = to_blocks(leaf.reshape(self._merged_shape(leaf)), self._blocks(leaf))
        return self._constrain(blocks, leaf)

    def _join(self, values: Float[Array, "entries ..."], like: Any) -> Float[Array, "..."]:
        return from_blocks(values, self._blocks(like), self._merged_shape(like)).reshape(like.shape)

    def _blocks(self, like: Any) -> Blocks:
        return choose_blocks(self.codec, like.shape)

    def _merged_shape(self, like: Any) -> tuple[int, ...]:
        """Return the shape of a leaf with the axes behind the divided one merged into one axis."""
        axis = self._blocks(like).axis
        if axis is None or axis == len(like.shape) - 1:
            return tuple(like.shape)
        return (*like.shape[: axis + 1], math.prod(like.shape[axis + 1 :]))

    def _grid(self, like: Any) -> tuple[int, ...]:
        """Return the shape of an array of a leaf's blocks, without the axis of their entries."""
        blocks, shape = self._blocks(like), self._merged_shape(like)
        if blocks.axis is None:
            return (blocks.num_blocks,)
        return (*shape[: blocks.axis], blocks.num_blocks, *shape[blocks.axis + 1 :])

    def _minor_axes(self, like: Any) -> tuple[str, ...] | None:
        """Return the mesh axes that shard the minor axis of a leaf's blocks; None if none does."""
        if self._blocks(like).axis is None:  # a small leaf
            return None
        mesh = jax.sharding.get_abstract_mesh()
        names: tuple[str, ...] = ()
        for name in self.model_axes:
            shards = math.prod(mesh.shape[n] for n in (*names, name))
            if self._grid(like)[-1] % shards == 0:
                names = (*names, name)
        return names or None

    def _spec(self, like: Any) -> list:
        return [*[None] * (len(self._grid(like)) - 1), self._minor_axes(like)]

    def _constrain(self, blocks: jax.Array, like: Any) -> jax.Array:
        if self._minor_axes(like) is None:
            return blocks
        return jax.lax.with_sharding_constraint(blocks, P(None, *self._spec(like)))

    def _with_automatic_axes(self, fn: Callable, out_specs: list[P], *further: str) -> Callable:
        """Run a function with the model axes and others automatic: it can reshape sharded axes."""
        mesh = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        names = (*self.model_axes, *further)
        explicit = tuple(name for name in names if kinds[name] == AxisType.Explicit)
        return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=out_specs) if explicit else fn


# ---- lay words out for transfers: divided among devices, in whole tiles of a TPU's memory

LANES = 128  # words in a row of a tile


def divide_blocks(
    words: Shaped[Array, "participants words ..."], num_shards: int, num_parts: int
) -> Shaped[Array, "participants words shards parts blocks"]:
    """Divide the blocks of each shard into parts of equal size."""
    participants, length, *inner, minor = words.shape
    size = math.prod(inner) * (minor // num_shards)  # blocks of a shard
    sharded = words.reshape(participants, length, -1, num_shards, minor // num_shards)
    flat = jnp.moveaxis(sharded, 3, 2).reshape(participants, length, num_shards, size)
    padded = jnp.pad(flat, [*[(0, 0)] * 3, (0, -size % num_parts)])
    return padded.reshape(participants, length, num_shards, num_parts, -1)


def join_blocks(
    values: Shaped[Array, "entries shards parts blocks"], shape: tuple[int, ...]
) -> Shaped[Array, "entries ..."]:
    """Restore the order of blocks that `divide_blocks` divided."""
    entries, num_shards = values.shape[:2]
    minor = shape[-1] // num_shards
    flat = values.reshape(entries, num_shards, -1)[:, :, : math.prod(shape) // num_shards]
    sharded = flat.reshape(entries, num_shards, -1, minor)
    return jnp.moveaxis(sharded, 1, 2).reshape(entries, *shape)


def to_tiles(
    words: Shaped[Array, "participants words shards parts blocks"],
) -> Shaped[Array, "participants shards parts rows 128"]:
    """Flatten the words of each part into rows of 128."""
    # A TPU stores the two minor axes in tiles of 8 x 128: a minor axis of 20 entries would take 6.4
    # times the memory, and the bytes of a transfer.
    flat = jnp.moveaxis(words, 1, 3).reshape(words.shape[0], *words.shape[2:4], -1)
    padded = jnp.pad(flat, [*[(0, 0)] * 3, (0, -flat.shape[3] % LANES)])
    return padded.reshape(*flat.shape[:3], -1, LANES)


def from_tiles(
    tiles: Shaped[Array, "participants shards parts rows 128"], shape: tuple[int, ...]
) -> Shaped[Array, "participants words shards parts blocks"]:
    """Restore the words of `to_tiles`."""
    participants, length, num_shards, num_parts, blocks = shape
    flat = tiles.reshape(*tiles.shape[:3], -1)[..., : length * blocks]
    words = flat.reshape(participants, num_shards, num_parts, length, blocks)
    return jnp.moveaxis(words, 3, 1)

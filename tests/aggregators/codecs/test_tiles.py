import jax
import numpy as np
import pytest

from fedpax.aggregators.codecs.update_coder import (
    LANES,
    divide_blocks,
    from_tiles,
    join_blocks,
    to_tiles,
)


@pytest.mark.parametrize(
    ("shape", "num_shards", "num_parts"),
    [((2, 9, 5, 8), 4, 1), ((3, 64, 6), 3, 2), ((1, 7, 1), 1, 3), ((2, 3, 2, 5, 4), 2, 8)],
)
def test_tiles_hold_the_words_of_each_part(
    shape: tuple[int, ...], num_shards: int, num_parts: int
) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    divided = jax.jit(divide_blocks, static_argnums=(1, 2))(words, num_shards, num_parts)
    length, blocks = shape[1], -(-words[0, 0].size // num_shards // num_parts)
    assert divided.shape == (shape[0], length, num_shards, num_parts, blocks)
    tiles = jax.jit(to_tiles)(divided)
    assert tiles.shape == (
        shape[0],
        num_shards,
        num_parts,
        -(-length * blocks // LANES),
        LANES,
    )
    for participant, own in enumerate(np.asarray(tiles)):
        for shard, part in zip(own, np.split(words[participant], num_shards, axis=-1), strict=True):
            flat = shard.reshape(num_parts, -1)
            assert not flat[:, length * blocks :].any()
            rows = flat[:, : length * blocks].reshape(num_parts, length, blocks)
            rows = rows.swapaxes(0, 1).reshape(length, -1)
            whole = part.reshape(length, -1)
            np.testing.assert_array_equal(rows[:, : whole.shape[1]], whole)
            assert not rows[:, whole.shape[1] :].any()
        joined = jax.jit(join_blocks, static_argnums=1)(divided[participant], shape[2:])
        np.testing.assert_array_equal(joined, words[participant])
    np.testing.assert_array_equal(
        jax.jit(from_tiles, static_argnums=1)(tiles, divided.shape), divided
    )

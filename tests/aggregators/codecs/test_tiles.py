import jax
import numpy as np
import pytest

from fedpax.aggregators.codecs.tiles import LANES, from_tiles, to_tiles


@pytest.mark.parametrize(("shape", "num_shards"), [((2, 9, 5, 8), 4), ((3, 64, 6), 3), ((1, 7), 1)])
def test_tiles_hold_the_words_of_each_shard(shape: tuple[int, ...], num_shards: int) -> None:
    words = np.random.default_rng().integers(0, 2**32, shape, np.uint32)
    tiles = jax.jit(to_tiles, static_argnums=1)(words, num_shards)
    size = words[0].size // num_shards
    assert tiles.shape == (shape[0], num_shards, -(-size // LANES), LANES)
    for participant, own in enumerate(np.asarray(tiles)):
        for shard, part in zip(own, np.split(words[participant], num_shards, axis=-1), strict=True):
            np.testing.assert_array_equal(shard.ravel()[:size], part.ravel())
            assert not shard.ravel()[size:].any()
    np.testing.assert_array_equal(jax.jit(from_tiles, static_argnums=1)(tiles, shape), words)

"""Programs that exchange compressed updates."""

import jax
import jax.numpy as jnp
import numpy as np

import fedpax
from fedpax.aggregators import codecs
from fedpax.aggregators.compressed_mean import CompressedMeanState

N = 4
SPARSELOCO = codecs.top_k(1 / 16, values=codecs.sign(bits=2), block_size=512)


def exchange(aggregator, participants=N, chunk_size=None):
    """Make `(state, updates, weights=None) -> (mean, state)`, a jitted program."""

    @jax.jit
    @fedpax.program(islands=participants, chunk_size=chunk_size)
    def exchange(state, updates, weights=None):
        mean, state, metrics = aggregator.aggregate(state, updates, weights)
        assert metrics == {}
        return mean, state

    return exchange


def draw(*shape, seed=0):
    return np.float32(np.random.default_rng(seed).standard_normal(shape))


def zero_state(updates):
    return CompressedMeanState(
        jnp.int32(0), jax.tree.map(lambda x: np.zeros(x.shape, np.float32), updates)
    )

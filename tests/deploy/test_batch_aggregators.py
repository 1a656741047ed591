"""Private, compressed and robust aggregators as batch jobs equal the compiled rounds."""

import jax
import jax.numpy as jnp
import pytest
from batch_rounds import (
    SGD,
    assert_equal_rounds,
    by_jit,
    loss_fn,
    open_rounds,
    params,
    run_in_a_loop,
)

from fedpax import aggregators
from fedpax.aggregators import codecs, compressed_mean
from fedpax.algorithms import fedavg

COHORT, ROUNDS = 6, 3
AGGREGATORS = {
    "private_mean": aggregators.private_mean(
        max_norm=1.0, noise_multiplier=0.0, seed=0, quantile=0.5, count_stddev=0.0
    ),
    "sign": compressed_mean(codecs.sign(), error_feedback=True),
    "secure_mean": aggregators.secure_mean(max_value=1.0),
    "top_k": compressed_mean(codecs.top_k(0.5), error_feedback=True),
    "drive": compressed_mean(codecs.drive()),
    "e3m0": compressed_mean(codecs.e3m0(), mean_codec=codecs.e3m0()),
    "quantized_mean": aggregators.quantized_mean(4),
    "clip": aggregators.chain(aggregators.adaptive_clip(initial_norm=1.0), aggregators.mean()),
    "trimmed_mean": aggregators.trimmed_mean(0.2),
    "krum": aggregators.krum(1),
}
FAST = ("private_mean", "sign")
NAMES = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in AGGREGATORS]


def equals(name, run_rounds, **settings):
    method = fedavg(loss_fn, cohort_size=COHORT, client_optimizer=SGD, aggregator=AGGREGATORS[name])
    state = method.init(params())
    result = run_rounds(method.round, state, clients=open_rounds, rounds=ROUNDS, **settings)
    assert_equal_rounds(result, by_jit(method.round, state, open_rounds(), ROUNDS))
    moved = jax.tree.map(lambda x, y: jnp.abs(x - y).max(), result[-1][0].params, state.params)
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_job_equals_the_compiled_rounds(name):
    equals(name, run_in_a_loop)


@pytest.mark.slow
@pytest.mark.parametrize("name", AGGREGATORS)
def test_apache_beam_equals_the_compiled_rounds(name):
    pytest.importorskip("apache_beam", reason="Apache Beam needs an environment of its own")
    from fedpax.deploy.beam import run_beam

    flags = ["--runner=FnApiRunner", "--direct_running_mode=multi_threading"]
    equals(name, run_beam, flags=flags, block_size=2)

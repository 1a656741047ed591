"""The syncer and its islands in one process: the laws of the merges, and what is refused."""

import functools

import jax
import numpy as np
import pytest
from site_problem import (
    FRAGMENT,
    INNER,
    OUTER,
    TOKENS_PER_STEP,
    Sites,
    loss_fn,
    make_parts,
    random_batches,
    random_params,
)

from fedpax import Cohort
from fedpax.aggregators import mean
from fedpax.algorithms import decoupled_diloco, diloco
from fedpax.clients import Syncs

ROUNDS, ISLANDS, STEPS = 3, 3, 2


@functools.cache
def synchronous(fragments):
    aggregator = {"aggregator": mean()} if fragments == 1 else {}
    return make_parts(fragments, quorum=ISLANDS, max_steps_ahead=STEPS, **aggregator)


def method(fragments):
    settings = {"islands": ISLANDS, "inner_optimizer": INNER, "outer_optimizer": OUTER}
    if fragments == 1:
        return diloco(loss_fn, **settings)
    return decoupled_diloco(loss_fn, fragments=lambda path, leaf: FRAGMENT[path], **settings)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_quorum_of_all_is_the_method_as_one_program(fragments):
    sites = Sites(synchronous(fragments))
    for name in "abc":
        sites.add(name)
    algorithm = method(fragments)
    state, step = algorithm.init(random_params()), jax.jit(algorithm.round)
    ones = np.ones((ISLANDS, fragments))
    schedule = Syncs(
        num_steps=(STEPS * ones).astype(int),
        weights=(ones * STEPS * TOKENS_PER_STEP**2).astype(np.float32),
        receives=ones > 0,
        rejoins=ones < 0,
    )
    for r in range(ROUNDS):
        batches = random_batches((ISLANDS, fragments * STEPS), seed=r)
        cohort = Cohort(batches, schedule=schedule if fragments > 1 else None)
        state, metrics = step(state, cohort)
        for p in range(fragments):
            sites.round(jax.tree.map(lambda x, p=p: x[:, p * STEPS : (p + 1) * STEPS], batches))
        assert sites.syncer.merges == (r + 1) * fragments
        for got, want in ((sites.outer.params(), state.params),):
            for name in want:
                np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=1e-6)
        loss = np.mean([report.loss for report in sites.reports[-fragments:]])
        np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-4)

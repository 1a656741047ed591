"""Terms that are decoded from a participant's words equal those that the participant computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax.aggregators import codecs, compressed_mean, mean

SIZE, CLIENTS = 600, 3


@pytest.mark.each_value
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("codec", [codecs.e3m0(), codecs.uniform(8)])
def test_terms_from_words(codec: codecs.Codec, feedback: bool) -> None:
    aggregator = compressed_mean(codec, error_feedback=feedback)

    @fedpax.program(clients=CLIENTS)
    def round_of(state, x, weights):
        updates = fedpax.federated_map(lambda x: {"w": jnp.sin(x), "b": x[0]}, x)
        average, state, _ = aggregator.aggregate(state, updates, weights)
        return state, average

    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(CLIENTS, SIZE)), jnp.float32)
    weights = jnp.asarray(random.random(CLIENTS) + 0.5, jnp.float32)
    state = jax.eval_shape(
        fedpax.program(clients=CLIENTS)(aggregator.init), {"w": x[0], "b": x[0, 0]}
    )
    state = jax.tree.map(lambda v: jnp.asarray(random.normal(size=v.shape) * 3, v.dtype), state)
    stages = fedpax.stages(round_of, state, x, weights)
    own = stages.own(state, x, weights)
    kept: list[dict] = [{} for _ in range(CLIENTS)]
    server, reply = stages.run(state, x, weights), None
    used = 0
    while True:
        try:
            request = server.send(reply)
        except StopIteration as end:
            result = end.value
            break
        coded, terms = stages.coded(request.stage), []
        for i in range(CLIENTS):
            values = {name: v[i] for name, v in own.items()} | kept[i]
            rows = [row[i] for row in request.rows]
            if coded is None:
                sent, _, new = stages.client(request.stage)(i, request.shared, rows, values)
            else:
                used += 1
                words, new = coded.send(i, request.shared, rows, values)
                assert sum(w.nbytes for w in words) == coded.nbytes < SIZE * 4 / 3
                sent = coded.terms(i, request.shared, rows, words)
            kept[i] |= new
            terms.append(sent)
        merged = terms[0]
        for other in terms[1:]:
            merged = stages.merge(request.stage)(merged, other)
        reply = merged, (), list(range(CLIENTS))
    assert used == CLIENTS
    expected_state, expected = jax.jit(round_of)(state, x, weights)
    for leaf, other in zip(jax.tree.leaves(result[1]), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)
    if feedback:
        after = np.stack([kept[i]["state.residual['w']"] for i in range(CLIENTS)])
        np.testing.assert_allclose(after, expected_state.residual["w"], rtol=0, atol=1e-5)


def test_plain_means_have_no_words() -> None:
    @fedpax.program(clients=2)
    def average(x):
        return mean().aggregate((), fedpax.federated_map(jnp.sin, x), None)[0]

    assert fedpax.stages(average, jnp.ones((2, SIZE))).coded(0) is None

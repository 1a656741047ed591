"""Rounds of clients for batch engines, and the same rounds by `jax.jit`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedpax
from fedpax import federated_map, federated_max, federated_mean, federated_sum
from fedpax.aggregators import quantized_mean
from fedpax.algorithms import diloco, fedavg, scaffold
from fedpax.data import ClientSampler, cohort_rounds
from fedpax.deploy import EachClient
from fedpax.deploy.batch_job import make_work, read_results
from fedpax.deploy.batch_work import split_states, stack_states

POPULATION, COHORT = 11, 6
SGD = optax.sgd(0.05)


def loss_fn(params, batch):
    error = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
    weights = batch["mask"].astype(jnp.float32)
    return jnp.sum(error * weights) / jnp.maximum(weights.sum(), 1), {}


def open_rounds(cohort_size=COHORT, sampling_probability=None):
    """Open clients of different sizes, one of them without examples."""
    random = np.random.default_rng(4)
    sizes = random.integers(1, 9, POPULATION)
    sizes[3] = 0
    x = random.uniform(-1, 1, size=(sizes.sum(), 3)).astype(np.float32)
    y = (x @ np.float32([0.5, -0.4, 0.2]) + random.uniform(size=len(x))).astype(np.float32)
    parts = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    sampler = ClientSampler(
        POPULATION, cohort_size, seed=5, sampling_probability=sampling_probability
    )
    return cohort_rounds({"x": x, "y": y}, parts, sampler, batch_size=2, preprocess=dict)


def open_islands():
    """Open islands that all take part in each round."""

    def batches(island):
        random = np.random.default_rng((8, island))
        x = random.normal(size=(2, 4, 3)).astype(np.float32)
        return fedpax.Cohort({"x": x, "y": x.sum(axis=2), "mask": np.ones((2, 4), np.bool_)})

    return EachClient(batches, num_clients=4)


def open_vectors():
    def data(client):
        random = np.random.default_rng((9, client))
        return {"x": random.normal(size=3).astype(np.float32), "scale": np.float32(client / 8)}

    return EachClient(data, num_clients=5)


@fedpax.program(clients=5)
def three_stages(state, data):
    """Split keys for the participants, keep a state at each, and show values to the server."""
    keys = jax.random.split(state["key"], 5)

    def draw(own, x, key):
        return own + jax.random.normal(key, (3,)) * x, jnp.tanh(x)

    own, scores = federated_map(draw, state["own"], data["x"], keys)
    largest = federated_max(scores)
    mean = federated_mean(
        federated_map(lambda s, scale: s * scale / largest, scores, data["scale"])
    )
    spread = federated_sum(federated_map(lambda s: jnp.mean((s - mean) ** 2), scores))
    after = {"key": jax.random.fold_in(state["key"], 1), "own": own, "w": state["w"] + mean}
    return after, {"spread": spread, "ranks": jnp.sort(scores, axis=0), "rows": 2 * scores}


def params():
    return {"w": jnp.float32([0.3, -0.2, 0.1]), "b": jnp.float32(0.5)}


def three_stage_state():
    own = np.random.default_rng(2).normal(size=(5, 3)).astype(np.float32)
    return {"key": jax.random.key(3), "own": jnp.asarray(own), "w": jnp.ones(3)}


def _method(make, open_clients, **settings):
    method = make(loss_fn, **settings)
    return method.round, method.init(params()), open_clients


CASES = {
    "fedavg": lambda: _method(fedavg, open_rounds, cohort_size=COHORT, client_optimizer=SGD),
    "poisson": lambda: _method(
        fedavg,
        functools.partial(open_rounds, 9, 0.4),
        cohort_size=9,
        client_optimizer=SGD,
    ),
    "scaffold": lambda: _method(
        scaffold, open_rounds, cohort_size=COHORT, num_clients=POPULATION, client_optimizer=SGD
    ),
    "quantized": lambda: _method(
        scaffold,
        open_rounds,
        cohort_size=COHORT,
        num_clients=POPULATION,
        client_optimizer=SGD,
        aggregator=quantized_mean(num_levels=64),
    ),
    "diloco": lambda: _method(diloco, open_islands, islands=4, inner_optimizer=optax.adamw(0.05)),
    "three stages": lambda: (three_stages, three_stage_state(), open_vectors),
}


def by_jit(program, state, clients, rounds):
    """Run the rounds with all participants in one call."""
    compiled, results = jax.jit(program), []
    for number in range(rounds):
        ids = clients.client_ids(number)
        state, metrics = compiled(state, clients.read_clients(number, ids))
        results.append((state, metrics))
    return results


def assert_equal_rounds(actual, expected, tolerance=1e-6):
    """Compare all metrics and the last state."""
    assert len(actual) == len(expected)
    for (state, metrics), (other_state, other_metrics) in zip(actual, expected, strict=True):
        assert jax.tree.structure(state) == jax.tree.structure(other_state)
        assert jax.tree.structure(metrics) == jax.tree.structure(other_metrics)
        jax.tree.map(functools.partial(_assert_close, tolerance=tolerance), metrics, other_metrics)
    jax.tree.map(
        functools.partial(_assert_close, tolerance=tolerance), actual[-1][0], expected[-1][0]
    )


def _assert_close(actual, expected, tolerance):
    if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    assert np.all(np.isfinite(np.asarray(actual, np.float64)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def run_in_a_loop(program, *args, clients, rounds=1, first_round=0):
    """Carry the messages of a job."""
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), args)
    divided = fedpax.stages(program, *types, clients().shapes)
    leaves = jax.tree.leaves(args)
    return carry(divided, leaves, *make_work(divided, leaves, clients), rounds, first_round)


def carry(divided, leaves, work, arguments, differing, rounds, first_round=0):
    """Carry blocks of random sizes, merged in a random order."""
    random = np.random.default_rng(first_round)
    states = {kind: dict(split_states(differing[kind])) for kind in differing}
    states = {kind: states.get(kind, {}) for kind in (0, 1)}
    collected = []
    for number in range(first_round, first_round + rounds):
        members = list(work.sample(number))
        for kind, kept in states.items():
            keys = {*kept, *(member[kind] for member in members)} if work.states[kind] else ()
            joined = [
                pair
                for key in keys
                for pair in work.join(
                    key, [m for m in members if m[kind] == key], [kept[key]] if key in kept else []
                )
            ]
            if keys:
                members = [value for name, value in joined if name == "members"]
                states[kind] = dict(value for name, value in joined if name == "states")
        served = dict(work.start(arguments))
        for stage in range(work.num_stages):
            random.shuffle(members)
            cuts = np.sort(random.choice(len(members), 2)).tolist()
            blocks = [members[: cuts[0]], members[cuts[0] : cuts[1]], members[cuts[1] :]]
            ran = [
                pair
                for block in blocks
                if block
                for pair in work.run_clients(stage, number, block, served["request"])
            ]
            chosen = lambda name, ran=ran: [value for tag, value in ran if tag == name]
            terms = chosen("terms")
            random.shuffle(terms)
            merged = work.merge(stage, [*terms[:1], work.merge(stage, terms[1:])])
            served = dict(work.serve(stage, served["values"], merged, chosen("shown")))
            members = chosen("members")
            for kind in states:
                states[kind] |= dict(chosen(f"states {kind}"))
        results = served["results"]
        collected.append(results if number == first_round + rounds - 1 else work.metrics(results))
        arguments = work.next_arguments(arguments, results)
    kept = [
        (kind, stack_states(list(rows.items()))) for kind, rows in states.items() if len(rows) > 0
    ]
    return read_results(divided, leaves, collected, [content for _, content in kept])

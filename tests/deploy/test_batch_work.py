"""The work of a batch job equals the compiled rounds; a loop carries it in place of Beam."""

import jax
import numpy as np
import pytest
from batch_rounds import (
    CASES,
    COHORT,
    SGD,
    assert_equal_rounds,
    by_jit,
    carry,
    loss_fn,
    open_rounds,
    params,
    run_in_a_loop,
)

import fedpax
from fedpax.aggregators import private_mean, private_secure_mean
from fedpax.algorithms import fedavg
from fedpax.deploy import EachClient, beam
from fedpax.deploy.batch_job import make_work
from fedpax.deploy.batch_work import check_clients, split_states, stack_states
from fedpax.deploy.encoded_values import decode_values, encode_values

FAST = ("scaffold", "three stages")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_rounds_equal_the_compiled_rounds(name):
    program, state, open_clients = CASES[name]()
    result = run_in_a_loop(program, state, clients=open_clients, rounds=2)
    assert_equal_rounds(result, by_jit(program, state, open_clients(), 2))


@pytest.mark.slow
def test_clients_draw_the_noise_of_a_private_round():
    """Two jobs differ by it; with the seed alone, as in one program, they would be equal."""
    noise, max_norm = 1e-3, 5.0
    aggregator = private_secure_mean(
        max_norm=max_norm, noise_multiplier=noise, seed=0, min_participants=COHORT - 1
    )
    method = fedavg(loss_fn, cohort_size=COHORT, client_optimizer=SGD, aggregator=aggregator)
    program, state = method.round, method.init(params())
    runs = [run_in_a_loop(program, state, clients=open_rounds, rounds=2) for _ in range(2)]
    (first, metrics), (second, _) = (run[-1] for run in runs)
    assert np.all(np.asarray(first.params["w"]) != np.asarray(second.params["w"]))
    expected = by_jit(program, state, open_rounds(), 2)[-1][0]
    for name in ("w", "b"):
        difference = np.abs(first.params[name] - expected.params[name])
        assert np.max(difference) < 2 * 12 * noise * max_norm / (COHORT - 1)
    assert metrics["epsilon"] == pytest.approx(aggregator.accountant.epsilon(2), rel=1e-5)


def test_a_job_draws_the_noise_of_the_server_once():
    """Beam repeats a step when a worker fails: it must not release another noisy sum."""
    aggregator = private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0)
    method = fedavg(loss_fn, cohort_size=COHORT, client_optimizer=SGD, aggregator=aggregator)
    state = method.init(params())
    divided = fedpax.stages(method.round, state, open_rounds().shapes)
    leaves = jax.tree.leaves(state)
    works = [make_work(divided, leaves, open_rounds) for _ in range(2)]
    (first, arguments, _), (second, _, _) = works
    assert list(first.start(arguments)) == list(first.start(arguments))
    assert list(first.start(arguments)) != list(second.start(arguments))
    results = [carry(divided, leaves, *work, rounds=1) for work in works]
    results.append(by_jit(method.round, state, open_rounds(), 1))
    norms = {float(np.abs(result[-1][0].params["w"]).max()) for result in results}
    assert len(norms) == 3


def test_states_survive_a_file():
    random = np.random.default_rng(1)
    states = {5: {"a": random.normal(size=3), "b": random.integers(9, size=())}, 2: {}}
    states[2] = {name: x + 1 for name, x in states[5].items()}
    content = stack_states([(key, encode_values(state)) for key, state in states.items()])
    result = {key: decode_values(state) for key, state in split_states(content)}
    assert result.keys() == states.keys()
    jax.tree.map(np.testing.assert_array_equal, result, states)


def test_clients_without_a_method_are_told():
    check_clients(EachClient(lambda client: np.float32(client), 3))
    with pytest.raises(ValueError, match="dict without shapes, client_ids, read_clients"):
        check_clients({})


def test_a_missing_beam_is_told(monkeypatch):
    monkeypatch.setattr(beam, "beam", None)
    program, state, open_clients = CASES["fedavg"]()
    with pytest.raises(ImportError, match=r"needs the package apache-beam.*constraints-beam.txt"):
        beam.run_beam(program, state, clients=open_clients)

"""Participants in processes of their own give the result of one process."""

import jax
import numpy as np
import pytest
from batch_rounds import CASES, by_jit

import fedpax
from fedpax.deploy import run_local
from fedpax.deploy.local_stages import ParticipantProcessError, ParticipantProcesses


def problem(name):
    program, state, open_clients = CASES[name]()
    clients = open_clients()
    data = clients.read_clients(0, clients.client_ids(0))
    return fedpax.stages(program, state, data), state, data, by_jit(program, state, clients, 1)[0]


def assert_close(actual, expected):
    if jax.numpy.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    assert np.all(np.isfinite(np.asarray(actual, np.float64)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [("three stages", 2), ("scaffold", 6)])
def test_processes_give_the_result_of_one_process(name, processes):
    stages, *args, expected = problem(name)
    jax.tree.map(assert_close, run_local(stages, *args, processes=processes), expected)
    some = [3, 0, 4]
    result = run_local(stages, *args, participants=some, processes=processes)
    jax.tree.map(assert_close, result, run_local(stages, *args, participants=some))


@pytest.mark.slow
def test_a_process_that_ends_is_told():
    stages, *args, _ = problem("three stages")
    own = {i: {"data": np.zeros(3)} for i in range(2)}  # the values of another program
    with ParticipantProcesses(stages, own, 1) as processes:
        with pytest.raises(ParticipantProcessError, match=r"participants \[0, 1\] has ended"):
            processes.answers(next(stages.run(*args)))


def test_a_number_of_processes_below_1_is_told():
    stages, *args, _ = problem("three stages")
    with pytest.raises(ValueError, match="processes=0, expected at least 1"):
        run_local(stages, *args, processes=0)

"""The work of a batch job equals the compiled rounds; a loop carries it in place of Beam."""

import jax
import numpy as np
import pytest
from batch_rounds import CASES, assert_equal_rounds, by_jit

import fedpax
from fedpax.deploy import EachClient, beam
from fedpax.deploy.batch_job import make_work, read_results
from fedpax.deploy.batch_work import check_clients, split_states, stack_states
from fedpax.deploy.values import decode_values, encode_values


def run_in_a_loop(program, state, open_clients, rounds, random):
    """Carry the messages of a job: blocks of random sizes, merged in a random order."""
    divided = fedpax.stages(program, state, open_clients().shapes)
    work, arguments, differing = make_work(divided, jax.tree.leaves(state), open_clients)
    states = {kind: dict(split_states(differing[kind])) for kind in differing}
    states = {kind: states.get(kind, {}) for kind in (0, 1)}
    found = []
    for number in range(rounds):
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
        found.append(results if number == rounds - 1 else work.metrics(results))
        arguments = work.next_arguments(arguments, results)
    kept = [
        (kind, stack_states(list(rows.items()))) for kind, rows in states.items() if len(rows) > 0
    ]
    return read_results(divided, jax.tree.leaves(state), found, [content for _, content in kept])


FAST = ("poisson", "scaffold", "three stages")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_rounds_equal_the_compiled_rounds(name):
    program, state, open_clients = CASES[name]()
    random = np.random.default_rng(3)
    found = run_in_a_loop(program, state, open_clients, 2, random)
    assert_equal_rounds(found, by_jit(program, state, open_clients(), 2))


def test_states_survive_a_file():
    random = np.random.default_rng(1)
    states = {5: {"a": random.normal(size=3), "b": random.integers(9, size=())}, 2: {}}
    states[2] = {name: x + 1 for name, x in states[5].items()}
    content = stack_states([(key, encode_values(state)) for key, state in states.items()])
    found = {key: decode_values(state) for key, state in split_states(content)}
    assert found.keys() == states.keys()
    jax.tree.map(np.testing.assert_array_equal, found, states)


def test_clients_without_a_method_are_told():
    check_clients(EachClient(lambda client: np.float32(client), 3))
    with pytest.raises(ValueError, match="dict without shapes, client_ids, read_clients"):
        check_clients({})


def test_a_missing_beam_is_told(monkeypatch):
    monkeypatch.setattr(beam, "beam", None)
    program, state, open_clients = CASES["fedavg"]()
    with pytest.raises(ImportError, match=r"needs the package apache-beam.*constraints-beam.txt"):
        beam.run_beam(program, state, clients=open_clients)

"""Secure sums: integers exactly, floats in small steps; what cannot be summed is refused."""

import functools
import io

import jax.numpy as jnp
import numpy as np
import pytest
from deploy import nodes
from hypothesis import given, settings
from hypothesis import strategies as st

import fedpax
from fedpax.deploy.encoded_values import encode_values
from fedpax.deploy.flower.secagg import answer_unmasked
from fedpax.deploy.nodes.node_roster import NodeReply
from fedpax.deploy.nodes.node_sums import check_program
from fedpax.deploy.nodes.round_server import RoundError, RoundServer, problem_of
from fedpax.deploy.nodes.vectors import from_vector, range_of, to_vector
from fedpax.deploy.packets import Packet

TERMS = [
    {"name": "sum of counts", "shape": [4], "dtype": "int32"},
    {"name": "sum of w", "shape": [2, 3], "dtype": "float32"},
    {"name": "weight", "shape": [], "dtype": "float32"},
]


def quantized_sum(vectors, bound, levels):
    """What Flower's protocol computes: integers below `levels`, summed modulo 2**32."""
    total = np.zeros(vectors[0].shape, np.int64)
    for vector in vectors:
        total += np.floor((vector + bound) * (levels / (2 * bound))).astype(np.int64)
    total &= 2**32 - 1
    return total * (2 * bound / levels) - bound * len(vectors)


@settings(max_examples=30)
@given(st.integers(3, 50), st.integers(0, 9))
def test_sums_of_vectors_are_the_sums_of_terms(participants, seed):
    random = np.random.default_rng(seed)
    levels, bound = range_of(participants), 64.0
    most = min(levels // 2, 2**30 // participants)
    each = [
        (
            random.integers(-most + 1, most, 4).astype(np.int32),
            random.uniform(-60, 60, (2, 3)).astype(np.float32),
            np.float32(random.uniform(0, 60)),
        )
        for _ in range(participants)
    ]
    vectors = [np.load(io.BytesIO(to_vector(terms, bound, levels))) for terms in each]
    result = from_vector(quantized_sum(vectors, bound, levels), TERMS, bound, levels)
    np.testing.assert_array_equal(result[0], sum(terms[0].astype(np.int64) for terms in each))
    step = 2 * bound / levels
    for i in (1, 2):
        want = sum(terms[i].astype(np.float64) for terms in each)
        atol = participants * step + 1e-6 * np.abs(want).max()
        np.testing.assert_allclose(result[i], want, rtol=0, atol=atol)
        assert (result[i].dtype, result[i].shape) == (np.float32, want.shape)


@given(st.integers(1, 10**6))
def test_sums_stay_below_the_modulus(participants):
    levels = range_of(participants)
    assert levels * participants < 2**32 and (levels == 2**30 or 2 * levels * participants >= 2**32)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (np.float32([1, -65]), r"of 64 or more, or NaN, expected less .*secure-bound"),
        (np.float32([np.nan]), "of 64 or more, or NaN, expected less"),
        (np.int32([2**29]), r"of 5\.36871e\+08 or more, or NaN, expected less"),
    ],
)
def test_terms_beyond_the_bound_are_told_without_their_values(term, message):
    with pytest.raises(ValueError, match=message) as caught:
        to_vector([term], 64.0, 2**30)
    assert "65" not in str(caught.value)


def test_the_vector_of_secagg_is_sent_under_its_masks_alone(tmp_path):
    """The server could ask for the stage itself, with what only the masked message has."""
    program = nodes.program_of("fedavg")
    network = nodes.LocalNetwork(program, tmp_path)
    server = RoundServer(network, program, run="run", sleep=lambda seconds: None)
    server.advance(server.begin())
    node, packet = next(p for p in network.log if p[1].values["kind"] == "train")
    values = {**packet.values, "secure_bound": 1e6, "secure_levels": 2**30}
    asked = Packet(values, packet.arrays)
    compute = functools.partial(network.programs[node].answer, config={"partition-id": 0})
    assert compute(asked).arrays  # as the modifier masks it
    answer = answer_unmasked(asked, compute)
    assert "without its masks" in answer.values["refusal"] and not answer.arrays
    assert answer_unmasked(packet, compute).arrays


def test_a_private_vector_is_sent_to_enough_participants_alone(tmp_path):
    """Flower's protocol opens a sum with as many as its setup says; the server chooses it."""
    program = nodes.program_of("private")
    network = nodes.LocalNetwork(program, tmp_path)
    server = RoundServer(network, program, run="run", sleep=lambda seconds: None)
    with pytest.raises(RoundError):
        server.advance(server.begin())
    _, packet = next(p for p in network.log if p[1].values["kind"] == "train")
    values = {**packet.values, "secure_bound": 64.0, "secure_levels": 2**30}
    answers = [
        network.programs[100].answer(Packet({**values, **said}, packet.arrays), {})
        for said in ({}, {"secure_threshold": 2}, {"secure_threshold": 3})
    ]
    words = "opens with {} participants, expected at least min_participants=3"
    assert [a.values.get("refusal", "") for a in answers[2:]] == [""] and answers[2].arrays
    for answer, count in zip(answers, (0, 2), strict=False):
        assert words.format(count) in answer.values["refusal"] and not answer.arrays


def exported(program, *args):
    stages = fedpax.stages(program, *args)
    from fedpax.deploy import Artifact, pack_stages

    class Program:
        artifact = Artifact(*pack_stages(stages, portable=False))
        size = stages.placement.size

    return Program


@fedpax.program(clients=4)
def largest(x):
    return fedpax.federated_max(fedpax.federated_map(jnp.sin, x))


@fedpax.program(clients=4)
def middle(x):
    return jnp.median(fedpax.federated_map(jnp.sin, x), axis=0)


@fedpax.program(clients=4)
def total(x):
    return fedpax.federated_sum(fedpax.federated_map(lambda x: jnp.int32(x), x))


@pytest.mark.parametrize(
    ("program", "quorum", "message"),
    [
        (largest, 4, "max of sin is not a sum"),
        (middle, 4, "the server reads sin of each participant"),
        (total, 2, "quorum=2 of 4, expected more than half"),
    ],
)
def test_programs_without_sums_are_told(program, quorum, message):
    with pytest.raises(ValueError, match=message):
        check_program(exported(program, nodes.normal(4, 3)), quorum)


@pytest.mark.parametrize(("value", "is_told"), [(-np.inf, False), (np.inf, True), (np.nan, True)])
def test_the_maximum_of_nothing_is_no_problem(value, is_told):
    program = exported(largest, nodes.normal(4, 3))
    program.program = program.artifact.program
    arrays = [encode_values({"0": np.float32([1, value, 2])}), encode_values({})]
    reply = NodeReply("message", Packet({"program": program.program}, arrays))
    assert ("NaN or infinity in max of sin" in problem_of(reply, program, 0)) is is_told


def test_sums_and_means_are_taken():
    check_program(exported(total, nodes.normal(4, 3)), 3)
    check_program(nodes.program_of("scaffold"), 2)
    with pytest.raises(ValueError, match="with 4 participants in a round, expected at most 3"):
        check_program(exported(total, nodes.normal(4, 3)), 3, most=3)
    with pytest.raises(ValueError, match="with 2 participants in a round, expected at least 3"):
        check_program(nodes.program_of("fedavg", 2), 2)

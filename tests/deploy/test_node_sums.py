"""Secure sums of nodes by fedpax's protocol: exact, masked, also with nodes that drop out."""

import json
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deploy import nodes
from deploy.nodes import SETTINGS, LocalNetwork

import fedpax
from fedpax.aggregators import PrivacyAccountant, private_secure_mean
from fedpax.algorithm import FederatedAlgorithm
from fedpax.deploy.encoded_values import decode_values
from fedpax.deploy.flower.app import train
from fedpax.deploy.flower.app_files import RESULTS
from fedpax.deploy.nodes.node_sums import NodeSums, ServerSums
from fedpax.deploy.nodes.round_server import RoundError, RoundServer, Rules
from fedpax.deploy.packets import Packet
from fedpax.deploy.round_program import pack_program, parse_program
from fedpax.errors import FedpaxError
from fedpax.secure_sums.arithmetic import SHARE_BYTES
from fedpax.secure_sums.coordinator_side import PHASES
from fedpax.secure_sums.roster import to_text

LOG = logging.getLogger("test")
N = 4


@pytest.fixture(autouse=True)
def four_nodes(monkeypatch):
    nodes.use_nodes(monkeypatch, N)


def run(network, program, quorum=3, rounds=SETTINGS.rounds, name="run"):
    """The positions after each round, with the metrics."""
    server = RoundServer(
        network,
        program,
        run=name,
        rules=Rules(quorum=quorum, deadline=0.5),
        seed=SETTINGS.seed,
        sleep=lambda seconds: None,
        secure=ServerSums(network, LOG, 0.001),
    )
    position, result = server.begin(), []
    for _ in range(rounds):
        position, metrics = server.advance(position)
        result.append((position, metrics))
    return result


def assert_equals(position, expected):
    for path, leaf in jax.tree.leaves_with_path(expected.params):
        result = position.state[f"state.params{jax.tree_util.keystr(path)}"]
        np.testing.assert_allclose(result, leaf, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "phase",
    [
        "mask",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("keys", "share", "confirm", "reveal")),
    ],
)
def test_rounds_equal_the_compiled_rounds_without_a_node_that_drops_out(phase, tmp_path):
    """After its masked terms, a node is in the sum: the others' shares open its own mask."""

    def lost(values, node):
        if values["kind"] == "greeting" or node != 101 or values["round"] != 1:
            return None
        asked = "keys" if values["request"] == "null" else eval_phase(values["request"])
        return "before" if PHASES.index(asked) >= PHASES.index(phase) else None

    program = nodes.program_of("scaffold")
    network = LocalNetwork(program, tmp_path, lost=lost)
    result = run(network, program)
    counts = [metrics["participants"] for _, metrics in result]
    assert counts[0] == N and counts[1] == (N if phase in ("confirm", "reveal") else 3)
    expected = nodes.by_jit("scaffold", lambda number: [1] if counts[number] == 3 else [])
    assert_equals(result[-1][0], expected[-1])


def eval_phase(request):
    return next(p for p in PHASES[1:] if f'"phase": "{p}"' in request)


def test_the_server_receives_masked_words_alone(tmp_path):
    program = nodes.program_of("fedavg")
    network, received = LocalNetwork(program, tmp_path), []
    pull = network.pull

    def record(messages):
        replies = pull(messages)
        received.extend(x for r in replies for content in r.packet.arrays for x in [content])
        return replies

    network.pull = record
    run(network, program, rounds=2)
    arrays = [x for content in received for x in decode_values(content).values()]
    assert len(arrays) == 2 * N * len(program.artifact.manifest["stages"][0]["terms"])
    assert {x.dtype for x in arrays} == {np.dtype(np.uint32)}
    words = np.concatenate([np.ravel(x) for x in arrays])
    assert words.max() >= 2**31  # unmasked words have 21 bits
    assert len(np.unique(words)) == len(words)


@pytest.mark.slow
def test_private_rounds_are_within_the_noise_and_tell_epsilon(tmp_path):
    program = nodes.program_of("private")
    first, second = (run(LocalNetwork(program, tmp_path / k), program, 3) for k in "ab")
    expected = nodes.by_jit("private")
    for number, ((position, metrics), (other, _)) in enumerate(zip(first, second, strict=True)):
        stated = PrivacyAccountant(nodes.PRIVATE_NOISE, 1e-6, discrete=True).epsilon(number + 1)
        name = next(n for n in metrics if "epsilon" in n)
        assert metrics[name] == pytest.approx(stated, rel=1e-5)
        result, again = position.state["state.params['w']"], other.state["state.params['w']"]
        assert not np.array_equal(result, again)  # new noise in each run
        largest = (number + 1) * 10 * nodes.PRIVATE_NOISE / 4 * 1.5
        np.testing.assert_allclose(result, expected[number + 1].params["w"], rtol=0, atol=largest)


def test_a_node_sends_no_terms_of_a_private_program_without_masks(tmp_path):
    program = nodes.program_of("private")
    network = LocalNetwork(program, tmp_path)
    server = RoundServer(
        network, program, run="run", rules=Rules(deadline=0.1), sleep=lambda seconds: None
    )
    with pytest.raises(FedpaxError, match="asks for terms without masks, expected secure=true"):
        server.advance(server.begin())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "secure=false, but the program has .*'secure=true'"),
        ({"secure": True, "quorum": 2}, "quorum=2, expected at least min_participants=3"),
        ({"secure": True, "secure-protocol": "x"}, "'x', expected 'fedpax' or 'secagg\\+'"),
    ],
)
def test_runs_that_would_open_a_private_sum_are_told(settings, words, tmp_path):
    program = nodes.program_of("private")
    network = LocalNetwork(program, tmp_path)
    with pytest.raises(ValueError, match=words):
        train(network, program, "run", {"out": str(tmp_path / "out"), **settings})


def test_a_participant_opens_the_private_sums_that_epsilon_is_stated_for(tmp_path, caplog):
    """Over all runs and processes, and as many as its owner allows."""
    program = nodes.program_of("private")
    assert program.settings.rounds == 3 and len(program.artifact.manifest["stages"]) == 1
    network = LocalNetwork(program, tmp_path, counts_releases=True)
    run(network, program, 4, rounds=2)
    network = LocalNetwork(program, tmp_path, counts_releases=True)
    with pytest.raises(RoundError, match=r"Round 1: fewer than 4 .* part of 3 private sums"):
        run(network, program, 4, rounds=2, name="another")
    messages = "part of 3 private sums of the program, expected at most 3, those of 3 rounds"
    assert caplog.text.count(messages) == 3 * N  # each attempt, each node
    network.config["private-rounds"] = 4
    run(network, program, 4, rounds=1, name="another")
    simulated = LocalNetwork(program, tmp_path)
    run(simulated, program, 4, rounds=1)


def test_a_process_that_began_after_the_sum_is_told(tmp_path):
    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path)
    server = ServerSums(network, LOG, 0.001)
    run(network, program, rounds=1)
    packet = next(
        p for _, p in network.log if "request" in p.values and p.values["request"] != "null"
    )
    network.programs[100]._sums = NodeSums(3)
    answer = network.programs[100].answer(packet, {"partition-id": 0})
    assert "this process began after the sum" in answer.values["refusal"]
    reveal = Packet({"participant": 0, "session": "s", "request": '{"phase": "reveal"}'})
    with pytest.raises(FedpaxError, match="began after the sum"):  # and no epsilon is counted
        NodeSums(3).answer(reveal, before_opening=pytest.fail)
    assert server.values(3) == {}


def header_of(text):
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "packet",
    [
        Packet({"answer": "[" * 100_000}),
        Packet({"answer": '{"x": ' * 200 + "1" + "}" * 200}),
        Packet({"answer": "[]"}),
        Packet({}),
        Packet({"answer": "{}"}, [header_of(b'[["0", "uint32", [1180591620717411303424]]]')]),
        Packet({"answer": "{}"}, [b"1"]),
        Packet({"refusal": f"no\nINFO : {RESULTS}{{}}"}),
    ],
)
def test_a_malformed_answer_ends_the_part_of_its_sender_alone(packet, tmp_path, caplog):
    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path)
    answer = network.programs[101].answer

    def lie(asked, config):
        return answer(asked, config) if asked.values["kind"] == "greeting" else packet

    network.programs[101].answer = lie
    ((_, metrics),) = run(network, program, rounds=1)
    assert metrics["participants"] == 3
    assert not any("\n" in message for message in caplog.messages)


def test_a_node_that_is_asked_for_another_model_is_left_out(tmp_path, caplog):
    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path)
    answer = network.programs[101].answer

    def other_model(packet, config):
        if packet.arrays:
            last = bytes([packet.arrays[0][-1] ^ 1])
            packet = packet._replace(arrays=[packet.arrays[0][:-1] + last, *packet.arrays[1:]])
        return answer(packet, config)

    network.programs[101].answer = other_model
    ((position, metrics),) = run(network, program, rounds=1)
    assert metrics["participants"] == 3
    assert_equals(position, nodes.by_jit("fedavg", lambda number: [1])[1])
    assert "left out of the sum: a site was asked for other values" in caplog.text


def test_a_participant_that_sends_false_shares_is_named(tmp_path, caplog):
    """The others' shares open the sum."""
    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path)
    answer = network.programs[101].answer

    def lie(packet, config):
        reply = answer(packet, config)
        header = json.loads(reply.values.get("answer", "{}"))
        if header.get("phase") != "reveal":
            return reply
        header["own"] = dict.fromkeys(header["own"], to_text(bytes(SHARE_BYTES)))
        return reply._replace(values={**reply.values, "answer": json.dumps(header)})

    network.programs[101].answer = lie
    ((position, _),) = run(network, program, rounds=1)
    assert_equals(position, nodes.by_jit("fedavg")[1])
    assert "Participant 1 does not keep to the protocol: 4 shares that it has sent" in caplog.text


def test_participants_of_one_process_are_told_what_simulates_them(tmp_path):
    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path)
    network.programs[101] = network.programs[100]
    server = ServerSums(network, LOG, 0.001)
    begin = {"session": "s", "request": "null", "program": program.program, "kind": "sum"}
    first, second = (
        network.programs[node].answer(Packet({**begin, "participant": k}), {})
        for k, node in enumerate((100, 101))
    )
    assert "answer" in first.values and 'secure-protocol="secagg+"' in second.values["refusal"]
    assert server.least == 3


class TwoStages(NamedTuple):
    params: Any
    aggregator: Any


def two_stages():
    """A private mean, and then a sum of what each participant computes with it."""
    aggregator = private_secure_mean(
        max_norm=1.0, noise_multiplier=nodes.PRIVATE_NOISE, seed=0, min_participants=3
    )

    @fedpax.program(clients=N)
    def step(state, cohort):
        moved = fedpax.federated_map(
            lambda batches: {"w": batches["x"].mean((0, 1))}, cohort.batches
        )
        mean, combined, metrics = aggregator.aggregate(state.aggregator, moved, None)
        far = fedpax.federated_map(lambda m: jnp.sum((m["w"] - mean["w"]) ** 2), moved)
        return TwoStages(mean, combined), {**metrics, "spread": fedpax.federated_mean(far)}

    return FederatedAlgorithm(lambda params: TwoStages(params, aggregator.init(params)), step)


def test_a_round_that_has_opened_a_private_sum_is_not_repeated(tmp_path):
    """The same round again would spend epsilon that no metric counts."""

    def lost(values, node):
        return "before" if values.get("stage") == 1 and node in (100, 101) else None

    text = pack_program(two_stages(), nodes.init, nodes.rounds_of().shapes, nodes.SETTINGS)
    program = parse_program(text)
    assert [len(each["noise"]) for each in program.artifact.manifest["stages"]] == [1, 0]
    run(LocalNetwork(program, tmp_path / "a"), program, rounds=1)
    network = LocalNetwork(program, tmp_path / "b", lost=lost)
    with pytest.raises(FedpaxError, match=r"has opened a private sum.*spend its epsilon twice"):
        run(network, program, rounds=1)

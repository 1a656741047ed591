"""Rounds on nodes equal the compiled round; late nodes take their state back; refusals are told."""

import itertools
import json
import os

import jax
import numpy as np
import pytest
from deploy import nodes
from deploy.nodes import SETTINGS, LocalNetwork, N

from fedpax.data import ClientSampler
from fedpax.deploy.encoded_values import decode_values, encode_values
from fedpax.deploy.flower.app import write_state
from fedpax.deploy.nodes import round_server
from fedpax.deploy.nodes.kept_state import KeptState, KeptStateError, read_position, write_position
from fedpax.deploy.nodes.node import NodeProgram
from fedpax.deploy.nodes.round_server import RoundError, RoundServer, Rules, ServerPosition
from fedpax.deploy.round_program import read_program
from fedpax.deploy.runtime import ArtifactError
from fedpax.errors import ConfigurationError


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Path of the exported program of each method."""
    folder = tmp_path_factory.mktemp("programs")
    for method in nodes.METHODS:
        (folder / f"{method}.json").write_text(nodes.pack(method))
    return lambda method: folder / f"{method}.json"


def serve(network, program, rounds=SETTINGS.rounds, **rules):
    server = RoundServer(
        network, program, run="run1", seed=SETTINGS.seed, rules=Rules(**rules), sleep=lambda s: None
    )
    position, history = server.begin(), []
    for _ in range(rounds):
        position, metrics = server.advance(position)
        history.append((position, metrics))
    return history


def assert_equals(state, expected):
    for name in ("params", "control"):
        for path, leaf in jax.tree.leaves_with_path(getattr(expected, name, {})):
            result = np.asarray(state[f"state.{name}{jax.tree_util.keystr(path)}"])
            assert np.isfinite(result).all()
            np.testing.assert_allclose(result, leaf, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", nodes.METHODS)
def test_rounds_on_nodes_equal_the_compiled_rounds(method, programs, tmp_path):
    program = read_program(programs(method))
    history = serve(LocalNetwork(program, tmp_path), program)
    expected = nodes.by_jit(method)
    assert not np.allclose(expected[0].params["w"], expected[-1].params["w"], atol=1e-2)
    for (position, metrics), state in zip(history, expected[1:], strict=True):
        assert_equals(position.state, state)
        assert metrics["participants"] == N
    if method == "scaffold":
        for k in range(N):
            folder = tmp_path / f"disk_{k}" / "run1" / program.program[:16] / str(k)
            (kept,) = KeptState(folder).read(f"{SETTINGS.rounds - 1}.0").values()
            want = expected[-1].client_controls.rows["w"][k]
            np.testing.assert_allclose(kept, want, rtol=0, atol=1e-6)
            assert np.abs(want).max() > 1e-3


def test_a_rerun_has_the_same_bits_in_whatever_order_answers_arrive(tmp_path):
    program = nodes.program_of("scaffold")
    runs = [
        serve(LocalNetwork(program, tmp_path / str(seed), seed=seed), program)[-1][0].state
        for seed in range(5)
    ]
    for other in runs[1:]:
        for name, value in runs[0].items():
            np.testing.assert_array_equal(value, other[name])


@pytest.mark.parametrize("fate", ["before", "after"])
def test_a_node_that_is_not_counted_takes_its_state_back(fate, tmp_path):
    def lost(values, node):
        return fate if (values.get("round"), node) == (1, 101) else None

    program = nodes.program_of("scaffold")
    network = LocalNetwork(program, tmp_path, lost=lost)
    history = serve(network, program, quorum=2, deadline=1e-9)
    expected = nodes.by_jit("scaffold", lambda number: [1] if number == 1 else [])
    for (position, _), state in zip(history, expected[1:], strict=True):
        assert_equals(position.state, state)
    assert [metrics["participants"] for _, metrics in history] == [3, 2, 3]
    counted = [
        p.values["counted"] for node, p in network.log if node == 101 and "round" in p.values
    ]
    assert counted == ["", "0.0", "0.0"]


def test_a_round_is_asked_again_below_the_quorum(tmp_path):
    def lost(values, node):
        return "after" if values.get("key") == "1.0" and node != 100 else None

    program = nodes.program_of("scaffold")
    history = serve(LocalNetwork(program, tmp_path, lost=lost), program, quorum=2, deadline=1e-9)
    for (position, _), state in zip(history, nodes.by_jit("scaffold")[1:], strict=True):
        assert_equals(position.state, state)


def test_a_cohort_is_drawn_from_all_nodes_however_late_they_greet(tmp_path):
    program = nodes.program_of("fedavg", 2)
    sampler = ClientSampler(N, 2, SETTINGS.cohort_seed)
    for late in range(N):
        network = LocalNetwork(program, tmp_path / str(late))
        pull, polls = network.pull, []

        def slow_pull(messages, pull=pull, polls=polls, late=late, network=network):
            polls.append(1)
            slow = [m for m in messages if len(polls) < 5 and network.sent[m] == 100 + late]
            return pull([m for m in messages if m not in slow])

        network.pull = slow_pull
        serve(network, program, enough=2)
        for number in range(SETTINGS.rounds):
            asked = [n for n, p in network.log if p.values.get("round") == number]
            assert asked == [100 + k for k in sorted(sampler.sample(number))]


def test_the_first_round_waits_for_all_nodes_and_later_ones_for_a_quorum(tmp_path):
    program, calls = nodes.program_of("fedavg"), []
    network = LocalNetwork(program, tmp_path)
    every_node = network.nodes()

    def connected():
        """Return two nodes at first, then all; and two again once the first round was asked."""
        calls.append(1)
        asked = any(p.values.get("round") == 0 for _, p in network.log)
        return every_node[:2] if asked or len(calls) < 6 else every_node

    network.nodes = connected
    history = serve(network, program, quorum=2, deadline=1e-9)
    assert [metrics["participants"] for _, metrics in history] == [N, 2, 2]


def test_over_selection_ends_a_round_early(tmp_path):
    program = nodes.program_of("scaffold")
    network = LocalNetwork(program, tmp_path, lost=lambda v, node: "after" * (node == 102))
    network.lost = lambda v, node: "after" if node == 102 and "round" in v else None
    history = serve(network, program, enough=2)
    expected = nodes.by_jit("scaffold", lambda number: [2])
    for (position, metrics), state in zip(history, expected[1:], strict=True):
        assert_equals(position.state, state)
        assert metrics["participants"] == 2


def test_too_few_answers_end_the_run_in_words(tmp_path):
    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path, lost=lambda v, node: "after" if "key" in v else None)
    with pytest.raises(RoundError, match=r"Round 0: fewer than 2 .*3 times.* smaller quorum"):
        serve(network, program, quorum=2, deadline=1e-9, wait=0)


def test_too_few_nodes_are_told(tmp_path):
    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path, partitions=[0, 1])
    with pytest.raises(RoundError, match=r"2 participants are connected .* at least 3; 2 nodes"):
        serve(network, program, wait=0)
    ((position, _metrics), *_) = serve(network, program, wait=0, quorum=2)
    assert_equals(position.state, nodes.by_jit("fedavg", lambda number: [2])[1])


def test_partition_ids_that_collide_are_told(tmp_path):
    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path)
    network.partitions = {100: 0, 101: 1, 102: 1}
    with pytest.raises(ValueError, match=r"101 and 102 both have partition-id=1\. Start each"):
        serve(network, program)
    network.partitions = {100: 0, 101: 1, 102: -1}
    with pytest.raises(ValueError, match="102 has no partition-id"):
        serve(network, program)
    network.partitions = dict.fromkeys(network.partitions, -1)
    history = serve(network, program)
    assert_equals(history[-1][0].state, nodes.by_jit("fedavg")[-1])


def test_a_node_with_another_program_is_told(tmp_path):
    program, other = nodes.program_of("fedavg"), nodes.program_of("scaffold")
    network = LocalNetwork(program, tmp_path)
    network.programs[101] = NodeProgram(other, nodes.load_data, tmp_path)
    with pytest.raises(RoundError, match=r"1 refuse: This node has program \w+, and the server"):
        serve(network, program, wait=0)


def test_data_that_do_not_fit_are_told(tmp_path, caplog):
    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path)
    wide = lambda node: {"x": nodes.normal(3, 9), "y": nodes.normal(3)}
    network.programs[101] = NodeProgram(program, wide, tmp_path)
    with pytest.raises(RoundError, match=r"fewer than 3 .* Participant 1: load_data\(\) gives"):
        serve(network, program, wait=0)
    assert "gives cohort.batches['x'] as float32[4, 2, 9], expected float32[4, 2, 3]" in caplog.text


def test_a_lost_disk_is_told(tmp_path, caplog):
    program = nodes.program_of("scaffold")
    network = LocalNetwork(program, tmp_path)

    def lost(values, node):
        if (values.get("round"), node) == (1, 101):
            network.programs[101].folder = tmp_path / "a new disk"

    network.lost = lost
    history = serve(network, program, quorum=2, deadline=1e-9)
    assert [metrics["participants"] for _, metrics in history] == [3, 2, 2]
    assert "has no state of round 0.0" in caplog.text


def test_damaged_state_is_told(tmp_path):
    kept = KeptState(tmp_path)
    kept.write("1.0", {"x": nodes.normal(4)})
    path = tmp_path / "1.0.state"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(KeptStateError, match=r"does not match its sha256.*Restore"):
        kept.read("1.0")
    with pytest.raises(KeptStateError, match="names no round"):
        kept.read("../1")


def test_files_that_never_end_are_told(tmp_path):
    """Others can have made the folder of a position, and a program."""
    pipe, deep = tmp_path / "pipe", tmp_path / "deep"
    os.mkfifo(pipe)
    deep.write_text("[" * 100_000 + "]" * 100_000)
    (tmp_path / "1.0.state").symlink_to("pipe")
    with pytest.raises(KeptStateError, match="it is a pipe"):
        KeptState(tmp_path).read("1.0")
    for path, trouble in {pipe: "it is a pipe", deep: "deeper than 100 levels"}.items():
        with pytest.raises(ArtifactError, match=trouble):
            read_program(path)
    with pytest.raises(ConfigurationError, match="it is a pipe"):
        read_position(pipe, "program")
    header = np.frombuffer(deep.read_bytes(), np.uint8)
    (tmp_path / "position").write_bytes(encode_values({"position": header}))
    with pytest.raises(ConfigurationError, match="deeper than 100 levels"):
        read_position(tmp_path / "position", "program")
    length = len(deep.read_bytes()).to_bytes(8, "little")
    with pytest.raises(ValueError, match="are damaged"):
        decode_values(length + deep.read_bytes())


def test_links_at_drafts_are_not_followed(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("a file of the user")
    for draft in (".position.draft", ".1.0.state.draft", ".state.npz", ".state.npz.draft"):
        (tmp_path / draft).symlink_to(theirs)
    position = ServerPosition(3, {"w": nodes.normal(2)}, {0: "3.0"})
    write_position(tmp_path / "position", "run", "program", position)
    KeptState(tmp_path).write("1.0", {"x": nodes.normal(4)})
    write_state(tmp_path / "state.npz", {"x": nodes.normal(4)})
    assert theirs.read_text() == "a file of the user"
    run, content = read_position(tmp_path / "position", "program")
    assert (run, content.round, content.counted) == ("run", 3, {0: "3.0"})


def test_kept_states_of_other_rounds_are_removed(tmp_path):
    kept = KeptState(tmp_path)
    for key in ("1.0", "1.1", "2.0-0"):
        kept.write(key, {"x": nodes.normal(2)})
    kept.keep_only(["1.1"])
    assert [path.name for path in tmp_path.iterdir()] == ["1.1.state"]


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda c: c.update(format="other"), "is not an exported program"),
        (lambda c: c.update(format_version=99), "Update fedpax"),
        (lambda c: c["settings"].update(seed=6), "does not match its sha256"),
        (lambda c: c["files"].update({"client_0.jax": "AAAA"}), "client_0.jax is damaged"),
        (lambda c: c["files"].pop("client_0.jax"), "is damaged"),
    ],
)
def test_bad_programs_are_told(change, remedy, programs, tmp_path):
    content = json.loads(programs("fedavg").read_text())
    change(content)
    path = tmp_path / "program.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=remedy):
        read_program(path)


def test_the_same_algorithm_is_the_same_program(programs):
    again = json.loads(nodes.pack("fedavg"))
    assert again["program"] == read_program(programs("fedavg")).program


def test_nodes_that_are_too_slow_for_flower_are_told(tmp_path, caplog, monkeypatch):
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(round_server.time, "monotonic", lambda: next(clock))
    program = nodes.program_of("fedavg")
    lost = lambda values, node: "before" if values["kind"] == "greeting" and node == 101 else None
    network = LocalNetwork(program, tmp_path, lost=lost)
    with pytest.raises(RoundError, match="2 participants are connected after"):
        serve(network, program, wait=100.0)
    hints = [m for m in caplog.messages if "too slow for the 30 s that Flower gives" in m]
    assert hints and all(m.startswith("Some nodes are connected and have not") for m in hints)
    caplog.clear()
    lost = lambda values, node: "before" if values["kind"] == "train" and node == 101 else None
    network = LocalNetwork(program, tmp_path / "again", lost=lost)
    serve(network, program, rounds=1, quorum=2, deadline=300.0)
    hints = [m for m in caplog.messages if "too slow for the 30 s" in m]
    assert hints and all("from participants [1]" in m for m in hints)
    caplog.clear()
    clock = itertools.count(0.0, 100.0)
    serve(LocalNetwork(program, tmp_path / "late"), program, rounds=1)
    assert not [m for m in caplog.messages if "too slow" in m]  # all answers were there


def test_the_server_is_told_no_values_of_an_unforeseen_error(tmp_path, caplog, monkeypatch):
    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path)

    def fails(*args):
        raise KeyError("Ada")

    monkeypatch.setattr(network.programs[101], "_own", fails)
    server = RoundServer(network, program, run="run", sleep=lambda seconds: None)
    with pytest.raises(RoundError, match=r"KeyError\. The log of its node has") as caught:
        server.advance(server.begin())
    assert "Ada" not in str(caught.value) and "Ada" in caplog.text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_answer_that_is_not_finite_is_not_counted(value, tmp_path, caplog):
    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path)
    broken = lambda node: {"x": np.full((2, 3), value, np.float32), "y": nodes.normal(2)}
    network.programs[101] = NodeProgram(program, broken, tmp_path / "other")
    server = RoundServer(
        network, program, run="run", rules=Rules(quorum=2), sleep=lambda seconds: None
    )
    position, metrics = server.advance(server.begin())
    assert metrics["participants"] == 2
    assert all(np.all(np.isfinite(x)) for x in position.state.values())
    assert "Participant 1: answers with NaN or infinity in" in caplog.text
    assert "Set a smaller learning rate" in caplog.text


@pytest.mark.parametrize("when", ["loaded", "read"])
def test_the_server_is_told_no_values_of_data_that_cannot_be_read(when, tmp_path, caplog):
    def fails(*args):
        raise ValueError("the age of patient Ada is 'x'")

    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path)
    load_data = fails if when == "loaded" else lambda node: fails
    network.programs[101] = NodeProgram(program, load_data, tmp_path / "other")
    server = RoundServer(network, program, run="run", sleep=lambda seconds: None)
    with pytest.raises(RoundError, match=r"data raised ValueError\. The log of its node") as caught:
        server.advance(server.begin())
    assert "Ada" not in str(caught.value) and "Ada" in caplog.text


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ([], "of other types than the 3 terms"),
        ([b"x", b"y"], "are damaged"),
        ([encode_values({"0": np.zeros((7, 3), np.float32)}), encode_values({})], "of other types"),
    ],
)
def test_a_malformed_answer_is_not_counted(arrays, words, tmp_path, caplog):
    program = nodes.program_of("fedavg")
    network = LocalNetwork(program, tmp_path)
    answer = network.programs[101].answer

    def lie(packet, config):
        truth = answer(packet, config)
        return truth if packet.values["kind"] == "greeting" else truth._replace(arrays=arrays)

    network.programs[101].answer = lie
    server = RoundServer(
        network, program, run="run", rules=Rules(quorum=2), sleep=lambda seconds: None
    )
    _, metrics = server.advance(server.begin())
    assert metrics["participants"] == 2
    assert words in caplog.text

"""The syncer and its islands in one process: the laws of the merges."""

from pathlib import Path

import jax
import numpy as np
import pytest
from islands.site_problem import (
    FRAGMENT,
    INNER,
    OUTER,
    TOKENS_PER_STEP,
    Sites,
    loss_fn,
    make_parts,
    make_run,
    random_batches,
    random_params,
)
from islands.syncer_methods import ISLANDS, STEPS, parts, three

from fedpax import Cohort
from fedpax.aggregators import codecs, compressed_mean
from fedpax.algorithms import decoupled_diloco, diloco
from fedpax.clients import Syncs
from fedpax.islands.island.local_model import LocalModel
from fedpax.islands.syncer.syncer_store import SyncerStore
from fedpax.transport.calls import RefusedError
from fedpax.transport.message import Message

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("sites")


def method(kind):
    settings = {"islands": ISLANDS, "inner_optimizer": INNER, "outer_optimizer": OUTER}
    if kind == "two fragments":
        return decoupled_diloco(loss_fn, fragments=lambda path, leaf: FRAGMENT[path], **settings)
    aggregator = compressed_mean(codecs.e3m0(), error_feedback=True)
    return diloco(loss_fn, aggregator=aggregator if kind == "compressed" else None, **settings)


@pytest.mark.parametrize(
    "kind",
    [
        "two fragments",
        pytest.param("plain", marks=pytest.mark.slow),
        pytest.param("compressed", marks=pytest.mark.slow),
    ],
)
def test_a_quorum_of_all_is_the_method_as_one_program(kind):
    sites = three(kind, quorum=ISLANDS)
    fragments = 2 if kind == "two fragments" else 1
    algorithm = method(kind)
    state, step = algorithm.init(random_params()), jax.jit(algorithm.round)
    ones = np.ones((ISLANDS, fragments))
    schedule = Syncs(
        num_steps=(STEPS * ones).astype(int),
        weights=(ones * STEPS * TOKENS_PER_STEP**2).astype(np.float32),
        receives=ones > 0,
        rejoins=ones < 0,
    )
    for r in range(3):
        batches = random_batches((ISLANDS, fragments * STEPS), seed=r)
        cohort = Cohort(batches, schedule=schedule if fragments > 1 else None)
        state, metrics = step(state, cohort)
        for p in range(fragments):
            sites.round(jax.tree.map(lambda x, p=p: x[:, p * STEPS : (p + 1) * STEPS], batches))
        assert sites.syncer.merges == (r + 1) * fragments
        for name, want in state.params.items():
            np.testing.assert_allclose(sites.params()[name], want, rtol=2e-5, atol=1e-6)
        loss = np.mean([report.loss for report in sites.reports[-fragments:]])
        np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-4)


def test_updates_with_lost_answers_are_applied_once():
    steady = three(quorum=ISLANDS)
    batches = [random_batches((ISLANDS, STEPS), seed=r) for r in range(4)]
    for each in batches:
        steady.round(each)
    want, received = steady.params(), steady.syncer.totals.received_bytes
    shaky = three(quorum=ISLANDS)
    for each in batches:
        for row, island in enumerate(shaky.islands):
            shaky.lose_answers = row != 1
            shaky.phase(island, jax.tree.map(lambda x, row=row: x[row], each))
        shaky.lose_answers = False
        for island in shaky.islands:
            shaky.receive(island)
    assert shaky.syncer.merges == 4
    assert shaky.syncer.totals.repeated == 8 and shaky.syncer.totals.received_bytes > received
    for name in want:
        np.testing.assert_array_equal(shaky.params()[name], want[name])


def test_replayed_messages_change_nothing():
    sites = three(quorum=ISLANDS)
    sites.round(random_batches((ISLANDS, STEPS)))
    before, replayed = sites.params(), [m for m in sites.messages if m.header["kind"] == "push"]
    for message in replayed:
        assert sites.call(message).header["status"] == "repeated"
    assert sites.syncer.merges == 1 and sites.syncer.totals.repeated == len(replayed) == 3
    sites.add("a", process="a-2")
    with pytest.raises(RefusedError, match=r"replaced by a newer one. Stop it"):
        sites.call(replayed[0])
    for name, want in before.items():
        np.testing.assert_array_equal(sites.params()[name], want)


def test_a_syncer_that_restarts_continues_equally(tmp_path):
    batches = [random_batches((ISLANDS, STEPS), seed=r) for r in range(6)]
    steady = three(quorum=ISLANDS)
    for each in batches:
        steady.round(each)
    want = steady.params()
    sites = three(quorum=ISLANDS, store=SyncerStore(tmp_path))
    for r, each in enumerate(batches):
        for row, island in enumerate(sites.islands):
            # It is killed between two updates of a merge, and forgets those that it has answered.
            if row == r % 3:
                sites.down = True
                sites.start_syncer()
            sites.phase(island, jax.tree.map(lambda x, row=row: x[row], each))
            sites.down = False
            sites.receive(island)
        for island in 3 * sites.islands:  # learn of the restart; join and send again; receive
            sites.receive(island)
    assert sites.syncer.merges == 6 and [i.shard for i in sites.islands] == [0, 1, 2]
    for name in want:
        np.testing.assert_array_equal(sites.params()[name], want[name])


def test_quorum_and_grace_window():
    sites = three(quorum=2, grace_seconds=0.5)
    a, b, c = sites.islands
    sites.phase(a)
    sites.now += 10
    sites.syncer.advance()
    assert sites.syncer.merges == 0  # one island is no quorum, however long
    for island in (a, b, c):  # heartbeats
        sites.receive(island)
    sites.phase(b)
    sites.now += 0.4
    sites.syncer.advance()
    assert sites.syncer.merges == 0  # c is up and has time
    sites.now += 0.2
    sites.syncer.advance()
    assert sites.syncer.merges == 1 and sites.reports[0].islands == ("a", "b")
    sites.phase(c)  # it did not know of the merge
    assert sites.syncer.islands()[2].late == 1
    sites.now += 1
    for island in (a, b, c):
        sites.receive(island)
    sites.phase(a)
    sites.phase(c)
    assert sites.syncer.merges == 1
    sites.phase(b)  # all that are up have sent: no wait
    assert sites.syncer.merges == 2 and sites.reports[1].islands == ("a", "b", "c")


def test_silent_islands_are_not_waited_for():
    sites = three(quorum=1, grace_seconds=60.0)
    for island in sites.islands:
        sites.phase(island)
        sites.receive(island)
    assert sites.syncer.merges == 1
    sites.now += 5.0  # b and c say nothing any more
    sites.phase(sites.islands[0])
    assert sites.syncer.merges == 2
    assert [island.state for island in sites.syncer.islands()] == ["training", "silent", "silent"]
    sites.receive(sites.islands[1])
    assert sites.syncer.islands()[1].state == "training"
    for _ in range(50):
        sites.now += 1.0
        sites.receive(sites.islands[1])  # heartbeats, but no steps
    assert sites.syncer.islands()[1].state == "stalled"


def test_a_late_island_counts_with_its_weight():
    """Of three updates, one of an earlier merge: x - lr sum(w u) / sum(w), w = tokens^2 / steps."""
    sites = Sites(parts("plain"), quorum=2)
    for name in "abc":
        sites.add(name)
    rng = np.random.default_rng(3)
    draw = lambda: {n: rng.normal(size=x.shape) for n, x in random_params().items()}
    updates = {name: draw() for name in ("a1", "b1", "c1", "a2", "b2")}

    def push(island, name, steps, merge, sequence, base):
        tokens = TOKENS_PER_STEP * steps * (0.5 if name == "c1" else 1.0)
        header = {
            **sites.header(island, f"{island}-1"),
            **{"kind": "push", "steps": steps, "fragment": 0, "merge": merge, "count": base},
            **{"base": base, "tokens": tokens, "update_steps": steps, "loss": 1.0},
        }
        arrays = {n: x.astype(np.float32) for n, x in updates[name].items()}
        answer = sites.call(Message({**header, "sequence": sequence}, arrays))
        return answer.header["status"], tokens**2 / steps

    x = {n: np.asarray(value, np.float64) for n, value in random_params().items()}
    momentum = {n: np.zeros_like(value) for n, value in x.items()}

    def outer_step(pairs):
        for n in x:
            total = sum(w for w, _ in pairs)
            delta = sum(w * updates[u][n] for w, u in pairs) / total
            momentum[n] = delta + 0.8 * momentum[n]
            x[n] = x[n] - 0.6 * (delta + 0.8 * momentum[n])

    _, wa = push("a", "a1", 2, 0, 1, 0)
    sites.now += 3  # c is silent
    _, wb = push("b", "b1", 4, 0, 1, 0)
    outer_step([(wa, "a1"), (wb, "b1")])
    status, wc = push("c", "c1", 2, 0, 1, 0)
    assert status == "late" and sites.syncer.merges == 1
    sites.now += 3
    _, wa = push("a", "a2", 2, 1, 2, 1)
    _, wb = push("b", "b2", 2, 1, 2, 1)
    outer_step([(wa, "a2"), (wb, "b2"), (wc, "c1")])
    assert sites.syncer.merges == 2 and sites.reports[1].staleness == 1
    for n, want in x.items():
        np.testing.assert_allclose(sites.params()[n], want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_progress_that_is_not_sent_survives_merges_and_restarts():
    """y = x + (y - r) for every fragment received; a restart keeps it where nothing was sent."""
    sites = Sites(parts(), quorum=1)
    a, b = sites.add("a"), sites.add("b")
    sites.phase(a)
    for _ in range(2):
        sites.phase(b)
        sites.receive(b)
    start = random_params()
    own = jax.tree.map(np.asarray, a.state.params)
    sent = jax.tree.map(np.asarray, a.state.sent_params)
    sites.receive(a)
    outer = sites.params()
    for name, p in FRAGMENT.items():
        assert (np.abs(outer[name] - start[name]) > 0).any()
        np.testing.assert_allclose(
            a.state.params[name], outer[name] + (own[name] - sent[name]), rtol=1e-5, atol=1e-6
        )
        assert (np.abs(own[name] - sent[name]) > 0).any() == (p == 1)  # fragment 0 was sent
    saved, ledger = jax.device_get(a.state), a.ledger.to_json()
    returned = sites.add("a", process="a-2")
    received = {0: ("a-1", 1)}
    with jax.set_mesh(sites.run.mesh):
        returned.restore(jax.device_put(saved), ledger, received)
    jax.tree.map(np.testing.assert_array_equal, returned.state, saved)
    with jax.set_mesh(sites.run.mesh):
        returned.restore(jax.device_put(saved), ledger, received | {1: ("a-1", 2)})
    for name, p in FRAGMENT.items():
        want = saved.params[name] if p == 0 else saved.sent_params[name]
        np.testing.assert_array_equal(returned.state.params[name], want)
    assert returned.ledger.fragments[1].steps == 0


def test_updates_that_were_lost_with_the_syncer_are_replaced(tmp_path: Path):
    """Else each island counts its update as sent, and the syncer waits for it forever."""
    sites = three(quorum=ISLANDS, store=SyncerStore(tmp_path))
    for _ in range(2):
        for island in sites.islands[:2]:
            sites.phase(island)  # for merges 0 and 1, which wait for the third island
    saved = [(jax.device_get(island.state), island.ledger.to_json()) for island in sites.islands]
    assert [ledger["last_merge"] for _, ledger in saved] == [1, 1, -1]
    sites.islands.clear()
    sites.start_syncer()
    for name, (state, ledger) in zip("abc", saved, strict=True):
        with jax.set_mesh(sites.run.mesh):
            sites.add(name, process=f"{name}-2").restore(jax.device_put(state), ledger, {})
    for number in range(3):
        sites.round(random_batches((ISLANDS, STEPS), seed=number))
    assert sites.syncer.merges == 3


def test_an_island_waits_only_at_its_bound():
    sites = Sites(parts(), quorum=3, max_steps_ahead=3 * STEPS)
    island = sites.add("a")
    for phase in range(3):
        assert not island.is_ahead, phase
        sites.phase(island)
    assert island.is_ahead
    for name in "bc":
        sites.phase(sites.add(name))
    sites.receive(island)
    assert sites.syncer.merges == 1 and not island.is_ahead


def test_an_island_that_is_behind_skips_to_the_next_merge():
    sites = Sites(parts(), quorum=1)
    fast, slow = sites.add("fast"), sites.add("slow")
    sites.now += 3
    for _ in range(5):
        sites.phase(fast)
        sites.receive(fast)
        sites.now += 3
    assert sites.syncer.merges == 5
    sites.receive(slow)
    sites.phase(slow)
    assert sites.syncer.merges == 6 and sites.reports[-1].islands == ("slow",)
    assert sites.reports[-1].late == 0


def test_the_run_ends_after_its_merges(tmp_path: Path):
    sites = Sites(parts(), quorum=1, num_merges=2)
    island = sites.add("a")
    for _ in range(4):
        sites.phase(island)
        sites.receive(island)
    assert sites.syncer.finished and sites.syncer.merges == 2 and island._link.finished
    island._link.connected = True
    island._link.close()
    assert sites.syncer.islands()[0].state == "finished"


def test_an_island_records_the_end_before_the_syncer_is_told(tmp_path: Path):
    sites = Sites(parts(), quorum=1, num_merges=1)
    island = sites.add("a")
    messages: list[bool] = []
    island._link._on_end = lambda: messages.append(sites.syncer.everyone_heard_end)
    for _ in range(4):
        sites.phase(island)
        sites.receive(island)
    island._link.exchange()
    assert messages == [False] and sites.syncer.everyone_heard_end


def test_a_syncer_saves_who_knows_the_end_before_the_answer(tmp_path: Path):
    sites = Sites(parts(), quorum=1, num_merges=1, store=SyncerStore(tmp_path))
    island = sites.add("a")
    for _ in range(4):
        sites.phase(island)
        sites.receive(island)
    island._link.exchange()  # it exits after the answer to this
    sites.start_syncer()  # of a syncer that was killed then
    assert sites.syncer.everyone_heard_end


def test_islands_that_were_down_learn_the_end_of_the_run(tmp_path: Path):
    sites = Sites(parts(), quorum=1, num_merges=2, store=SyncerStore(tmp_path))
    a, _ = sites.add("a"), sites.add("b")
    sites.now += 3  # b is silent
    for _ in range(3):
        sites.phase(a)
        sites.receive(a)
    assert sites.syncer.finished and a._link.finished and not sites.syncer.everyone_heard_end
    leave(a)
    assert not sites.syncer.everyone_heard_end
    sites.start_syncer()
    assert sites.syncer.finished and not sites.syncer.everyone_heard_end
    b = sites.add("b", process="b-2")
    assert b._link.finished
    leave(b)
    assert sites.syncer.everyone_heard_end
    sites.start_syncer()
    assert sites.syncer.everyone_heard_end


@pytest.mark.slow
def test_more_rounds_continue_a_finished_run(tmp_path: Path):
    batches = [random_batches((ISLANDS, STEPS), seed=r) for r in range(6)]
    steady = three(quorum=ISLANDS)
    for each in batches:
        steady.round(each)
    sites = three(quorum=ISLANDS, num_merges=4, store=SyncerStore(tmp_path))
    for each in batches[:4]:
        sites.round(each)
    assert sites.syncer.finished
    run, sites.num_merges = sites.syncer.run, 6
    sites.start_syncer()
    assert not sites.syncer.finished and sites.syncer.run == run
    for island in 2 * sites.islands:  # learn of the restart; join
        sites.receive(island)
    header = sites.header("a", "a-1", kind="join")
    assert sites.call(Message(header)).header["rounds"] == 3  # of two merges
    for each in batches[4:]:
        sites.round(each)
    assert sites.syncer.finished and not sites.syncer.everyone_heard_end
    for name, want in steady.params().items():
        np.testing.assert_array_equal(sites.params()[name], want)


def leave(island):
    island._link.connected = True
    island._link.close()


def test_an_island_that_starts_again_compiles_nothing_again():
    traces = []
    run = make_run(make_parts(2))
    model = LocalModel(run._replace(init=lambda key: traces.append(key) or run.init(key)))
    with jax.set_mesh(run.mesh):
        model.init()
        before = len(traces)
        model.init()
    assert len(traces) == before

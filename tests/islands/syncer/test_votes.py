"""Votes and weights in a merge: by certificate, and bounded by what an island can have done."""

import functools
from typing import Any

import numpy as np
import pytest
from islands.site_problem import FRAGMENT, TOKENS_PER_STEP, Sites, make_parts, random_params
from islands.syncer_methods import parts

from fedpax.aggregators import coordinate_median
from fedpax.islands.island.link import Link
from fedpax.islands.syncer.merge_votes import limit_weights
from fedpax.islands.syncer.pending import JOINS_AT_ONCE, SECONDS_PER_JOIN, StepCredit
from fedpax.islands.syncer.syncer_store import SyncerStore
from fedpax.transport.calls import RefusedError
from fedpax.transport.message import Message

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("sites")

LIE = 2**40
FIRST_STEP = 0.6 * 1.8
"""Length of the first step of the outer optimizer, for an outer gradient of 1."""


@functools.cache
def median_parts() -> Any:
    return make_parts(1, aggregator=coordinate_median(), islands=4)


def join(sites: Sites, name: str, peer: str) -> None:
    sites.call(Message(sites.header(name, f"{name}-1", kind="join", steps=0)), peer=peer)


def moved(sites: Sites) -> float:
    """Return the outer gradient of the first merge, which has the same value everywhere."""
    steps = [
        np.asarray(before) - sites.params()[name]
        for name, before in random_params().items()
        if len(sites.model.formats) == 1 or FRAGMENT[name] == 0
    ]
    values = np.concatenate([step.ravel() for step in steps]) / FIRST_STEP
    np.testing.assert_allclose(values, values.mean(), rtol=1e-2, atol=1e-6)
    return float(values.mean())


def test_a_certificate_is_one_island() -> None:
    sites = Sites(median_parts(), quorum=2)
    join(sites, "m1", "mallory")
    with pytest.raises(
        RefusedError,
        match=r"'mallory' has joined as m1, expected at most 1 island of one .*"
        r"--name=m1 to return as this island, or start `fedpax syncer` with "
        r"--islands_per_certificate=2",
    ):
        join(sites, "m2", "mallory")
    sites.now += 10**5  # also when its own island is gone
    with pytest.raises(RefusedError, match="Give --name=m1"):
        join(sites, "m2", "mallory")
    join(sites, "a", "oslo")
    for name in ("b", "c"):
        with pytest.raises(RefusedError, match="'oslo' has joined as a"):
            join(sites, name, "oslo")


def test_a_flood_of_joins_of_a_certificate_waits_without_a_merge_or_a_file(tmp_path) -> None:
    sites = Sites(median_parts(), quorum=1, store=SyncerStore(tmp_path))
    join(sites, "a", "oslo")
    answers = [
        sites.call(
            Message(sites.header("m", f"process {k}", kind="join", steps=0)), peer="mallory"
        ).header
        for k in range(1000)
    ]
    accepted = [answer["status"] for answer in answers].count("ok")
    assert accepted == JOINS_AT_ONCE and answers[-1]["status"] == "wait"
    assert "'mallory' joins too often" in answers[-1]["reason"]
    with sites.syncer._merging:  # a merge is running: the flood does not wait for it
        message = Message(sites.header("m", "process", kind="join", steps=0))
        assert sites.call(message, peer="mallory").header["status"] == "wait"
    join(sites, "a", "oslo")  # the limit is each certificate's own
    sites.now += 1.0
    link = Link(
        functools.partial(sites.call, peer="mallory"),
        sites.header("m", "process 1001"),
        sites.model.formats,
        [-1] * len(sites.model.formats),
    )
    assert link.join().shard == 1
    for k in range(100):
        sites.now += SECONDS_PER_JOIN
        message = Message(sites.header("m", f"later {k}", kind="join", steps=0))
        assert sites.call(message, peer="mallory").header["status"] == "ok"


def test_islands_of_a_certificate_have_one_vote() -> None:
    options = {"islands_per_certificate": 2}
    sites = Sites(median_parts(), quorum=3, options=options)
    for name, peer in {"m1": "mallory", "m2": "mallory", "a": "oslo", "b": "rome"}.items():
        join(sites, name, peer)
    for name in ("m1", "m2"):
        sites.push(name, 1e6, peer="mallory", loss=9e37)
    sites.push("a", 1.0, peer="oslo", loss=2.0)
    assert sites.syncer.merges == 0  # three islands, and two certificates
    sites.push("b", 3.0, peer="rome", loss=4.0)
    assert sites.syncer.merges == 1 and sites.reports[0].islands == ("a", "b", "m1", "m2")
    assert moved(sites) == pytest.approx(3.0, rel=1e-2) and sites.reports[0].loss == 4.0


def test_islands_without_certificates_have_a_vote_each() -> None:
    sites = Sites(median_parts(), quorum=3)
    for name in "abc":
        join(sites, name, "")
    for name, value in zip("abc", (1.0, 2.0, 1e6), strict=True):
        sites.push(name, value)
    assert moved(sites) == pytest.approx(2.0, rel=1e-2)


def test_a_quorum_that_no_certificates_can_reach_is_refused() -> None:
    options = {"islands_per_certificate": 3}
    sites = Sites(median_parts(), quorum=3, options=options)
    join(sites, "m1", "mallory")
    join(sites, "m2", "mallory")
    with pytest.raises(RefusedError, match="at most 2 certificates could train, expected at least"):
        join(sites, "m3", "mallory")


@pytest.mark.parametrize(
    "claims", [[LIE], [LIE] * 12, [1000] * 12], ids=["once", "often", "a thousand"]
)
@pytest.mark.parametrize("kind", ["plain", "two fragments"], ids=["mean", "directional"])
def test_a_claim_of_many_steps_has_a_bounded_weight(kind: str, claims: list[int]) -> None:
    sites = Sites(parts(kind), quorum=3)
    for name in "abc":
        sites.add(name)
    for sequence, steps in enumerate(claims, start=1):
        sites.push("a", 1.0 / len(claims), update_steps=steps, sequence=sequence)
    for name in "bc":
        sites.push(name, 0.0)
    assert sites.syncer.merges == 1
    assert moved(sites) <= 8 / 10 + 1e-3  # at most 8 honest weights
    report = sites.reports[0]
    most = 32 * 2 * 4  # phases after a merge, their steps, and P + 2 merges
    assert report.steps <= most + 4 and report.tokens == report.steps * TOKENS_PER_STEP


@pytest.mark.parametrize(("absent", "share"), [(True, 60 / 64), (False, 8 / 10)])
def test_an_island_that_was_cut_off_has_the_weight_of_its_steps(absent: bool, share: float) -> None:
    """As many steps, in the time of one merge, are not believed."""
    sites = Sites(parts("plain"), quorum=2 if absent else 3, max_staleness=100)
    for name in "abc":
        sites.add(name)
    for number in range(1, 31):
        sites.now += 5.0
        if number == 30:
            sites.syncer._quorum._voters = 3
            sites.push("a", 1.0, update_steps=60, sequence=number)
        elif not absent:
            sites.push("a", 0.0, sequence=number)
        for name in "bc":
            sites.push(name, 0.0, sequence=number)
    assert sites.syncer.merges == 30 and sites.reports[-1].islands == ("a", "b", "c")
    assert moved(sites) == pytest.approx(share, rel=1e-3)


def test_tokens_are_bounded_without_a_limit_of_a_step() -> None:
    sites = Sites(parts("plain"), quorum=3)
    sites.syncer._tokens_per_step = float("inf")
    for name in "abc":
        sites.add(name)
    sites.push("a", 1.0, tokens=1e300)
    for name in "bc":
        sites.push(name, 0.0)
    assert moved(sites) <= 8 / 10 + 1e-3


@pytest.mark.parametrize("quorum", [1, 2])
def test_an_honest_island_never_exceeds_its_credit(quorum: int) -> None:
    """Its steps count in full, however many of its phases pass in one of another island."""
    rng = np.random.default_rng(quorum)
    sites = Sites(parts(), quorum=quorum, max_staleness=1000)
    fast, slow = sites.add("fast"), sites.add("slow")
    for _ in range(12):
        sites.down = rng.random() < 0.5
        for _ in range(int(rng.integers(1, 40))):
            if not fast.is_ahead:
                sites.phase(fast)
            sites.receive(fast)
        sites.down = False
        sites.phase(slow)
        sites.receive(slow)
    claimed = {
        (m.header["island"], m.header["sequence"]): m.header["update_steps"]
        for m in sites.messages
        if m.header["kind"] == "push"
    }
    pending = sites.syncer._pending
    waiting = [u for p in range(2) for name in ("fast", "slow") for u in pending.find(p, name)]
    counted = sum(r.steps for r in sites.reports) + sum(u.steps for u in waiting)
    assert max(claimed.values()) > 20 and counted == sum(claimed.values())


def test_the_credit_of_an_island() -> None:
    credit = StepCredit(num_fragments=3, steps_per_merge=10, merges=4, returns=False)
    assert credit.take(0, LIE, merges=4) == 20
    assert credit.take(0, LIE, merges=4) == 1  # an update counts a step at least
    assert credit.take(0, LIE, merges=6) == 20
    assert credit.take(1, LIE, merges=10**6) == 50  # P + 2 merges
    credit.add_merge()
    assert credit.take(2, 15, merges=4) == 15 and credit.take(2, LIE, merges=4) == 15
    assert StepCredit(3, 10, 0, returns=True).take(0, LIE, merges=0) == 50


def test_weights_per_second_are_limited_by_the_median_of_all_others():
    assert limit_weights([1.0, 3.0, 1e300], [5.0, 5.0, 5.0]) == [0.0625, 0.1875, 1.0]
    assert limit_weights([1.0, 1.0, 100.0], [5.0, 5.0, 500.0]) == [0.01, 0.01, 1.0]

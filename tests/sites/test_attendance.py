"""A site that sends heartbeats and no answers delays few rounds, and comes back when it answers."""

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.errors import ConfigurationError
from fedpax.run_files.metrics import read_metrics, select
from fedpax.sites.downlink import whole
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.site_table import SiteRecord, SiteTable
from fedpax.sites.tasks import EVALUATION, ROUND, Task
from fedpax.training.progress import Progress
from fedpax.transport.message import Message
from sites.federation import Line, run
from sites.small_experiment import small

SECONDS = 1.5  # of a deadline


class Mute(Line):
    """A line that holds the replies of a site until the coordinator has done some rounds."""

    until = 10**9

    def call(self, message: Message, timeout: float) -> Message:
        header = message.header
        if header["kind"] == "reply" and header["stage"] == 0 and self._exchange.round > 1:
            while self._exchange.round < self.until and not self._exchange.finished:
                time.sleep(0.01)
        return super().call(message, timeout)


def sites_of(names: str, rounds: int, **fields: Any) -> dict[str, Any]:
    return {name: small(rounds=rounds, data_seed=i, **fields) for i, name in enumerate(names)}


def run_three(folder: Path, rounds: int, rules: RoundRules, line: type[Line]) -> list[Any]:
    """Run rounds over sites a, b and c, whose line is `line`; return the lines of metrics."""
    outcome = run(
        small(rounds=rounds),
        sites_of("abc", rounds),
        folder,
        rules=rules,
        first_round_needs=3,
        lines={"c": line},
    )
    return select(read_metrics(outcome.folder / "coordinator"), "training")


def test_a_mute_site_delays_three_rounds(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[str] = []  # of evaluations by the coordinator, not of those by sites
    monkeypatch.setattr(Progress, "show_evaluation", lambda *shown: sources.extend(shown[3:]))
    lines = run_three(tmp_path, 12, RoundRules(2, SECONDS, missed_rounds=3), Mute)
    assert [line["sites"] for line in lines] == [3] + 11 * [2]
    delayed = [line["round"] for line in lines if line["seconds"] >= SECONDS]
    assert delayed[-3:] == [2, 3, 4]  # the first one compiles
    assert "site c (1 client): overdue" in notes
    assert len(sources) >= 6  # and one more of the site that returns at the end
    assert sources[:5] == 5 * [" (2 of 3 sites, 16 examples)"]


@pytest.mark.slow
def test_a_site_that_answers_again_is_waited_for(tmp_path: Path, notes: list[str]) -> None:
    class Returns(Mute):
        until = 8

    lines = run_three(tmp_path, 40, RoundRules(2, SECONDS, missed_rounds=1), Returns)
    assert [line["sites"] for line in lines][1:7] == 6 * [2]
    assert [line["sites"] for line in lines][-10:] == 10 * [3]
    states = [text for text in notes if text.startswith("site c (1 client): ")]
    assert [text.rpartition(" ")[2] for text in states][:4] == [
        "joining",
        "training",
        "overdue",
        "training",
    ]


@pytest.mark.slow
def test_an_overdue_site_is_waited_for_if_the_round_needs_it(tmp_path: Path) -> None:
    class Slow(Line):
        began = 0.0

        def call(self, message: Message, timeout: float) -> Message:
            if message.header["kind"] == "reply" and self._exchange.round == 2:
                type(self).began = self.began or time.monotonic()
                while time.monotonic() < self.began + 2.5 * SECONDS:
                    time.sleep(0.01)
            return super().call(message, timeout)

    rules = RoundRules(2, SECONDS, missed_rounds=1)
    outcome = run(small(rounds=3), sites_of("ab", 3), tmp_path, rules=rules, lines={"b": Slow})
    lines = select(read_metrics(outcome.folder / "coordinator"), "training")
    assert [line["sites"] for line in lines] == [2, 2, 2]


@given(st.lists(st.sampled_from("ael"), max_size=30), st.integers(1, 4))
@settings(deadline=None)
def test_the_rule(events: list[str], most: int) -> None:
    """a: it answers a round; e: the deadline ends; l: a late answer that is in time."""
    table = SiteTable(1e9, most_missed=most)
    site = table.add("s", 1)
    site.seen, missed = time.monotonic(), 0
    for number, event in enumerate(events):
        task = Task(f"t{number}", {"task": "round", "stage": 0}, whole({}), {"s": ({}, {})}, {})
        now = time.monotonic()
        if event == "a":
            table.end_task(task, {"s"}, now, deadline=now + 9)
            site.attendance.take_part(ROUND)
        elif event == "e":
            table.end_task(task, set(), now, deadline=now)
        else:
            table.end_task(task, set(), now, deadline=now + 9)
            site.attendance.answer_late(task.token, 0, now + 1)
            site.attendance.answer_late(task.token, 0, now + 1)  # repeated: it counts once
        missed = min(missed + 1, most) if event == "e" else max(missed - 1, 0)
        assert table.is_awaited(site, ROUND, now) is (missed < most)
        assert table.is_awaited(site, EVALUATION, now)
        needed = table.awaited(task, (), now, needs_more=True)
        assert needed == ["s"]  # a round that needs it waits for it


def test_an_answer_after_its_deadline_takes_nothing_back() -> None:
    site = SiteRecord("s", 0, 1)
    task = Task("t", {"task": "round", "stage": 0}, whole({}), {}, {})
    site.attendance.miss(task, 1.0, deadline=1.0, most=3)
    site.attendance.miss(task._replace(token="u"), 1.0, deadline=5.0, most=3)
    site.attendance.answer_late("t", 0, 2.0)
    site.attendance.answer_late("u", 0, 5.1)
    assert site.attendance.missed[ROUND] == 1


def test_two_sites_that_differ_do_not_wait_for_ever(tmp_path: Path, notes: list[str]) -> None:
    class OtherTypes(Line):
        def call(self, message: Message, timeout: float) -> Message:
            if message.header["kind"] == "ready":
                message.header["types"]["x"] = ["float32", [4, 9]]
            return super().call(message, timeout)

    with pytest.raises(ConfigurationError, match=r"after 1\.5 s sites still differ") as error:
        run(
            small(rounds=1),
            sites_of("ab", 1),
            tmp_path,
            rules=RoundRules(2, SECONDS),
            lines={"b": OtherTypes},
            may_be_refused=["a", "b"],
        )
    assert "the field 'x' of a batch is" in str(error.value)
    assert any(text.startswith("waiting 1.5 s for other sites") for text in notes)

"""Two secure sums of the same values over different sites are not both opened."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.secure_sums import CoordinatorSide, Message
from fedpax.settings.client_methods import method
from fedpax.sites.coordinator_rounds import Coordinator, FailedRoundError
from fedpax.sites.participants import OPENED, OpenedSums
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.secret_terms import SecretTerms
from fedpax.sites.site_files import FEDERATION
from fedpax.sites.site_table import SiteTable
from fedpax.sites.stage_calls import StageCalls
from fedpax.sites.task_exchange import TaskExchange
from fedpax.sites.tasks import new_token
from fedpax.transport.calls import DisconnectedError, RefusedError
from sites.federation import Line, run, write_hospitals
from sites.small_experiment import assert_made_by, small
from sites.test_equals_training import SIZES, experiment

NAMES = "abcd"
RULES = RoundRules(3, 60.0, secure_sums=True)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the sites of each sum that a coordinator asks sites to open."""
    sums: list[str] = []
    advance = CoordinatorSide.advance

    def note(side: CoordinatorSide) -> Any:
        requests = advance(side)
        if side.done:
            sums.append("".join(side.present))
        return requests

    monkeypatch.setattr(CoordinatorSide, "advance", note)
    return sums


class Away(Line):
    """A line that is lost for three seconds, from its start or around one of its opened sums."""

    def __init__(self, exchange: TaskExchange, when: str = "start", number: int = 1) -> None:
        super().__init__(exchange)
        self._until, self._when, self._number = 0.0, when, number
        if when == "start":
            self._leave()

    def _leave(self) -> None:
        self._until, self._when = time.monotonic() + 3, ""

    def call(self, message: Message, timeout: float) -> Message:
        """Call the coordinator."""
        fields = message.header.get("fields", {})
        is_reveal = fields.get("answer", {}).get("phase") == "reveal"
        self._number -= is_reveal
        if is_reveal and self._when == "before" and not self._number:
            self._leave()
            super().call(Message({**message.header, "kind": "leave", "failed": True}), timeout)
        if time.monotonic() < self._until:
            raise DisconnectedError("memory: lost")
        answer = super().call(message, timeout)
        if is_reveal and self._when == "after" and not self._number:
            self._leave()
            super().call(Message({**message.header, "kind": "leave", "failed": True}), timeout)
        return answer


def four_sites(rounds: int = 2) -> dict[str, Any]:
    return {name: small(rounds=rounds, data_seed=i) for i, name in enumerate(NAMES)}


def test_sites_answer_no_sum_that_differs_by_one_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str], notes: list[str]
) -> None:
    """Not for the same model, nor for one that differs a little."""
    ask, second = StageCalls.ask, list[Any]()

    def twice(calls: StageCalls, divided: Any, request: Any, token: str, *args: Any) -> Any:
        header, who, _ = args
        replies = ask(calls, divided, request, token, *args)
        others = who.of(dict.fromkeys("abc"))
        for change in (0, 1e-6):
            shared = [x + change for x in request.shared]
            again = request._replace(shared=shared), new_token(), header, others, 3
            second.append(ask(calls, divided, *again))
        return replies

    monkeypatch.setattr(StageCalls, "ask", twice)
    monkeypatch.setattr("fedpax.sites.stage_calls.note_opened", lambda *_: None)
    run(small(rounds=1), four_sites(1), tmp_path, rules=RULES, first_round_needs=4)
    assert second == [None, None] and opened == [NAMES]
    told = "no reply: the sum of 'round 1 0' was opened before, of "
    assert sum(text.startswith(told) and "a, b, c, d" in text for text in notes) == 6


def test_a_sum_that_some_have_opened_is_asked_of_the_same_sites(
    tmp_path: Path, opened: list[str], notes: list[str]
) -> None:
    rules = RULES._replace(secure_threshold=4)  # such that the sum is not opened without d
    lines = {"d": lambda exchange: Away(exchange, "before")}
    sites = four_sites()
    outcome = run(small(rounds=2), sites, tmp_path, rules=rules, first_round_needs=4, lines=lines)
    assert_made_by(outcome.params, sites, 2, NAMES)
    assert opened == [NAMES, NAMES]
    assert any(text.startswith("waiting for d: a sum of 4 sites was opened") for text in notes)


@pytest.mark.parametrize(
    ("name", "number", "sums"),
    [("fedavg", 1, 3), pytest.param("mime", 3, 4, marks=pytest.mark.slow)],
)
def test_sums_are_of_the_same_sites_if_one_leaves_between_averages_or_stages(
    tmp_path: Path, opened: list[str], notes: list[str], name: str, number: int, sums: int
) -> None:
    write_hospitals(tmp_path / "data", {**SIZES, "d": (30,)})
    fields = {"method": method(name), "rounds": 1}
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", **fields) for s in NAMES}
    kept = {}
    for where, lines in {"whole": {}, "away": {"d": lambda x: Away(x, "after", number)}}.items():
        outcome = run(
            experiment(**fields),
            sites,
            tmp_path / where,
            rules=RULES,
            first_round_needs=4,
            lines=lines,
        )
        kept[where] = outcome.coordinator.exchange.inputs, *outcome.params
    assert kept["whole"][0] == kept["away"][0]
    for leaf, other in zip(kept["whole"][1:], kept["away"][1:], strict=True):
        np.testing.assert_array_equal(leaf, other)
    assert opened == (2 * sums + 1) * [NAMES]
    assert any(text.startswith("waiting for d: a sum of 4 sites was opened") for text in notes)


class Faulty(Line):
    """A line of a site that reports faults once a sum was opened."""

    has_opened = False

    def call(self, message: Message, timeout: float) -> Message:
        """Call the coordinator."""
        fields = message.header.get("fields", {})
        if self.has_opened and message.header["kind"] == "reply":
            header = {**message.header, "fields": {"fault": "its disk is full"}}
            message = Message(header)
        self.has_opened |= fields.get("answer", {}).get("phase") == "reveal"
        return super().call(message, timeout)


def test_the_coordinator_tells_how_a_refused_site_of_an_opened_sum_returns(
    tmp_path: Path, notes: list[str]
) -> None:
    write_hospitals(tmp_path / "data", {**SIZES, "d": (30,)})
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1) for s in NAMES}
    with pytest.raises(RefusedError, match="refuses site 'd': its disk is full"):
        run(
            experiment(rounds=1),
            sites,
            tmp_path,
            rules=RULES,
            first_round_needs=4,
            lines={"d": Faulty},
        )
    (told,) = (text for text in notes if text.startswith("waiting for d: a sum of 4 sites"))
    assert "d was refused: mend its data or its flags, and start it again. If" in told


def test_how_expelled_sites_return_is_told() -> None:
    sites = SiteTable(9.0, lambda name: name == "lyon")
    sites.add("oslo", 1).is_refused = True
    told = sites.advise_return(["lyon", "oslo", "rome"])
    assert told[0] == "lyon was expelled: let it return by `fedpax sites admit lyon`"
    assert told[1].startswith("oslo was refused: ") and len(told) == 2


@pytest.mark.parametrize("forgets", [False, True])
def test_a_restarted_coordinator_waits_for_the_sites_of_an_opened_sum(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened: list[str],
    notes: list[str],
    forgets: bool,
) -> None:
    save = Coordinator._save
    monkeypatch.setattr(Coordinator, "_save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(small(rounds=2), four_sites(), tmp_path, rules=RULES, first_round_needs=4)
    monkeypatch.setattr(Coordinator, "_save", save)
    sites = four_sites()
    if not forgets:
        outcome = run(small(rounds=2), sites, tmp_path, rules=RULES, lines={"d": Away})
        assert_made_by(outcome.params, sites, 2, NAMES)
        assert opened == 3 * [NAMES]
        assert any(text.startswith("waiting for d: a sum of 4 sites") for text in notes)
        return
    path = tmp_path / "coordinator" / FEDERATION
    saved = json.loads(path.read_text())
    assert saved["opened"]["round"][0] == 1
    path.write_text(json.dumps({**saved, "opened": {}}))  # a copy that is older
    with pytest.raises(FailedRoundError, match=r"a: the sum of 'round 1 0' was opened before"):
        run(small(rounds=2), {name: sites[name] for name in "abc"}, tmp_path, rules=RULES)
    assert opened == [NAMES]


def test_opened_sums_outlive_the_process(tmp_path: Path) -> None:
    path = tmp_path / OPENED
    sums = OpenedSums(path)
    for _ in range(2):
        sums.add("question", ["a", "b"])
    sums.add("round 1 0", {"sites": ["a"], "clients": [0]})
    with path.open("a") as file:
        file.write('["round 2 0", {"si')  # a process that was killed
    sums = OpenedSums(path)
    sums.add("round 2 0", ["b"])
    known = OpenedSums(path)
    assert [known.get(name) for name in ("question", "round 2 0", "x")] == [["a", "b"], ["b"], None]
    assert known.get("round 1 0") == {"sites": ["a"], "clients": [0]}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
    assert len(lines) == 3
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_sum_that_no_site_opened_is_made_of_other_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    """With --only_sums_of=4, three sites do not confirm a sum; then the fourth returns."""

    class Interrupted(Line):
        """A line that is lost for a second when the site would first send its values."""

        until = 0.0

        def call(self, message: Message, timeout: float) -> Message:
            answer = message.header.get("fields", {}).get("answer", {})
            if answer.get("phase") == "mask" and not self.until:
                self.until = time.monotonic() + 1
                header = {**message.header, "kind": "leave", "failed": True}
                super().call(Message(header, {}), timeout)
            if time.monotonic() < self.until:
                raise DisconnectedError("memory: lost")
            return super().call(message, timeout)

    monkeypatch.setattr(
        "sites.federation.SecretTerms",
        lambda name, signer=None, folder=None: SecretTerms(name, 4, signer, folder),
    )
    sites, lines = four_sites(), {"a": Interrupted}
    outcome = run(small(rounds=2), sites, tmp_path, rules=RULES, first_round_needs=4, lines=lines)
    assert_made_by(outcome.params, sites, 2, NAMES)
    assert opened == 2 * [NAMES]

"""A coordinator that does not keep to the protocol of secure sums learns no term of a site."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.secure_sums import CoordinatorSide, Message
from fedpax.secure_sums.arithmetic import from_words
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.secret_terms import SecretTerms
from fedpax.sites.site_worker import SiteWorker
from fedpax.sites.task_exchange import TaskExchange
from sites.federation import run, write_hospitals
from sites.small_experiment import assert_made_by, small
from sites.test_equals_training import SIZES, experiment

HUGE = np.float32(2.0**30)
"""Parameters that absorb a float32 update: the terms of a site with this model are zeros."""


class LearnedError(Exception):
    """The end of a run whose coordinator has the sum that it wanted."""


def huge_for_others(site: str, task: Message) -> Message:
    """Send another model to each site but one."""
    if task.header.get("task") != "round" or site == "b":
        return task
    arrays = {n: np.full_like(x, HUGE) if x.ndim else x for n, x in task.arrays.items()}
    return Message(task.header, arrays)


def wide_for_others(site: str, task: Message) -> Message:
    """Send each site but one inputs that make its columns zeros."""
    if site == "b" or "inputs" not in task.header:
        return task
    inputs = dict(task.header["inputs"])
    inputs["columns"] = [{**column, "scale": 1e30} for column in inputs["columns"]]
    return Message({**task.header, "inputs": inputs})


@pytest.mark.parametrize("lie", [huge_for_others, wide_for_others])
def test_sites_that_are_asked_different_things_have_no_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: Callable[[str, Message], Message]
) -> None:
    work, run_clients = TaskExchange._work, SiteWorker._run_clients
    receive, advance = CoordinatorSide.receive, CoordinatorSide.advance
    terms: dict[str, Any] = {}
    sums: list[dict[str, np.ndarray]] = []

    def record(worker: SiteWorker, divided: Any, header: Any, *args: Any) -> Any:
        sent = run_clients(worker, divided, header, *args)
        if header["task"] == "round":
            terms[worker._experiment.data.files[0].split("/")[-2]] = sent
        return sent

    def believe(side: CoordinatorSide, site: str, answer: Message) -> bool:
        if "asked" in answer.header:
            answer = answer._replace(header={**answer.header, "asked": own_digest(side)})
        return receive(side, site, answer)

    def learn(side: CoordinatorSide) -> Any:
        requests = advance(side)
        if side.done and terms:
            sums.append(side.total)
            raise LearnedError
        return requests

    monkeypatch.setattr(
        TaskExchange, "_work", lambda x, site, *a: lie(site.name, work(x, site, *a))
    )
    monkeypatch.setattr(SiteWorker, "_run_clients", record)
    monkeypatch.setattr(CoordinatorSide, "receive", believe)
    monkeypatch.setattr(CoordinatorSide, "advance", learn)
    write_hospitals(tmp_path / "data", SIZES)
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv") for s in SIZES}
    with pytest.raises(LearnedError):
        run(experiment(), sites, tmp_path, rules=RoundRules(3, 60.0, secure_sums=True))
    for name, own in terms["b"].items():
        others = [terms[site][name] for site in "ac"]
        learned = from_words(sums[0][name], np.dtype(np.float64))
        if own.ndim == 2:  # weights of a number: the others send nothing that hides those of b
            assert np.abs(own[0]).max() > 0.01 > 1e3 * np.abs(others)[:, 0].max()
        assert np.abs(learned - own - np.sum(others, 0)).min() > 1e3


def own_digest(side: CoordinatorSide) -> str:
    """Return what an honest site states, if all are asked the same."""
    from fedpax.secure_sums.roster import to_text

    return to_text(side._task)


def test_a_site_with_another_model_by_mistake_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    work = TaskExchange._work

    def one_bit(exchange: TaskExchange, site: Any, *args: Any) -> Message:
        task = work(exchange, site, *args)
        if task.header.get("task") == "round" and site.name == "d":
            name = next(n for n, x in task.arrays.items() if x.ndim)
            changed = np.nextafter(task.arrays[name], np.float32(1))
            return Message(task.header, {**task.arrays, name: changed})
        return task

    monkeypatch.setattr(TaskExchange, "_work", one_bit)
    sites = {name: small(rounds=2, data_seed=i) for i, name in enumerate("abcd")}
    outcome = run(
        small(rounds=2),
        sites,
        tmp_path,
        rules=RoundRules(3, 60.0, secure_sums=True),
        first_round_needs=4,
    )
    assert_made_by(outcome.params, sites, 2, "abc")
    named = [x for x in notes if x.startswith("site d does not keep to the protocol: a site was")]
    assert len(named) == 2 and "its model or its inputs have other bytes" in named[0]


def test_all_sites_have_the_same_digest_of_a_model_in_few_bits(
    tmp_path: Path, notes: list[str]
) -> None:
    sites = {name: small(rounds=3, data_seed=i, features=300) for i, name in enumerate("abc")}
    rules = RoundRules(3, 60.0, secure_sums=True, down="e3m0")
    outcome = run(small(rounds=3, features=300), sites, tmp_path, rules=rules)
    assert {site.rounds for site in outcome.coordinator.exchange.sites} == {3}
    assert not any("does not keep to the protocol" in text for text in notes)


def test_a_site_answers_what_it_is_asked_and_not_what_it_was_under_the_same_token(
    tmp_path: Path,
) -> None:
    def make(folder: str) -> SiteWorker:
        site = small(clients=2)
        return SiteWorker(
            site, tmp_path / folder, seed=0, save=lambda *_: None, on_metrics=lambda *_: None
        )

    def ask(worker: SiteWorker, weights: str) -> Any:
        header = {"task": "round", "token": "t", "stage": 0, "last_stage": 0, "counted": None}
        header |= {"first_client": 0, "num_clients": 2, "clients": [0, 1], "slots": [0, 1]}
        arrays = {"shared 0": np.float32(0), "shared 1": np.zeros(3, np.float32)}
        return worker.work({**header, "round": 2, "weights": weights}, arrays)[1]

    worker, expected = make("a"), ask(make("b"), "examples")
    assert np.sum([not np.array_equal(x, expected[n]) for n, x in ask(worker, "equal").items()])
    for name, x in ask(worker, "examples").items():
        np.testing.assert_array_equal(x, expected[name])


def test_a_sum_between_two_stages_does_not_make_the_first_one_forgotten() -> None:
    def ask(side: SecretTerms, task: str, token: str, stage: int) -> str:
        header = {"task": task, "token": token, "stage": stage, "session": "s", "round": 1}
        fields, _ = side.send({**header, "request": {"phase": "mask"}}, {}, {}, {})
        return fields["fault"]

    side, between = SecretTerms("a"), "another sum came between two stages of this one"
    ask(side, "round", "T", 0)
    assert ask(side, "round", "T", 1) != between
    ask(side, "evaluate", "E", 0)
    assert ask(side, "round", "T", 2) == between

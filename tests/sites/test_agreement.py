"""A site that does not fit is refused by name with what differs, and the others go on."""

import copy
import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.data.tables.shared_treatment import (
    agree_on_kinds,
    agree_on_table,
    check_categories,
    table_properties,
)
from fedpax.errors import FedpaxError
from fedpax.run_files.metrics import read_metrics, select
from fedpax.sites.agreement import Needed, count_votes
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.site_table import LATE
from fedpax.sites.task_exchange import TaskExchange
from fedpax.sites.tasks import Task
from fedpax.transport.calls import RefusedError
from fedpax.transport.message import Message
from sites.federation import Changed, Line, run, write_hospitals
from sites.small_experiment import small
from sites.test_equals_training import experiment, train_together

SIZES = {"a": (40, 25), "b": (33,), "c": (21, 50)}


@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.dictionaries(st.sampled_from("xyz"), st.sampled_from("123"))
    ),
    st.dictionaries(st.sampled_from("xyz"), st.sampled_from("123")),
)
@settings(deadline=None)
def test_votes(sites: dict[str, dict[str, str]], stated: dict[str, str]) -> None:
    refused, undecided = count_votes(sites, stated)
    left = [result for name, result in sites.items() if name not in refused]
    for result in left:  # who is left has what is stated, and equals all others if it is decided
        assert all(result[name] == stated[name] for name in result.keys() & stated.keys())
    for name in "xyz":
        values = {result[name] for result in left if name in result}
        assert len(values) <= 1 or undecided is not None
    for name in refused:
        others = [v for n, v in sites.items() if n != name]
        assert others or any(k in stated for k in sites[name])
    backwards = dict(reversed(list(sites.items())))
    assert count_votes(backwards, stated).refused.keys() == refused.keys()  # no site is first


def test_all_ties_are_told_at_once() -> None:
    sites = {"a": {"x": "1", "y": "2", "z": "3"}, "b": {"x": "2", "y": "2", "z": "4"}}
    assert count_votes(sites, {}) == ({}, "x is '1' at a, '2' at b; z is '3' at a, '4' at b")


def federate(folder: Path, sites: dict[str, Any], coordinator: Any, bad: str, **options: Any):
    return run(
        coordinator,
        sites,
        folder / "runs",
        rules=RoundRules(2, 60.0),
        first_round_needs=3,
        may_be_refused=[bad],
        **options,
    )


def test_a_site_with_another_kind_of_column_is_refused(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "data", SIZES)
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=3) for s in SIZES}
    for path in (tmp_path / "data" / "a").iterdir():  # the first site
        head, *rows = path.read_text().splitlines()
        path.write_text("\n".join([head, *(row.replace(",", " years,", 1) for row in rows)]) + "\n")
    outcome = federate(tmp_path, sites, experiment(rounds=3), "a")
    assert (
        "site 'a': the column 'age' is 'text' at this site, expected 'number:mean'"
        in (outcome.refused["a"])
    )
    whole = experiment(*(f"{tmp_path}/data/{s}/*.csv" for s in "bc"))
    for leaf, other in zip(outcome.params, train_together(whole, 3), strict=True):
        assert np.abs(other).max() > 0.01
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


def malformed(header: dict[str, Any]) -> dict[str, Any]:
    if header["kind"] == "join":
        header["description"] = {"clients": 1, "label": 3}
    return header


def test_a_malformed_description_ends_no_run(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "data", SIZES)
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1) for s in SIZES}
    lines = {"a": lambda exchange: Changed(exchange, malformed)}
    outcome = federate(tmp_path, sites, experiment(rounds=1), "a", lines=lines)
    assert "its description is malformed" in outcome.refused["a"]
    (line,) = select(read_metrics(tmp_path / "runs" / "coordinator"), "training")
    assert line["sites"] == 2


def test_a_coordinator_says_that_all_sites_are_refused(tmp_path: Path, notes: list[str]) -> None:
    write_hospitals(tmp_path / "data", SIZES)
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv") for s in SIZES}
    lines = dict.fromkeys(SIZES, lambda exchange: Changed(exchange, malformed))
    with pytest.raises(RefusedError, match="its description is malformed"):
        run(experiment(), sites, tmp_path / "runs", lines=lines)
    assert (
        "waiting for 3 sites: all are refused. Mend their data or flags, then start them again"
        in notes
    )


class FirstWithOtherTypes(Line):
    """A line of a site that is ready first, with another batch."""

    def call(self, message: Message, timeout: float) -> Message:
        if message.header["kind"] == "ready":
            types = {"features": ["float32", [3, 2]], "x": ["float32", [4, 9]]}
            message = message._replace(header={**message.header, "types": types})
        return super().call(message, timeout)


class LastWithOtherTypes(FirstWithOtherTypes):
    """A line of a site that is ready when the coordinator has published the batch."""

    def call(self, message: Message, timeout: float) -> Message:
        while message.header["kind"] == "ready" and self._exchange.types is None:
            time.sleep(0.01)
        return super().call(message, timeout)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("has_contract", "line_of_a"),
    [(False, FirstWithOtherTypes), (True, FirstWithOtherTypes), (True, LastWithOtherTypes)],
)
def test_a_site_cannot_choose_the_batches_of_others(
    tmp_path: Path, notes: list[str], has_contract: bool, line_of_a: type[Line]
) -> None:
    """A refused site has no number of a client, and nothing says that it is missing."""
    if has_contract:
        write_hospitals(tmp_path / "data", SIZES)
        sites: dict[str, Any] = {
            s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1) for s in SIZES
        }
        coordinator: Any = experiment(rounds=1)
    else:
        sites = {s: small(rounds=1, data_seed=seed) for seed, s in enumerate(SIZES)}
        coordinator = small(rounds=1)
    outcome = federate(tmp_path, sites, coordinator, "a", lines={"a": line_of_a})
    assert "batch" in outcome.refused["a"]
    assert "x" not in outcome.coordinator.exchange.types or not has_contract
    (line,) = select(read_metrics(tmp_path / "runs" / "coordinator"), "training")
    assert line["sites"] == 2
    exchange = outcome.coordinator.exchange
    assert exchange.sites.num_clients == (3 if has_contract else 2)
    assert {site.name: site.first for site in exchange.sites.members} == {"b": 0, "c": 1}
    assert not any("sites that have not asked for the last model" in note for note in notes)
    if has_contract:  # the numbers of clients decide the order of their examples
        whole = experiment(*(f"{tmp_path}/data/{s}/*.csv" for s in "bc"))
        whole = whole.with_inputs({**exchange.inputs, "sites": 0})
        for leaf, other in zip(outcome.params, train_together(whole, 1), strict=True):
            np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


def description() -> dict[str, Any]:
    column = {"name": "age", "kind": "number", "missing": "mean", "values": None}
    column |= {"bounds": None, "reason": "number"}
    sex = {**column, "name": "sex", "kind": "category", "missing": "category", "reason": "category"}
    label = {"name": "y", "task": "classification", "classes": ["0", "1"], "mean": 0.0}
    label |= {"scale": 1.0, "reason": "integers", "bounds": None, "stated": False}
    return {
        "clients": 2,
        "columns": [column, sex],
        "missing": ["age"],
        "label": label,
        "number": True,
    }


CATEGORIES = {"sex": {"values": {"f": 2, "m": 1}}}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    return [path, *(p for key in keys for p in places(value[key], (*path, key)))]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(st.sampled_from(places(description())[1:]), JUNK)
@settings(deadline=None, max_examples=150)
def test_what_passes_the_checks_can_be_agreed_on(place: tuple[Any, ...], junk: Any) -> None:
    changed = copy.deepcopy(description())
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = junk
    changed = json.loads(json.dumps(changed))
    honest = description()
    assert table_properties(honest)["the label"] == "y"
    try:
        result = table_properties(changed)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return  # refused
    if count_votes({"a": table_properties(honest), "b": result}, {}) == ({}, None):
        try:
            agree_on_table([honest, changed], [CATEGORIES] * 2)
            agree_on_table([changed, honest], [CATEGORIES] * 2)
        except FedpaxError as error:
            assert "at different sites" not in str(error)


@given(st.sampled_from(places(CATEGORIES)), JUNK)
@settings(deadline=None, max_examples=150)
def test_values_that_pass_the_checks_can_be_merged(place: tuple[Any, ...], junk: Any) -> None:
    changed: Any = {"": copy.deepcopy(CATEGORIES)}
    inner = changed
    for key in ("", *place)[:-1]:
        inner = inner[key]
    inner[("", *place)[-1]] = junk
    changed = json.loads(json.dumps(changed))[""]
    texts = [t for t in agree_on_kinds([description()]) if t.kind == "category"]
    check_categories(CATEGORIES, texts)
    try:
        check_categories(changed, texts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return  # refused
    agree_on_table([description()] * 2, [CATEGORIES, changed])


HALF = "\ud800"  # of a surrogate pair: JSON has it, a file in UTF-8 has not


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("columns", 0, "name"), HALF),
        (("columns", 0, "reason"), HALF),
        (("columns", 1, "values"), ["f|m"]),
        (("columns", 0, "values"), ["f", "m"]),
        (("columns", 1, "bounds"), [0, 1]),
        (("label", "classes"), ["0", HALF]),
        (("label", "reason"), HALF),
        (("label", "mean"), "x"),
        (("label", "scale"), 1e400),
    ],
    ids=str,
)
def test_what_no_site_can_have_is_malformed(place: tuple[Any, ...], value: Any) -> None:
    """Each of these ended the coordinator's run, when the sites agreed or when it wrote a file."""
    changed = description()
    changed["number"] = False
    inner: Any = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ValueError, match="expected the form of `fedpax join`"):
        table_properties(changed)


def test_bounds_that_differ_in_a_late_digit_differ() -> None:
    collected = []
    for most in (1234567, 1234568):
        messages = description()
        messages["columns"][0] |= {"bounds": [0, most], "reason": "stated"}
        collected.append(table_properties(messages))
    assert collected[0]["the column 'age'"] == "number(0..1234567):mean"
    assert collected[1]["the column 'age'"] == "number(0..1234568):mean"


@pytest.mark.parametrize("misses", [2, 3])
def test_a_site_that_is_late_with_a_question_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, misses: int
) -> None:
    write_hospitals(tmp_path / "data", SIZES)
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1) for s in SIZES}
    ask, missed = TaskExchange.ask, list[str]()

    def late(self: TaskExchange, task: Task, *more: Any) -> Any:
        if task.header["task"] != "question" or len(missed) == misses:
            return ask(self, task, *more)
        missed.append(task.token)
        site = self.sites.get("b")
        assert site is not None
        site.attendance.miss(task, 1.0, deadline=0.0, most=3)
        self.faults = {"b": LATE}
        return None

    monkeypatch.setattr(TaskExchange, "ask", late)
    outcome = federate(tmp_path, sites, experiment(rounds=1), "b")
    (line,) = select(read_metrics(tmp_path / "runs" / "coordinator"), "training")
    assert len(missed) == misses and line["sites"] == (3 if misses == 2 else 2)
    assert ("b" in outcome.refused) == (misses == 3)


@pytest.mark.parametrize("optional", [False, True])
def test_a_site_that_lacks_a_column(tmp_path: Path, optional: bool) -> None:
    write_hospitals(tmp_path / "data", SIZES)
    columns = ("age=number(0..120)",) if optional else ()  # no site fails to find what is stated
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1, columns=columns) for s in SIZES}
    for path in (tmp_path / "data" / "b").iterdir():
        rows = [row.split(",") for row in path.read_text().splitlines()]
        place = rows[0].index("age")
        path.write_text("\n".join(",".join(r[:place] + r[place + 1 :]) for r in rows) + "\n")
    if optional:
        data = dataclasses.replace(sites["b"].data, optional_columns=("age",))
        sites["b"] = dataclasses.replace(sites["b"], data=data)
    outcome = federate(tmp_path, sites, experiment(rounds=1, columns=columns), "b")
    (line,) = select(read_metrics(tmp_path / "runs" / "coordinator"), "training")
    if optional:
        assert not outcome.refused and line["sites"] == 3
        return
    assert line["sites"] == 2
    assert (
        "the column 'age' is 'absent' at this site, expected 'number:mean', as 2 of 3 sites have "
        "it (add it, or start a site that lacks it with --data.optional_columns 'age': its values "
        "are then missing there)"
    ) in outcome.refused["b"]


@given(st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["1", None, "lacks"])))
def test_votes_on_what_no_site_may_lack(values: dict[str, str | None]) -> None:
    name = Needed("the column 'age'", "add it")
    sites = {s: {} if v == "lacks" else {name: v} for s, v in values.items()}
    refused, undecided = count_votes(sites, {})
    having, lacking = [sum(v == x for v in values.values()) for x in ("1", "lacks")]
    loser = None if not having or having == lacking else "1" if having < lacking else "lacks"
    assert refused.keys() == {s for s, v in values.items() if v == loser and loser}
    assert (undecided is not None) == (0 < having == lacking)
    assert all("(add it)" in text for text in [*refused.values(), undecided or "(add it)"])


def test_text_that_is_no_feature_can_be_at_one_site_alone(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "data", SIZES)
    (path,) = (tmp_path / "data" / "b").iterdir()
    head, *rows = path.read_text().splitlines()
    noted = [f"{row},note {k}" for k, row in enumerate(rows)]
    path.write_text("\n".join([f"{head},notes", *noted]) + "\n")
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1) for s in SIZES}
    assert not federate(tmp_path, sites, experiment(rounds=1), "b").refused


def write_visits(folder: Path, patients: dict[str, int]) -> None:
    """Write two visits of each patient; names are text, and `ward` is a category everywhere."""
    random = np.random.default_rng(0)
    for site, number in patients.items():
        (folder / site).mkdir(parents=True)
        rows = [
            f"{site} {k // 2},ward {k % 3},{random.normal(50, 9):.1f},{'ill' if k % 3 else 'well'}"
            for k in range(2 * number)
        ]
        (folder / site / f"{site}.csv").write_text(
            "\n".join(["patient,ward,age,outcome", *rows]) + "\n"
        )


@pytest.mark.parametrize("secure_sums", [False, True])
def test_no_value_of_a_text_leaves_a_site_unless_all_sites_call_it_a_category(
    tmp_path: Path, notes: list[str], secure_sums: bool
) -> None:
    """At the small site `patient` has few values; at the others it is left out."""
    write_visits(tmp_path / "data", patients := {"small": 40, "big-b": 60, "big-c": 60})
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1) for s in patients}
    columns = sites["small"].describe_site()["columns"]
    assert [c["kind"] for c in columns] == ["category", "category", "number"]
    rules = RoundRules(3, 60.0, secure_sums=secure_sums)
    outcome = run(experiment(rounds=1), sites, tmp_path / "runs", rules=rules)
    columns = outcome.coordinator.exchange.inputs["columns"]
    assert [c["treatment"]["name"] for c in columns] == ["ward", "age"]
    for name, line in outcome.lines.items():
        sent = b"".join(line.sent)
        assert b'"ward 2"' in sent and f"{name} ".encode() not in sent
    (told,) = {n for n in notes if n.startswith("sends the syncer") and "'patient'" in n}
    assert re.search(r"\d\d of 'patient' \('small \d+', 'small \d+', 'small \d+'\)", told)
    assert "--data.columns 'patient=left_out'" in told


def test_a_site_with_malformed_values_ends_no_run(tmp_path: Path) -> None:
    write_visits(tmp_path / "data", patients := {"a": 60, "b": 60, "c": 60})
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1) for s in patients}

    def change(header: dict[str, Any]) -> dict[str, Any]:
        if "values" in header.get("fields", {}):
            header["fields"] = {"values": {"ward": {"values": {"ward 1": -1}}}}
        return header

    lines = {"a": lambda exchange: Changed(exchange, change)}
    outcome = federate(tmp_path, sites, experiment(rounds=1), "a", lines=lines)
    assert "categories of 'ward' is" in outcome.refused["a"]
    (line,) = select(read_metrics(tmp_path / "runs" / "coordinator"), "training")
    assert line["sites"] == 2

"""Secure sums in rounds: equal to plain rounds, and only masked words are sent."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fedpax
from fedpax.run_files.metrics import read_metrics, select
from fedpax.secure_sums.arithmetic import NotSummableError, from_words, to_words
from fedpax.settings.client_methods import method
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.secret_terms import SecretTerms, check_is_sum
from fedpax.sites.site_worker import SiteWorker, UnknownRoundError
from fedpax.sites.task_exchange import TaskExchange
from fedpax.transport.message import Message
from sites.federation import Federation, run, write_hospitals
from sites.test_equals_training import SIZES, experiment


@given(
    st.integers(1, 5).flatmap(
        lambda n: arrays(np.float32, (n, 3), elements=st.floats(-5e8, 5e8, width=32))
    )
)
@settings(deadline=None)
def test_sums_of_words_are_sums_of_floats(values: np.ndarray) -> None:
    words = sum(to_words(row).astype(np.uint64) for row in values)
    assert words.max() < 2**32
    total = from_words(words.astype(np.uint32).view(np.int32), np.dtype(np.float64))
    exact = np.sum(values.astype(np.float64), 0)
    assert np.abs(total - exact).max() <= len(values) * 2.0**-25


@given(arrays(np.int32, (4, 2), elements=st.integers(-(2**31), 2**31 - 1)))
@settings(deadline=None)
def test_sums_of_words_are_sums_of_integers(values: np.ndarray) -> None:
    words = sum(to_words(row) for row in values)
    result = from_words(words.view(np.int32), np.dtype(np.int64))
    np.testing.assert_array_equal(result, values.astype(np.int64).sum(0))


def test_500_of_the_largest_numbers_do_not_overflow() -> None:
    largest = np.float64([2.0**29 - 1, -(2.0**29) + 1])
    words = (500 * to_words(largest).astype(np.uint64)).astype(np.uint32)
    np.testing.assert_array_equal(from_words(words, np.dtype(np.float64)), 500 * largest)


@pytest.mark.parametrize("x", [np.nan, np.inf, 2.0**29, -(2.0**30)])
def test_numbers_that_cannot_be_summed(x: float) -> None:
    with pytest.raises(NotSummableError, match=r"it has NaN, or numbers of 2\*\*29 or more"):
        to_words(np.float32([1.0, x]))
    with pytest.raises(NotSummableError, match=r"integers of 2\*\*53"):
        to_words(np.int64([2**53]))


def federate(
    folder: Path, where: str, sites: Any = None, rounds: int = 2, **rules: Any
) -> Federation:
    sites = sites or {s: experiment(f"{folder}/data/{s}/*.csv", rounds=rounds) for s in SIZES}
    coordinator = experiment(rounds=rounds, method=next(iter(sites.values())).method)
    return run(coordinator, sites, folder / where, rules=RoundRules(3, 60.0, **rules))


@pytest.mark.parametrize("name", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_equal_to_plain_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    received: list[np.dtype] = []
    handle = TaskExchange.handle

    def record(exchange: TaskExchange, peer: str, message: Message) -> Message:
        received.extend(x.dtype for x in message.arrays.values())
        return handle(exchange, peer, message)

    write_hospitals(tmp_path / "data", SIZES)
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", method=method(name)) for s in SIZES}
    plain = federate(tmp_path, "plain", sites)
    monkeypatch.setattr(TaskExchange, "handle", record)
    secret = federate(tmp_path, "secret", sites, secure_sums=True)
    for leaf, other in zip(plain.params, secret.params, strict=True):
        assert np.abs(leaf).max() > 0.01
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)
    assert set(received) == {np.dtype(np.uint32)}  # no float leaves a site


def test_columns_of_any_unit(tmp_path: Path) -> None:
    # Sums of squares of incomes are 1e11 here; those of doses are 1e-10.
    write_hospitals(tmp_path / "data", SIZES)
    for path in (tmp_path / "data").glob("*/*.csv"):
        head, *rows = [line.split(",") for line in path.read_text().splitlines()]
        rows = [[f"{1000 * float(a):.0f}", b, c and f"{c}e-6", d] for a, b, c, d in rows]
        lines = [",".join(row) for row in [["income", *head[1:]], *rows]]
        path.write_text("\n".join(lines) + "\n")
    plain, secret = federate(tmp_path, "plain"), federate(tmp_path, "secret", secure_sums=True)
    inputs = [x.coordinator.exchange.inputs["columns"] for x in (plain, secret)]
    for column, other in zip(*inputs, strict=True):
        assert column["mean"] == pytest.approx(other["mean"], rel=1e-6)
        assert column["scale"] == pytest.approx(other["scale"], rel=1e-5)
    assert [x["scale"] > 1e4 for x in inputs[1]] == [True, False, False]
    for leaf, other in zip(plain.params, secret.params, strict=True):
        assert np.abs(leaf).max() > 0.01
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


def test_a_site_that_drops_out_of_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In round 2 its terms are NaN: it says so, and the sum is of the three others.
    sizes = {**SIZES, "d": (30,)}
    write_hospitals(tmp_path / "data", sizes)
    honest = SiteWorker._run_clients

    def run_clients(worker: SiteWorker, *args: Any) -> dict[str, np.ndarray]:
        sent = honest(worker, *args)
        header = args[1]
        if "/c/" in worker._experiment.data.files[0] and header.get("round") == 2:
            sent = {name: np.full_like(x, np.nan) for name, x in sent.items()}
        return sent

    monkeypatch.setattr(SiteWorker, "_run_clients", run_clients)
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=3) for s in sizes}
    rules = RoundRules(3, 60.0, secure_sums=True)
    outcome = run(experiment(rounds=3), sites, tmp_path / "runs", rules=rules, first_round_needs=4)
    table = {site.name: site.rounds for site in outcome.coordinator.exchange.sites}
    assert table == {"a": 3, "b": 3, "c": 2, "d": 3}
    assert all(np.isfinite(x).all() for x in outcome.params)


@pytest.mark.parametrize("phase", ["keys", "share", "mask", "confirm", "reveal"])
@pytest.mark.slow
def test_a_site_that_is_silent_from_a_phase_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    sizes = {**SIZES, "d": (30,)}
    write_hospitals(tmp_path / "data", sizes)
    work, seen = SiteWorker.work, set[str]()

    def silent(worker: SiteWorker, header: Any, arrays: Any) -> Any:
        asked = (header.get("request") or {}).get("phase", "keys")
        if "/c/" in worker._experiment.data.files[0] and header["round"] == 2:
            if asked == phase or phase in seen:
                seen.add(phase)
                raise UnknownRoundError
        return work(worker, header, arrays)

    monkeypatch.setattr(SiteWorker, "work", silent)
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=2) for s in sizes}
    rules = RoundRules(3, 2.0, secure_sums=True)
    run(experiment(rounds=2), sites, tmp_path / "runs", rules=rules, first_round_needs=4)
    _, last = select(read_metrics(tmp_path / "runs" / "coordinator"), "training")
    assert seen and last["sites"] == (4 if phase in ("confirm", "reveal") else 3)


def test_a_site_can_insist_on_secure_sums() -> None:
    terms = {"term 0": np.float32([1.0])}
    fields, sent = SecretTerms("a").send({"task": "round"}, {}, {"examples": 3}, terms)
    assert (fields, sent) == ({"examples": 3}, terms)
    with pytest.raises(ValueError, match=r"expected a secure sum: this site has --only_sums_of=3"):
        SecretTerms("a", 3).send({"task": "round"}, {}, {"examples": 3}, terms)


def test_guards_and_secure_sums_exclude_each_other() -> None:
    for other in ({"norm_factor": 3.0}, {"accept_if": "loss+0.01"}):
        with pytest.raises(ValueError, match="secure_sums hides the replies of sites"):
            RoundRules(secure_sums=True, **other).check()


def test_complex_terms_are_refused_before_the_first_round() -> None:
    @fedpax.program(clients=2)
    def mean(x: jax.Array) -> jax.Array:
        return fedpax.federated_mean(fedpax.federated_map(lambda x: 2 * x, x))

    (stage,) = fedpax.stages(mean, jnp.zeros(2, jnp.complex64))
    with pytest.raises(ValueError, match="is complex64, expected real numbers"):
        check_is_sum(stage, adds=True)

"""The way up in few bits: the sums of a site, and what they lose."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.errors import ConfigurationError
from fedpax.run_files.metrics import read_metrics, select
from fedpax.sites.coordinator_program import cohort_types, divide, expected_arrays
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.site_table import read_sites
from fedpax.sites.site_worker import SiteWorker
from fedpax.sites.uplink import Uplink, check_up
from fedpax.transforms.client_stages import Stage, Value
from fedpax.transforms.stages import Stages
from sites.federation import HeavyLine, run
from sites.small_experiment import small

FEATURES = 600
FLOAT = np.dtype(np.float32)
STAGE = Stage(
    shared=(),
    rows=(),
    own=(),
    noise=(),
    terms=(
        Value("mean of x", (20, 30), FLOAT),
        Value("sum of weight", (), FLOAT),
        Value("mean of y", (300,), FLOAT),
        Value("number", (400,), np.dtype(np.int32)),
    ),
    shown=(),
    kept=(),
)


def draw(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw the sums of a site."""
    arrays = [random.normal(size=v.shape).astype(v.dtype) for v in STAGE.terms]
    return {f"term {i}": x for i, x in enumerate(arrays)}


@pytest.mark.parametrize("codec", ["e3m0", "drive", "sign"])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**16), site=st.integers(0, 1000))
def test_what_is_received_and_what_is_unsent_are_the_sums(codec: str, seed: int, site: int) -> None:
    uplink, random = Uplink(codec, STAGE, adds=True), np.random.default_rng(seed)
    unsent, sums, received = uplink.zeros(), [], []
    for number in range(1, 5):
        arrays = draw(random)
        sent, unsent = uplink.encode(number, site, arrays, unsent)
        result = {name: (x.shape, x.dtype) for name, x in sent.items()}
        assert result == uplink.types(expected_arrays(STAGE))
        got = uplink.decode(number, site, sent)
        assert got.keys() == arrays.keys()
        for name in ("term 1", "term 3"):
            np.testing.assert_array_equal(got[name], arrays[name])
        sums.append(arrays), received.append(got)
    for name, left in zip(("term 0", "term 2"), unsent, strict=True):
        total = sum(np.float64(x[name]) for x in sums)
        np.testing.assert_allclose(
            sum(np.float64(x[name]) for x in received) + left, total, atol=1e-4
        )


def test_what_is_no_sum_is_not_encoded() -> None:
    assert not Uplink("e3m0", STAGE, adds=False).is_active
    assert not Uplink("float32", STAGE, adds=True).is_active


@pytest.mark.slow
def test_a_site_of_several_clients_sends_few_bits(tmp_path: Path) -> None:
    losses, rows = {}, {}
    for up in ("float32", "e3m0"):
        sites = {
            name: small("feedback", 12, clients=clients, data_seed=seed, features=FEATURES)
            for seed, (name, clients) in enumerate({"a": 1, "b": 3}.items())
        }
        rules = RoundRules(2, 60.0, up=up)
        outcome = run(small("feedback", 12, features=FEATURES), sites, tmp_path / up, rules=rules)
        lines = select(read_metrics(outcome.folder / "coordinator"), "training")
        losses[up] = lines[-1]["loss"]
        rows[up] = {s.name: s.received_bytes for s in read_sites(outcome.folder / "coordinator")}
    assert rows["e3m0"]["a"] == rows["float32"]["a"]  # the words of its client
    assert rows["e3m0"]["b"] < rows["float32"]["b"] / 6
    assert losses["e3m0"] == pytest.approx(losses["float32"], rel=5e-3)


def test_the_coordinator_tells_who_sends_float32(tmp_path: Path, notes: list[str]) -> None:
    sites = {
        name: small("compressed", 1, clients=clients, data_seed=clients, features=FEATURES)
        for name, clients in {"a": 1, "b": 3}.items()
    }
    run(small("compressed", 1, features=FEATURES), sites, tmp_path)
    (messages,) = [text for text in notes if "as float32" in text]
    assert messages.startswith("site b has several clients") and "--up=e3m0" in messages


def ask(worker: SiteWorker, token: str, counted: str | None, number: int) -> Any:
    """Ask a site for the sums of a round."""
    header = {"task": "round", "token": token, "stage": 0, "last_stage": 0, "first_client": 0}
    header |= {"num_clients": 2, "clients": [0, 1], "slots": [0, 1], "counted": counted}
    header |= {"round": number, "weights": "equal", "up": "e3m0"}
    arrays = {"shared 0": np.float32(0), "shared 1": np.zeros(FEATURES, np.float32)}
    return worker.work(header, arrays)[1]


def test_what_a_sum_lost_is_sent_once_the_round_counts(tmp_path: Path) -> None:
    def make(folder: str) -> SiteWorker:
        (tmp_path / folder).mkdir(exist_ok=True)
        return SiteWorker(
            small("fedavg", clients=2, features=FEATURES),
            tmp_path / folder,
            seed=0,
            save=lambda *_: None,
            on_metrics=lambda *_: None,
        )

    first = ask(make("a"), "one", None, 1)
    lost = ask(make("a"), "two", None, 2)  # round "one" does not count
    counted_worker = make("b")
    ask(counted_worker, "one", None, 1)
    del counted_worker  # the site is killed, and returns
    counted = ask(make("b"), "two", "one", 2)
    fresh = ask(make("c"), "two", None, 2)
    (name,) = [name for name in first if name.startswith("sum ")]
    np.testing.assert_array_equal(lost[name], fresh[name])
    assert (counted[name] != fresh[name]).mean() > 0.1
    again = ask(make("b"), "two", "one", 2)  # the same stage, repeated
    np.testing.assert_array_equal(again[name], counted[name])


def test_a_weight_beside_encoded_sums_is_checked(tmp_path: Path) -> None:
    class Heavy(HeavyLine):
        weight = 17

    sites = {
        s: small("fedavg", 1, clients=2, data_seed=seed, features=FEATURES)
        for seed, s in enumerate("ab")
    }
    rules = RoundRules(1, 60.0, weights="capped:100", up="e3m0")
    coordinator = small("fedavg", 1, features=FEATURES)
    run(coordinator, sites, tmp_path, rules=rules, first_round_needs=2, lines={"a": Heavy})
    rows = {site.name: site for site in read_sites(tmp_path / "coordinator")}
    assert (rows["a"].rounds, rows["a"].dropped) == (0, 1)
    assert (rows["b"].rounds, rows["b"].dropped) == (1, 0)


def test_sums_are_not_encoded_under_masks_or_noise() -> None:
    with pytest.raises(ValueError, match="up='e3m0' with secure_sums"):
        RoundRules(3, secure_sums=True, up="e3m0").check()
    with pytest.raises(ValueError, match="up='zip', expected one of float32"):
        RoundRules(up="zip").check()
    with pytest.raises(ConfigurationError, match="up='e3m0' with private means"):
        check_up("e3m0", divide_small("fedavg"), is_private=True)
    assert check_up("float32", divide_small("fedavg"), is_private=True) == ""


def divide_small(method: str, features: int = FEATURES) -> Stages:
    run = small(method, features=features).coordinate(5)
    state = jax.eval_shape(lambda: run.algorithm.init(run.init(jax.random.key(0))))
    types = {"x": ["float32", [4, features]], "y": ["float32", [4]]}
    return divide(run.algorithm, state, cohort_types(types, 5), None)


@pytest.mark.parametrize(
    ("method", "features", "has_effect"),
    [("fedavg", 600, True), ("fedavg", 255, False), ("median", 600, False)],
)
def test_a_codec_without_effect_is_told(method: str, features: int, has_effect: bool) -> None:
    messages = check_up("e3m0", divide_small(method, features), is_private=False)
    assert messages.startswith("up=e3m0 has no effect") is not has_effect

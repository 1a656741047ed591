"""The models without each site: equal to a fold of the others, with few reads."""

import math
from pathlib import Path

import numpy as np
import pytest

from fedpax.sites.merge_guard import leave_one_out
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.tasks import SiteReply
from sites.federation import run, write_hospitals
from sites.test_equals_training import experiment


@pytest.mark.parametrize("number", [1, 2, 3, 7, 8, 33])
def test_each_site_is_left_out_once(number: int) -> None:
    terms = {f"s{i:02}": np.random.default_rng(i).normal(size=3) for i in range(number)}
    terms[next(iter(terms))] *= 1e30  # a difference from the whole sum would lose the others
    reads, most = 0, number * math.ceil(math.log2(number)) if number > 1 else 0

    def read(name: str) -> tuple[np.ndarray]:
        nonlocal reads
        reads += 1
        return (terms[name],)

    result = list(leave_one_out(list(terms), read, lambda x, y: (x[0] + y[0],)))
    assert [name for name, _ in result] == list(terms)
    for name, rest in result:
        expected = sum(x for other, x in terms.items() if other != name)
        if number == 1:
            assert rest == ()
        else:
            np.testing.assert_allclose(rest[0], expected, rtol=1e-12, atol=1e-12)
    assert reads <= most


@pytest.mark.slow
def test_accept_if_reads_each_reply_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {name: (40,) for name in "abcdefgh"}
    write_hospitals(tmp_path / "data", {**sizes, "own": (200,)})
    reads = 0
    honest = SiteReply.arrays.fget

    def count(reply: SiteReply) -> object:
        nonlocal reads
        reads += 1
        return honest(reply)

    monkeypatch.setattr(SiteReply, "arrays", property(count))
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1) for s in sizes}
    coordinator = experiment(f"{tmp_path}/data/own/*.csv", rounds=1)
    rules = RoundRules(8, 60.0, accept_if="loss+5")
    run(coordinator, sites, tmp_path / "runs", rules=rules)
    # Two questions before the round read each reply once; a round with all of them, 8 log2(8)
    # without one of them, and again for its merge.
    assert reads <= 2 * 8 + 8 + 8 * 3 + 8

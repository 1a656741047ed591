"""The messages and islands that a syncer refuses."""

import re

import numpy as np
import pytest
from islands.site_problem import (
    IDENTITY,
    Sites,
)
from islands.syncer_methods import parts, three

from fedpax.transport.calls import RefusedError
from fedpax.transport.message import Message

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("sites")


def test_bad_updates_are_counted_and_not_applied():
    sites = three(quorum=3, max_norm=1e3, max_staleness=0)
    before = sites.params()
    sites.phase(sites.islands[1])
    (good,) = [m for m in sites.messages if m.header["kind"] == "push"]
    header = {**good.header, "incarnation": "a-1", "island": "a"}
    changed = {
        "not_finite": lambda x: np.full_like(x, np.nan),
        "too_large": lambda x: np.full_like(x, 1e4),
    }
    for number, (status, change) in enumerate(changed.items(), start=1):
        arrays = {name: change(x) for name, x in good.arrays.items()}
        answer = sites.call(Message({**header, "sequence": number}, arrays))
        assert answer.header["status"] == status and getattr(sites.syncer.totals, status) == 1
    answer = sites.call(Message({**header, "sequence": 3, "loss": None}, good.arrays))
    assert answer.header["status"] == "not_finite"
    for name, want in before.items():
        np.testing.assert_array_equal(sites.params()[name], want)
    sites.call(Message({**header, "sequence": 4}, good.arrays))
    sites.phase(sites.islands[2])
    assert sites.syncer.merges == 1 and sites.reports[0].islands == ("a", "b", "c")
    for repeated in range(2):  # a lost answer is given again
        stale = sites.call(Message({**header, "sequence": 5}, good.arrays))
        assert stale.header["status"] == "stale" and sites.syncer.totals.stale == 1
        assert sites.syncer.totals.repeated == repeated
    assert sites.syncer.islands()[0].dropped == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "0"}, "fedpax 0, and the syncer has 1. Install the same version"),
        ({"experiment": {"seed": 1}}, "seed is 1, and 0 at the syncer. Give `fedpax join` the"),
        ({"model": {"w": "float32[4]"}}, "another model: w is float32[4], and float32[3]"),
    ],
)
def test_another_experiment_is_refused(change, words):
    sites = Sites(parts())
    identity = IDENTITY._replace(**change)._asdict()
    with pytest.raises(RefusedError, match=re.escape(words)):
        sites.add("a", identity=identity)


def test_who_may_join():
    sites = three()
    with pytest.raises(RefusedError, match=r"all 3 shards are in use .* Wait until one leaves"):
        sites.add("d")
    with pytest.raises(RefusedError, match=r"expected 0 to 2. Leave out --shard"):
        sites.add("d", shard=3)
    with pytest.raises(RefusedError, match=r"training already, in another folder. Give --name"):
        sites.add("a", process="x", folder="elsewhere")
    with pytest.raises(RefusedError, match=r"another run.* Give `fedpax join` an empty"):
        sites.add("a", process="x", run="another")
    with pytest.raises(RefusedError, match="belongs to the certificate '', not to 'mallory'"):
        sites.syncer.handle("mallory", Message({**sites.header("a", "m"), "kind": "join"}))
    assert sites.add("b", process="b-2").shard == 1  # its own shard, at once
    sites.now += 1801
    sites.receive(sites.islands[0])
    assert sites.add("d", shard=2).shard == 2  # of an island that is gone


def test_malformed_messages_are_refused():
    sites = Sites(parts(), quorum=2)
    island = sites.add("a")
    sites.phase(island)
    (push,) = [m for m in sites.messages if m.header["kind"] == "push"]
    sites.messages.clear()
    name = next(iter(push.arrays))
    for change, words in [
        ({"kind": "steal"}, "kind 'steal', expected join, push"),
        ({"fragment": 2}, "expected a number below 2"),
        ({"sequence": -1}, "expected an integer from 1 to"),
        ({"tokens": 1e9}, "expected at most 12 per step. Use the same data"),
        ({"count": 7}, "but the fragment has 0"),
        ({"incarnation": "unknown"}, "is another process. Join first"),
        ({"loss": "low"}, "expected a number. Use the same version"),
    ]:
        header = {**push.header, "sequence": 9, **change}
        with pytest.raises(RefusedError, match=re.escape(words)):
            sites.call(Message(header, push.arrays))
    for arrays, words in [
        ({}, "are missing"),
        ({**push.arrays, "extra": np.zeros(1)}, "are unknown"),
        ({**push.arrays, name: push.arrays[name][..., None]}, "expected float32[4]"),
        ({**push.arrays, name: push.arrays[name].astype(np.float64)}, "is float64"),
    ]:
        with pytest.raises(RefusedError, match=re.escape(words)):
            sites.call(Message({**push.header, "sequence": 9}, arrays))
    assert sites.call(Message({**push.header, "island": "nobody"})).header == {"status": "join"}

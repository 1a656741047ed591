"""A syncer and messages of strangers: any message is answered or refused, and islands train on."""

import functools
import json
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from islands.site_problem import IDENTITY, TOKENS_PER_STEP, Sites, make_parts

from fedpax.transport.calls import RefusedError
from fedpax.transport.message import Message

# On one worker, where the method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("sites")

FIELDS = ("kind", "island", "incarnation", "folder", "run", "shard", "identity", "steps")
PUSH_FIELDS = ("fragment", "sequence", "merge", "count", "base", "tokens", "update_steps", "loss")
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from(
        [0, 1, 2, 3, -1, 0.5, 1e-300, 1e300, 2**53 - 1, 10**400, "a", "b", "a-1", "mallory"]
    ),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=300),
    st.lists(st.integers(-2, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@functools.cache
def templates() -> dict[str, Message]:
    """Return a message of each kind, as island a sends them."""
    sites = Sites(make_parts(2), quorum=3)
    island = sites.add("a")
    sites.phase(island)
    result = {message.header["kind"]: message for message in sites.messages}
    heartbeat = {**sites.header("a", "a-1"), "kind": "heartbeat", "steps": 2}
    result["heartbeat"] = Message({**heartbeat, "seconds_per_update": 1.0})
    result["leave"] = Message({**heartbeat, "kind": "leave"})
    assert result.keys() == {"join", "push", "pull", "heartbeat", "leave"}
    return result


@st.composite
def hostile(draw: st.DrawFn) -> Message:
    """Draw a message that differs from a proper one in some fields and arrays."""
    kind = draw(st.sampled_from(sorted(templates())))
    header, arrays = dict(templates()[kind].header), dict(templates()[kind].arrays)
    others = ("versions", "seconds_per_update", "heard_end", "steps_before")
    names = (*FIELDS, *PUSH_FIELDS, *others)
    for name in draw(st.lists(st.sampled_from(names), max_size=3)):
        header[name] = draw(VALUES)
    if arrays and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(arrays)))
        fill = draw(st.sampled_from([np.nan, np.inf, -np.inf, 3e38, 1e19, 1e-45, 0.0]))
        shape = draw(st.sampled_from([arrays[name].shape, (0,), (2, 2), ()]))
        dtype = draw(st.sampled_from([np.float32, np.float32, np.float64, np.int8, np.bool_]))
        with np.errstate(invalid="ignore"):
            arrays[name] = np.full(shape, fill).astype(dtype)
    return Message(json.loads(json.dumps(header)), arrays)


@given(messages=st.lists(hostile(), min_size=1, max_size=6), seconds=st.floats(0, 40))
@settings(max_examples=10, deadline=None)
def test_any_message_is_answered_or_refused_and_the_others_train_on(
    messages: list[Message], seconds: float
) -> None:
    sites = Sites(make_parts(2), quorum=1)
    island = sites.add("b", shard=1)
    for message in messages:
        try:
            sites.call(message)
        except RefusedError as error:
            assert ". " in str(error) and len(str(error)) < 2000  # a reason and a remedy
        sites.now += seconds
    before = sites.syncer.merges
    for _ in range(3):
        sites.phase(island)
        sites.receive(island)
        sites.now += 3.0
    assert sites.syncer.failure is None and sites.syncer.merges > before
    assert all(np.isfinite(x).all() for x in sites.params().values())
    json.dumps([report._asdict() for report in sites.reports], allow_nan=False)
    assert all(report.name.isprintable() for report in sites.syncer.islands())


def push(sites: Sites, island: str, value: float, **fields: Any) -> str:
    """Send an update of fragment 0 that is `value` everywhere, and return the answer's status."""
    arrays = {
        name: np.full(like.shape, value, np.float32)
        for name, like in sites.model.formats[0].shapes.items()
    }
    header = {**sites.header(island, f"{island}-1"), "kind": "push", "steps": 2, "fragment": 0}
    update = {"merge": 0, "count": 0, "base": 0, "sequence": 1, "update_steps": 2, "loss": 1.0}
    header |= update | {"tokens": 2 * TOKENS_PER_STEP} | fields
    return sites.call(Message(header, arrays)).header["status"]


@pytest.mark.parametrize(
    ("value", "fields", "status"),
    [
        (3e38, {}, "too_large"),  # finite, but a merge of it is not
        (math.nan, {}, "not_finite"),
        (0.1, {"loss": None}, "not_finite"),
        (0.1, {"loss": 1e300}, "not_finite"),
    ],
)
def test_an_update_that_would_end_the_run_is_counted_and_not_applied(
    value: float, fields: dict[str, Any], status: str
) -> None:
    sites = Sites(make_parts(2), quorum=1)
    sites.add("a")
    before = sites.params()
    assert push(sites, "a", value, **fields) == status
    assert getattr(sites.syncer.totals, status) == 1 and sites.syncer.failure is None
    for name, want in before.items():
        np.testing.assert_array_equal(sites.params()[name], want)


@pytest.mark.parametrize("field", ["tokens", "loss"])
def test_integers_beyond_all_floats_are_refused(field: str) -> None:
    sites = Sites(make_parts(2), quorum=1)
    sites.add("a")
    with pytest.raises(RefusedError, match=f"'{field}' is 10000.*expected a number"):
        push(sites, "a", 0.5, **{field: 10**400})


def test_updates_with_a_weight_of_zero_merge_nothing() -> None:
    sites = Sites(make_parts(2), quorum=1)
    sites.add("a")
    assert push(sites, "a", 0.5, tokens=1e-200) == "accepted"
    assert sites.syncer.merges == 1
    assert all(np.isfinite(x).all() for x in sites.params().values())


def test_a_repeated_leave_does_not_give_the_shard_away() -> None:
    sites = Sites(make_parts(2), quorum=1)
    for name in "abc":
        sites.add(name)
    sites.call(templates()["leave"])  # a copy of an earlier message
    sites.receive(sites.islands[0])
    assert sites.syncer.islands()[0].state == "training"
    with pytest.raises(RefusedError, match="Wait until one leaves"):
        sites.add("d")


def test_names_that_would_change_a_terminal_are_refused() -> None:
    sites = Sites(make_parts(2))
    with pytest.raises(RefusedError, match="a printable text of 1 to 200 characters"):
        sites.add("\x1b[2Jisland")
    with pytest.raises(RefusedError, match="Use the same version"):
        sites.add("x" * 201)


def test_another_version_is_refused_before_anything_else() -> None:
    sites = Sites(make_parts(2))
    header = sites.header("a", "1", kind="join", identity={"version": "9" * 300})
    with pytest.raises(RefusedError, match=r"has fedpax 9{50}, and the syncer has 1\. Install"):
        sites.call(Message(header))
    with pytest.raises(RefusedError, match="kind 'sync', expected join, push"):
        sites.call(Message({**header, "kind": "sync", "identity": IDENTITY._asdict()}))


def test_a_member_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    sites = Sites(make_parts(2), quorum=1)
    sites.add("a")
    join = {**sites.header("a", "a-1"), "kind": "join", "epoch": "unknown", "versions": [0, 0]}
    for _ in range(100):
        assert sites.call(Message(join, {})).header["discard"]
    assert 1 <= len(caplog.records) <= 20

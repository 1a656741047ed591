"""Secure sums: equal to sums by NumPy for each set of dropouts, and what the coordinator sees."""

import functools
import hashlib
import itertools
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_sum_runs import (
    NAMES,
    PHASES,
    fixed_bytes,
    make_sites,
    random_values,
    run,
    true_sum,
)

import fedpax
from fedpax.aggregators import secure_mean
from fedpax.aggregators.secure_mean import FixedPoint
from fedpax.secure_sums import CoordinatorSide, Message, SecureSumError, SiteSide, arithmetic
from fedpax.secure_sums.site_side import SiteSums, UnknownSumError
from fedpax.transport.certificates import make_certificates, read_certificates
from fedpax.transport.signed_keys import CertificateSigner

VALUES = {name: random_values(i) for i, name in enumerate(NAMES)}
SUBSETS = [set(s) for r in range(6) for s in itertools.combinations(NAMES, r)]


def check_dropouts(drops: dict[str, str]) -> None:
    """Run a sum of five sites, and compare it with NumPy's; or it ends in words."""
    sites, coordinator = make_sites(VALUES), CoordinatorSide("s", NAMES)
    before_keys = [name for name in NAMES if drops.get(name) != "keys"]
    threshold = len(before_keys) // 2 + 1
    stay = [name for name in NAMES if name not in drops]
    if len(stay) < threshold or len(before_keys) < 3:
        with pytest.raises(SecureSumError, match="expected at least"):
            run(sites, drops, coordinator)
        assert not coordinator.total
        return
    try:
        run(sites, drops, coordinator)
    except SecureSumError as error:  # three sites at the start, of which two are left
        assert "2 sites are left" in str(error) and len(stay) == 2 and not coordinator.total
        return
    present = [name for name in NAMES if drops.get(name, "reveal") in ("confirm", "reveal")]
    assert coordinator.present == tuple(present)
    assert coordinator.total.keys() == VALUES["a"].keys()
    for key, expected in true_sum(VALUES, present).items():
        assert coordinator.total[key].dtype == np.int32
        np.testing.assert_array_equal(coordinator.total[key], expected)


@pytest.mark.parametrize("phase", PHASES)
def test_each_set_of_dropouts_in_one_phase(phase: str) -> None:
    for gone in SUBSETS:
        check_dropouts(dict.fromkeys(gone, phase))


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(PHASES)))
@settings(deadline=None, max_examples=30)
def test_dropouts_in_several_phases(drops: dict[str, str]) -> None:
    check_dropouts(drops)


@pytest.mark.slow
def test_each_set_of_dropouts_in_all_phases() -> None:
    for phases in itertools.product((None, *PHASES), repeat=5):
        check_dropouts({n: p for n, p in zip(NAMES, phases, strict=True) if p})


def test_a_late_answer_is_of_no_use() -> None:
    sites, coordinator = make_sites(VALUES), CoordinatorSide("s", NAMES)
    requests: dict[str, Message | None] = dict.fromkeys(NAMES)
    late = None
    while not coordinator.done:
        if coordinator.phase == "mask":
            late = sites["e"].answer(requests["e"])  # its values arrive after the phase
        for name in coordinator.waiting - ({"e"} if late else set()):
            assert coordinator.receive(name, sites[name].answer(requests[name]))
            assert not coordinator.receive(name, sites[name].answer(requests[name]))  # again
        requests = dict(coordinator.advance())
        if late:
            assert not coordinator.receive("e", late)
    np.testing.assert_array_equal(coordinator.total["x"], true_sum(VALUES, "abcd")["x"])


def test_what_is_sent_does_not_depend_on_the_values() -> None:
    # All bytes that the coordinator receives in one run, with the same random numbers; only the
    # masked values differ, by the difference of the values.
    answers = []
    for values in (VALUES["a"], random_values(99)):
        sites = {n: SiteSide(n, "s", values, random=fixed_bytes(n)) for n in NAMES}
        coordinator, seen = CoordinatorSide("s", NAMES), []
        requests: dict[str, Message | None] = dict.fromkeys(NAMES)
        while not coordinator.done:
            for name in NAMES:
                seen.append(sites[name].answer(requests[name]))
                coordinator.receive(name, seen[-1])
            requests = dict(coordinator.advance())
        answers.append(seen)
    for leaf, other in zip(*answers, strict=True):
        assert leaf.header == other.header
        for name, array in leaf.arrays.items():
            difference = array - other.arrays[name]
            expected = VALUES["a"][name] - random_values(99)[name]
            np.testing.assert_array_equal(difference, expected.view(np.uint32))


def test_masked_values_look_uniform() -> None:
    zeros = {"x": np.zeros(40_000, np.int32)}
    sites, coordinator = make_sites(dict.fromkeys("abc", zeros)), CoordinatorSide("s", "abc")
    requests: dict[str, Message | None] = dict.fromkeys("abc")
    for _ in range(2):
        for name in "abc":
            coordinator.receive(name, sites[name].answer(requests[name]))
        requests = dict(coordinator.advance())
    sent = [sites[name].answer(requests[name]).arrays["x"] for name in "abc"]
    for x in (*sent, sent[0] + sent[1], sent[0] - sent[2]):  # of pairs too: masks of their own
        counts = np.bincount(x >> 29, minlength=8)
        assert (abs(counts - 5000) < 6 * np.sqrt(5000)).all()


def test_the_protocol_has_not_changed() -> None:
    # With fixed random numbers: another version of fedpax can continue a sum of this one.
    sites = {n: SiteSide(n, "s", VALUES[n], random=fixed_bytes(n)) for n in NAMES}
    coordinator = run(sites, {"e": "mask", "d": "reveal"})
    masked = sites["a"].answer(_request(sites["a"], "mask")).arrays
    keys = sites["a"].answer(None).header["keys"]
    assert keys["mask"] == "MC6eJBKrum6B28cFxDvJRlwIWRFhodFvGdfAIOcPVgU="
    digest = hashlib.sha256(b"".join(masked[name].tobytes() for name in sorted(masked)))
    assert digest.hexdigest() == "6238ba1fbdd37fa84fd597871926ae9a1c6a38e4f0d5443b4a559713881a8047"
    np.testing.assert_array_equal(coordinator.total["x"], true_sum(VALUES, "abcd")["x"])


def _request(site: SiteSide, phase: str) -> Message:
    return Message(site._answers[phase][0])


def test_a_sum_of_two_needs_consent() -> None:
    pair = {name: VALUES[name] for name in "ab"}
    with pytest.raises(SecureSumError, match="the sum is of 2 sites, expected at least 3"):
        run(make_sites(pair), {}, CoordinatorSide("s", "ab"))
    coordinator = run(make_sites(pair, least_sites=2), {}, CoordinatorSide("s", "ab"))
    np.testing.assert_array_equal(coordinator.total["x"], true_sum(pair, "ab")["x"])
    with pytest.raises(SecureSumError, match="of 2 to 500 sites, not of 1"):
        CoordinatorSide("s", "a")


def test_values_can_be_made_when_they_are_needed() -> None:
    calls = []

    def values() -> dict[str, np.ndarray]:
        calls.append(1)
        return VALUES["a"]

    sites = {name: SiteSide(name, "s", values) for name in "abc"}
    coordinator = CoordinatorSide("s", "abc")
    for name in "abc":
        coordinator.receive(name, sites[name].answer(None))
    assert not calls
    coordinator = run(sites, {}, CoordinatorSide("s", "abc"))
    assert len(calls) == 3


def test_a_site_has_secrets_and_values_of_its_own_in_each_sum() -> None:
    sums = {name: SiteSums(3) for name in "abc"}

    def sites(session: str, values: Any) -> Any:
        def answer(name: str, request: Message | None) -> Message:
            header = None if request is None else request.header
            encode = values and (lambda: values[name])
            return sums[name].answer(name, session, header, encode)

        return {n: SimpleNamespace(answer=functools.partial(answer, n)) for n in sums}

    first = sums["a"].answer("a", "s", None).header["keys"]
    coordinator = run(sites("s", VALUES))
    np.testing.assert_array_equal(coordinator.total["x"], true_sum(VALUES, "abc")["x"])
    assert sums["a"].answer("a", "s", None).header["keys"] == first
    unmade = run(sites("t", None), {}, CoordinatorSide("t", "abc"))
    assert not unmade.total  # the values of the first sum are not sent again
    assert sums["a"].answer("a", "t", None).header["keys"] != first
    for name, session, request in (("a", "s", {"phase": "reveal"}), ("b", "t", None)):
        assert not sums["a"].knows(name, session)
        with pytest.raises(UnknownSumError, match="this process began after the sum"):
            sums["a"].answer(name, session, request)


def test_no_two_sums_have_one_name() -> None:
    """Else a site could count the second one, with other noise, as the first one again."""
    sums = SiteSums(3)
    for session in ("s", "s", "t"):
        sums.answer("a", session, None)
    with pytest.raises(SecureSumError, match="gives two sums one name"):
        sums.answer("a", "s", None)


def test_floats_are_averaged_as_by_secure_mean() -> None:
    rng = np.random.default_rng(0)
    updates = {"w": rng.normal(size=(5, 40, 3)), "b": rng.normal(size=(5, 7))}
    updates = {name: x.astype(np.float32) for name, x in updates.items()}
    updates["w"][0, 0] = [np.nan, 5.0, -5.0]
    here = np.array([1, 1, 0, 1, 0], np.float32)
    code, aggregator = FixedPoint(max_value=2.0, bits=16), secure_mean(max_value=2.0)

    @fedpax.program(clients=5)
    def average(updates, weights):
        return aggregator.aggregate(aggregator.init(None), updates, weights)[0]

    expected = jax.jit(average)(updates, here)
    encode = jax.jit(lambda own: jax.tree.map(code.encode, own))
    values = {
        name: jax.device_get(encode({key: x[i] for key, x in updates.items()}))
        for i, name in enumerate(NAMES)
    }
    coordinator = run(make_sites(values), {"c": "mask", "e": "mask"})
    assert coordinator.present == ("a", "b", "d")
    first = {key: x[0] for key, x in updates.items()}
    decode = lambda total, like: code.decode(total, jnp.int32(3), like=like)
    means = jax.jit(lambda total: jax.tree.map(decode, total, first))(coordinator.total)
    for key, mean in means.items():
        np.testing.assert_array_equal(mean, expected[key])


def test_signed_keys(tmp_path: Path) -> None:
    make_certificates(tmp_path / "own", NAMES)
    sites = {
        name: SiteSide(
            name,
            "s",
            VALUES[name],
            signer=CertificateSigner(read_certificates(tmp_path / "own" / name)),
        )
        for name in NAMES
    }
    coordinator = run(sites, {"a": "share", "b": "mask"})
    np.testing.assert_array_equal(coordinator.total["x"], true_sum(VALUES, "cde")["x"])


def test_memory_and_work_are_flat() -> None:
    # The coordinator holds one sum, however many sites there are, and a site expands one mask for
    # each other site.
    size = 250_000
    values = {"x": np.zeros(size, np.int32)}

    def peak(count: int) -> int:
        names = [f"site-{i}" for i in range(count)]
        coordinator = CoordinatorSide("s", names)
        sites = {name: SiteSide(name, "s", values) for name in names}
        requests: dict[str, Message | None] = dict.fromkeys(names)
        for _ in range(2):
            for name in names:
                coordinator.receive(name, sites[name].answer(requests[name]))
            requests = dict(coordinator.advance())
        tracemalloc.start()
        for name in names:
            coordinator.receive(name, sites.pop(name).answer(requests[name]))
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    assert peak(16) < 1.2 * peak(4) < 1.2 * 5 * 4 * size
    add_mask, calls = arithmetic.add_mask, []
    with pytest.MonkeyPatch.context() as patch:
        for module in ("site_side", "coordinator_side"):
            patch.setattr(
                f"fedpax.secure_sums.{module}.add_mask",
                lambda *args: [calls.append(1), add_mask(*args)],
            )
        run(make_sites(VALUES), {"e": "mask"})
    # Four sites with their own mask and four others; the coordinator four own masks, and four of e.
    assert len(calls) == 4 * 5 + 4 + 4

"""Sites that send false shares, or forged keys: others stay in the sum, and the liar is named."""

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_sum_runs import NAMES, make_sites, random_values, true_sum

from fedpax.secure_sums import CoordinatorSide, Message, SecureSumError, SiteSide
from fedpax.secure_sums.arithmetic import SHARE_BYTES, restore, split
from fedpax.secure_sums.roster import to_text
from fedpax.transport.certificates import make_certificates, read_certificates
from fedpax.transport.signed_keys import CertificateSigner

VALUES = {name: random_values(i) for i, name in enumerate(NAMES)}


def change(answers: dict[str, Message], liar: str, kind: str, about: Any) -> None:
    """Replace shares of one kind that a site reveals."""
    header = dict(answers[liar].header)
    wrong = {name: to_text(secrets.token_bytes(SHARE_BYTES)) for name in header[kind]}
    header[kind] = {n: wrong[n] if n in about else x for n, x in header[kind].items()}
    answers[liar] = Message(header)


def before_the_end(
    present: Any = NAMES, threshold: int | None = None, cheat: str = "", accuser: str = ""
) -> tuple[CoordinatorSide, dict[str, Message]]:
    """Run a sum up to the last answers of sites; one may share a secret that is not its own."""
    sites = make_sites(VALUES)
    coordinator = CoordinatorSide("s", NAMES, threshold=threshold)
    requests: dict[str, Message | None] = dict.fromkeys(NAMES)
    for phase in range(4):
        for name in NAMES if phase < 2 else present:
            if name == cheat and phase == 1:
                sites[name]._own = secrets.token_bytes(32)
            coordinator.receive(name, sites[name].answer(requests[name]))
        if accuser and phase == 2:
            others = [name for name in NAMES if name != accuser]
            coordinator.receive(accuser, Message({"phase": "mask", "accused": others}))
        requests = dict(coordinator.advance())
    return coordinator, {name: sites[name].answer(requests[name]) for name in present}


def end(coordinator: CoordinatorSide, answers: dict[str, Message]) -> None:
    for name, answer in answers.items():
        coordinator.receive(name, answer)
    coordinator.advance()


@pytest.mark.parametrize("to", ["abde", "a", "ab"])
def test_a_site_that_sends_shares_which_do_not_open(to: str) -> None:
    # Whom it sends false shares leaves the sum; those of several sites name the liar.
    sites, coordinator = make_sites(VALUES), CoordinatorSide("s", NAMES)
    requests: dict[str, Message | None] = dict.fromkeys(NAMES)
    stopped = False
    while not coordinator.done:
        for name in requests:
            answer = sites[name].answer(requests[name])
            if name == "c" and coordinator.phase == "share":
                shares = dict(answer.header["shares"])
                false = {n: to_text(secrets.token_bytes(82)) for n in to}
                answer = Message({"phase": "share", "shares": shares | false})
            coordinator.receive(name, answer)
        try:
            requests = dict(coordinator.advance())
        except SecureSumError as error:
            assert "1 sites are left in the phase 'mask'" in str(error)
            stopped = True
            break
    assert stopped == (to == "abde")
    assert set(coordinator.suspects) == ({"c"} if len(to) > 1 else set())
    if not stopped:
        stay = [name for name in NAMES if name not in to]
        np.testing.assert_array_equal(coordinator.total["x"], true_sum(VALUES, stay)["x"])


def test_a_site_that_accuses_all_others_is_the_suspect() -> None:
    coordinator, _ = before_the_end("abde", accuser="c")
    assert coordinator.present == tuple("abde") and set(coordinator.suspects) == {"c"}


@pytest.mark.parametrize("liar", ["a", "c", "e"])
@pytest.mark.parametrize("kind", ["own", "keys"])
def test_one_site_with_false_shares_stops_no_sum(kind: str, liar: str) -> None:
    present = NAMES if kind == "own" else [n for n in NAMES if n != "d"]
    coordinator, answers = before_the_end(present)
    change(answers, liar, kind, NAMES)
    end(coordinator, answers)
    expected = true_sum(VALUES, present)
    for name, total in coordinator.total.items():
        np.testing.assert_array_equal(total, expected[name])
    several = kind == "own" and liar != "e"  # of "e", the last one, no share is needed
    assert set(coordinator.suspects) == ({liar} if several else set())


def test_two_of_five_stop_no_sum_and_are_named() -> None:
    coordinator, answers = before_the_end()
    for liar in "ac":
        change(answers, liar, "own", NAMES)
    end(coordinator, answers)
    for name, total in coordinator.total.items():
        np.testing.assert_array_equal(total, true_sum(VALUES, NAMES)[name])
    assert {"a", "c"} <= coordinator.suspects.keys()
    assert all(
        "shares that it has sent or made do not fit" in x for x in coordinator.suspects.values()
    )


def test_a_site_that_shares_another_secret_is_named() -> None:
    coordinator, answers = before_the_end(cheat="b")
    with pytest.raises(SecureSumError, match="shares of a secret of site 'b' do not fit"):
        end(coordinator, answers)
    assert list(coordinator.suspects) == ["b"] and not coordinator.total


def test_nobody_is_named_who_can_be_innocent() -> None:
    """With as few answers as the threshold, any of them, or whose secret it is, can lie."""
    coordinator, answers = before_the_end(threshold=5)
    change(answers, "a", "own", ["b"])
    with pytest.raises(SecureSumError, match="shares of a secret of site 'b' do not fit"):
        end(coordinator, answers)
    assert not coordinator.suspects


@given(st.integers(0, 2**32), st.integers(2, 9), st.data())
@settings(deadline=None)
def test_a_secret_is_restored_beside_wrong_shares(seed: int, count: int, data: Any) -> None:
    random = np.random.default_rng(seed)
    threshold = data.draw(st.integers(1, count))
    wrong = data.draw(st.sets(st.integers(1, count), max_size=count))
    secret = random.bytes(32)
    shares = split(secret, threshold, range(1, count + 1), random.bytes)
    mixed = {x: random.bytes(SHARE_BYTES) if x in wrong else s for x, s in shares.items()}
    restored = restore(mixed, threshold, lambda x: x == secret)
    if count - len(wrong) < threshold:
        assert restored is None
    else:
        assert restored is not None and restored.secret == secret
        first = set(range(1, threshold + 1))
        assert restored.wrong == (wrong if wrong & first else set())


def test_one_wrong_share_of_many() -> None:
    secret = secrets.token_bytes(32)
    shares = split(secret, 20, range(1, 41), secrets.token_bytes)
    restored = restore({**shares, 3: bytes(SHARE_BYTES)}, 20, lambda x: x == secret)
    assert restored is not None and (restored.secret, restored.wrong) == (secret, {3})


def test_a_coordinator_leaves_out_a_site_with_a_forged_proof(tmp_path: Path) -> None:
    make_certificates(tmp_path / "own", [*NAMES, "coordinator"])
    make_certificates(tmp_path / "other", NAMES)

    def signer(folder: str, name: str) -> CertificateSigner:
        return CertificateSigner(read_certificates(tmp_path / folder / name))

    sites = {n: SiteSide(n, "s", VALUES[n], signer=signer("own", n)) for n in NAMES}
    for forged in (
        SiteSide("c", "s", VALUES["c"]),
        SiteSide("c", "s", VALUES["c"], signer=signer("other", "c")),
        SiteSide("c", "s", VALUES["c"], signer=signer("own", "a")),
        SiteSide("c", "t", VALUES["c"], signer=signer("own", "c")),  # of another sum
    ):
        coordinator = CoordinatorSide("s", NAMES, signer=signer("own", "coordinator"))
        for name, site in (sites | {"c": forged}).items():
            if name == "c":
                with pytest.raises(SecureSumError, match="keys of site 'c' are not signed"):
                    coordinator.receive(name, site.answer(None))
            else:
                assert coordinator.receive(name, site.answer(None))
        assert set(coordinator.advance()) == set(NAMES) - {"c"}

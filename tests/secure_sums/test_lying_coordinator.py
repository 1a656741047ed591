"""What a coordinator, or a site, that does not keep to the protocol can do."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from secure_sum_runs import NAMES, make_sites, random_values

from fedpax.secure_sums import CoordinatorSide, Message, SecureSumError, SiteSide
from fedpax.secure_sums.arithmetic import SHARE_BYTES, combine, public_key
from fedpax.secure_sums.asked import AskedStages
from fedpax.secure_sums.roster import commit, read_roster, to_bytes, to_text
from fedpax.transport.certificates import make_certificates, read_certificates
from fedpax.transport.signed_keys import CertificateSigner

VALUES = {name: random_values(i) for i, name in enumerate(NAMES)}


class Sum:
    """A sum of five sites before its last phase, with all messages that the coordinator has."""

    def __init__(self, sites: dict[str, SiteSide] | None = None, **options: Any) -> None:
        self.sites = sites or make_sites(VALUES)
        self.coordinator = CoordinatorSide("s", NAMES, **options)
        self.requests: list[dict[str, Message | None]] = [dict.fromkeys(NAMES)]
        for _ in range(3):
            for name in NAMES:
                self.coordinator.receive(name, self.answer(name, self.requests[-1][name]))
            self.requests.append(dict(self.coordinator.advance()))

    def answer(self, name: str, request: Message | None) -> Message:
        return self.sites[name].answer(request)

    @property
    def roster(self) -> Any:
        return read_roster(self.requests[1]["a"].header, "s")


def reveal(present: Any) -> Message:
    return Message({"phase": "reveal", "present": list(present)})


@pytest.fixture(scope="module")
def lies() -> list[tuple[str, ...]]:
    """All lists of at least three present sites that can be told to a site."""
    return [s for r in (3, 4, 5) for s in itertools.combinations(NAMES, r)]


@pytest.mark.parametrize("victim", ["a", "c"])
def test_lies_about_dropouts_tell_no_two_secrets_of_a_site(
    victim: str, lies: list[tuple[str, ...]]
) -> None:
    # The coordinator tells each site another list: all partitions of the sites into those that
    # hear that the victim is present, and those that hear that it has dropped out.
    others = [name for name in NAMES if name != victim]
    for messages in itertools.product([True, False], repeat=4):
        attack = Sum()
        own: dict[int, bytes] = {}
        keys: dict[int, bytes] = {}
        place = attack.roster.place
        for name, is_present in [(victim, True), *zip(others, messages, strict=True)]:
            list_ = [n for n in NAMES if n != victim or is_present]
            header = attack.answer(name, reveal(list_)).header
            if victim in header["own"]:
                own[place(name)] = to_bytes(header["own"][victim], SHARE_BYTES)
            if victim in header["keys"]:
                keys[place(name)] = to_bytes(header["keys"][victim], SHARE_BYTES)
            for lie in lies:  # a second question is of no use
                if list(lie) != list_:
                    with pytest.raises(SecureSumError):
                        attack.answer(name, reveal(lie))
        advertised = attack.roster.sites[victim]
        learned_own = commit(combine(own)) == advertised.commitment if own else False
        secret = combine(keys) if keys else b""
        learned_key = bool(secret) and public_key(secret) == advertised.mask
        assert learned_own == (len(own) >= 3) and learned_key == (len(keys) >= 3)
        assert not (learned_own and learned_key)


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ("bcde", "says that this site has dropped out"),
        ("ab", "2 sites are left in the sum 's', expected at least 3"),
        ("aab", "unknown ones"),
        ("abx", "unknown ones"),
        ([], "has dropped out"),
        ([1, 2, 3], "malformed"),
        ("abcdef", "unknown ones"),
    ],
)
def test_lists_that_are_refused(present: Any, words: str) -> None:
    with pytest.raises(SecureSumError, match=words):
        Sum().answer("a", reveal(present))


def test_phases_are_answered_once_and_in_order() -> None:
    attack = Sum()
    one, two = attack.sites["a"], make_sites(VALUES)["a"]
    mask = attack.requests[2]["a"]
    assert one.answer(mask) is one.answer(mask)  # the answer was lost
    fewer = {k: v for k, v in mask.header["shares"].items() if k != "e"}
    with pytest.raises(SecureSumError, match="asks twice for the phase 'mask' of the sum 's'"):
        one.answer(Message({"phase": "mask", "shares": fewer}))
    for request in (mask, reveal(NAMES)):
        with pytest.raises(SecureSumError, match="out of order"):
            two.answer(request)
    for phase in ("keys", "x", None, 3, ["mask"]):
        with pytest.raises(SecureSumError, match="the coordinator asks for"):
            two.answer(Message({"phase": phase}))


def change_roster(change: Callable[[dict[str, Any]], None]) -> Message:
    """Return the first request to site a, changed by the coordinator."""
    attack = Sum()
    header = {k: v for k, v in attack.requests[1]["a"].header.items() if k != "phase"}
    header["sites"] = {k: dict(v) for k, v in header["sites"].items()}
    keys = attack.answer("a", None).header["keys"]
    change(header)
    site = SiteSide("a", "s", VALUES["a"])
    if "a" in header["sites"] and header["sites"]["a"] == keys:
        header["sites"]["a"] = site.answer(None).header["keys"]
    return site.answer(Message({"phase": "share"} | header))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h.update(threshold=2), "threshold is 2 of 5 sites, expected more than half"),
        (lambda h: h.update(threshold=6), "threshold is 6"),
        (lambda h: h.update(threshold=True), "threshold is True"),
        (lambda h: h.update(threshold="3"), "malformed"),
        (lambda h: h.update(session="t"), "mixes the sums 't' and 's'"),
        (lambda h: h["sites"].pop("a"), "other keys of this site"),
        (lambda h: h["sites"].update(a=h["sites"]["b"]), "other keys of this site"),
        (lambda h: h["sites"]["b"].pop("mask"), "keys of a site are malformed"),
        (lambda h: h["sites"]["b"].update(mask="AAAA"), "base64 of 32 bytes"),
        (lambda h: h["sites"]["b"].update(cipher="A" * 43 + "="), "not one of X25519"),
        (lambda h: [h["sites"].pop(n) for n in "cde"] and h.update(threshold=2), "of 2 sites"),
    ],
)
def test_lists_of_sites_that_are_refused(change: Any, words: str) -> None:
    with pytest.raises(SecureSumError, match=words):
        change_roster(change)


def test_different_lists_of_sites_lead_nowhere() -> None:
    # With another list, a site has other keys: it can open no shares.
    sites = make_sites(VALUES)
    coordinator = CoordinatorSide("s", NAMES)
    for name in NAMES:
        coordinator.receive(name, sites[name].answer(None))
    requests = dict(coordinator.advance())
    other = dict(requests["a"].header)
    other["sites"] = {k: v for k, v in other["sites"].items() if k != "e"}
    requests["a"] = Message(other)
    for name in NAMES:
        coordinator.receive(name, sites[name].answer(requests[name]))
    requests = coordinator.advance()
    assert "a" not in requests["e"].header["shares"]
    for name in "abcd":
        shares = dict(requests[name].header["shares"])
        if name == "a":
            del shares["e"]
        with pytest.raises(SecureSumError, match="changed on their way"):
            sites[name].answer(Message({"phase": "mask", "shares": shares}))


@pytest.mark.parametrize("change", ["swapped", "damaged", "of itself", "of a stranger", "few"])
def test_shares_that_are_refused(change: str) -> None:
    attack, site = Sum(), make_sites(VALUES)["a"]
    sites = attack.sites | {"a": site}
    coordinator = CoordinatorSide("s", NAMES)
    for name in NAMES:
        sites[name] = sites[name] if name == "a" else make_sites(VALUES)[name]
        coordinator.receive(name, sites[name].answer(None))
    requests = coordinator.advance()
    for name in NAMES:
        coordinator.receive(name, sites[name].answer(requests[name]))
    shares = dict(coordinator.advance()["a"].header["shares"])
    words = "changed on their way"
    if change == "swapped":
        shares["b"], shares["c"] = shares["c"], shares["b"]
    elif change == "damaged":
        shares["b"] = ("B" if shares["b"][0] == "A" else "A") + shares["b"][1:]
    elif change == "few":
        shares, words = {"b": shares["b"]}, "2 sites are left"
    else:
        shares["a" if change == "of itself" else "x"], words = shares["b"], "unknown sites"
    with pytest.raises(SecureSumError, match=words):
        site.answer(Message({"phase": "mask", "shares": shares}))


@pytest.mark.parametrize("dropped", ["", "b", "e"])
def test_sites_that_were_asked_different_things_have_no_sum(dropped: str) -> None:
    """The sum is random, also if the coordinator opens the masks of a site that drops out."""
    zeros = {name: {"x": np.zeros(4, np.int32)} for name in NAMES}
    for of_a in (b"one", b"other"):
        sites = make_sites(zeros, asked=b"one")
        sites["a"].asked = of_a
        coordinator = CoordinatorSide("s", NAMES, asked=b"one")
        requests: dict[str, Message | None] = dict.fromkeys(NAMES)
        while not coordinator.done:
            if coordinator.phase == "mask":
                requests.pop(dropped, None)
            for name, request in requests.items():
                answer = sites[name].answer(request)
                if coordinator.phase == "mask":  # it does not mind
                    answer = Message({**answer.header, "asked": to_text(b"one")}, answer.arrays)
                coordinator.receive(name, answer)
            requests = dict(coordinator.advance())
        total = coordinator.total["x"].view(np.uint32)
        assert not total.any() if of_a == b"one" else total.max() > 2**20


def test_what_a_site_was_asked_in_earlier_stages_is_in_the_digest() -> None:
    shared, own = {"x": np.float32([1, 2]), "y": np.zeros((0, 3), np.int8)}, {"slots": [1]}

    def digest(*rounds: tuple[str, int, Any], **fields: Any) -> bytes:
        stages = AskedStages(frozenset(own))
        for token, stage, arrays in rounds:
            asked = stages.add(token, stage, {"stage": stage, **fields}, arrays)
        return asked

    first, second = ("t", 0, shared), ("t", 1, shared)
    known = digest(first, second)
    assert known == digest(first, second, **own) == digest(first, first, second, second)
    assert known == digest(("s", 0, {}), ("s", 1, {}), first, second)
    assert known == digest(("t", 0, {}), second, first, second)  # a stage that is asked again
    others = [
        digest(second),
        digest(("t", 0, {"x": np.float32([1, 3])}), second),
        digest(("t", 0, {**shared, "x": np.int32([1, 2])}), second),
        digest(("t", 0, {**shared, "x": np.float32([[1, 2]])}), second),
        digest(("t", 0, {"y": shared["x"], "x": shared["y"]}), second),
        digest(first, second, weights="equal"),
        digest(("s", 0, shared), ("s", 1, shared)),
        digest(first, ("t", 2, shared)),
    ]
    assert len({known, *others}) == 9
    scalar = digest(("t", 0, {"x": np.float32(1)}))
    assert scalar != digest(("t", 0, {"x": np.float32([1])}))


def test_a_coordinator_cannot_pose_as_a_site(tmp_path: Path) -> None:
    make_certificates(tmp_path / "own", [*NAMES, "spy"])
    make_certificates(tmp_path / "other", NAMES)

    def signer(folder: str, name: str) -> CertificateSigner:
        return CertificateSigner(read_certificates(tmp_path / folder / name))

    def answers(fake: SiteSide) -> None:
        sites = {n: SiteSide(n, "s", VALUES[n], signer=signer("own", n)) for n in NAMES}
        coordinator = CoordinatorSide("s", NAMES)
        for name, site in (sites | {"c": fake}).items():
            coordinator.receive(name, site.answer(None))
        requests = coordinator.advance()
        with pytest.raises(SecureSumError, match="the keys of site 'c' are not signed"):
            sites["a"].answer(requests["a"])

    answers(SiteSide("c", "s", VALUES["c"]))
    answers(SiteSide("c", "s", VALUES["c"], signer=signer("own", "spy")))
    answers(SiteSide("c", "s", VALUES["c"], signer=signer("other", "c")))
    answers(SiteSide("c", "t", VALUES["c"], signer=signer("own", "c")))  # of another sum


@pytest.mark.parametrize(
    ("name", "server"),
    [("syncer.example.org", "Syncer.Example.org"), ("192.0.2.7", "192.0.2.7"), ("::1", "0::1")],
)
def test_a_coordinator_cannot_count_as_a_site_by_its_own_certificate(
    tmp_path: Path, name: str, server: str
) -> None:
    make_certificates(tmp_path / "own", ["a", "b", name])

    def signer(site: str, **options: str) -> CertificateSigner:
        return CertificateSigner(read_certificates(tmp_path / "own" / site), **options)

    names = ["a", "b", name]
    sites = {n: SiteSide(n, "s", VALUES["a"], signer=signer(n, server=server)) for n in names}
    coordinator = CoordinatorSide("s", names)
    for site in names:
        coordinator.receive(site, sites[site].answer(None))
    requests = coordinator.advance()
    for site in names:  # also at a site that has this certificate by mistake
        with pytest.raises(
            SecureSumError, match=r"are of the coordinator's certificate.*--request"
        ):
            sites[site].answer(requests[site])
    proof = signer(name).sign(b"x")
    signer("a", server="localhost").check(name, b"x", proof)
    signer("a").check(name, b"x", proof)


# Sites that do not keep to the protocol.

MASK = {"phase": "mask", "asked": ""}


def with_keys(**changed: Any) -> Message:
    """The first answer of a site, with other keys."""
    header = SiteSide("a", "s", {}).answer(None).header
    return Message({**header, "keys": {**header["keys"], **changed}})


@pytest.mark.parametrize(
    ("phase", "message", "words"),
    [
        (0, Message({"phase": "keys"}), "keys of a site are malformed"),
        (0, with_keys(cipher=to_text(bytes(32))), "not one of X25519"),
        (0, with_keys(mask=to_text(bytes(32))), "not one of X25519"),
        (0, with_keys(proof={"text": "x" * 10_001}), "keys of a site are malformed"),
        (0, with_keys(proof={"list": [[]]}), "keys of a site are malformed"),
        (0, Message({"phase": "x"}), "sends the phase 'x'"),
        (1, Message({"phase": "share", "shares": {"x": "A"}}), "shares of a site are malformed"),
        (1, Message({"phase": "share", "shares": {"a": 1}}), "shares of a site are malformed"),
        (1, Message({"phase": "share", "shares": {"a": "A" * 1000}}), "malformed"),
        (2, Message(MASK, {"x": np.zeros(3, np.uint32)}), "other names, shapes"),
        (2, Message(MASK, {"x": np.zeros((3, 2))}), "other names, shapes or dtypes"),
        (2, Message(MASK), "other names, shapes or dtypes"),
        (2, Message({**MASK, "asked": to_text(b"x")}), "asked for other values"),
        (2, Message({"phase": "mask"}), "asked for other values"),
        (3, Message({"phase": "reveal", "own": {}, "keys": {}}), "other shares than it was asked"),
        (3, Message({"phase": "reveal", "own": [], "keys": {}}), "other shares than it was asked"),
        (3, Message({"phase": "reveal", "own": dict.fromkeys(NAMES, "A"), "keys": {}}), "base64"),
    ],
)
def test_malformed_answers_change_nothing(phase: int, message: Message, words: str) -> None:
    sites = make_sites(VALUES)
    shapes = {name: array.shape for name, array in VALUES["a"].items()}
    coordinator = CoordinatorSide("s", NAMES, shapes=shapes)
    requests: dict[str, Message | None] = dict.fromkeys(NAMES)
    for number in range(4):
        if number == phase:
            with pytest.raises(SecureSumError, match=words):
                coordinator.receive("a", message)
        for name in NAMES:
            assert coordinator.receive(name, sites[name].answer(requests[name]))
        requests = dict(coordinator.advance())
    total = sum(VALUES[name]["y"].astype(np.int64) for name in NAMES) & 0xFFFFFFFF
    assert coordinator.total["y"].view(np.uint32) == total

"""What a coordinator, or a site, that does not keep to the protocol can do."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from secure_sum_runs import NAMES, make_sites, random_values

from fedpax.secure_sums import CoordinatorSide, Message, SecureSumError, SiteSide
from fedpax.secure_sums.asked import AskedStages
from fedpax.secure_sums.roster import read_roster, to_text
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

    def confirmed(self, lists: dict[str, Any]) -> dict[str, dict[str, str]]:
        """Tell each site a list of present sites; return what each hears from the others."""
        sent = {n: self.answer(n, confirm(list_)).header["confirmed"] for n, list_ in lists.items()}
        return {
            site: {n: texts[site] for n, texts in sent.items() if site in texts and n in list_}
            for site, list_ in lists.items()
        }


def confirm(present: Any) -> Message:
    return Message({"phase": "confirm", "present": list(present)})


def reveal(confirmed: Any) -> Message:
    return Message({"phase": "reveal", "confirmed": confirmed})


@pytest.fixture(scope="module")
def lies() -> list[tuple[str, ...]]:
    """All lists of at least three present sites that can be told to a site."""
    return [s for r in (3, 4, 5) for s in itertools.combinations(NAMES, r)]


def check_reveals_nothing(site: SiteSide, heard: dict[str, str], threshold: int) -> None:
    """Check that a site raises, or accuses those whose codes are of another list."""
    try:
        answer = site.answer(reveal(heard))
    except SecureSumError as error:
        assert f"expected at least {threshold}: the coordinator could tell" in str(error)
    else:
        assert answer.header.keys() == {"phase", "accused"} and not answer.arrays
        assert set(answer.header["accused"]) <= heard.keys()


@pytest.mark.parametrize("victim", ["a", "c"])
def test_sites_open_no_two_lists_of_present_sites(victim: str, lies: list[tuple[str, ...]]) -> None:
    # The coordinator tells each site another list: all partitions of the sites into those that
    # hear that the victim is present, and those that hear that it has dropped out.
    others = [name for name in NAMES if name != victim]
    for messages in itertools.product([True, False], repeat=4):
        attack = Sum()
        lists = {victim: list(NAMES)}
        for name, is_present in zip(others, messages, strict=True):
            lists[name] = list(NAMES) if is_present else others
        heard = attack.confirmed(lists)
        opened = set()
        for name, list_ in lists.items():
            for lie in lies:  # a second question is of no use
                if list(lie) != list_:
                    with pytest.raises(SecureSumError, match="asks twice"):
                        attack.answer(name, confirm(lie))
            if sum(other == list_ for other in lists.values()) >= 3:
                header = attack.answer(name, reveal(heard[name])).header
                assert set(header["own"]) == set(list_)
                opened.add(tuple(list_))
            else:
                check_reveals_nothing(attack.sites[name], heard[name], 3)
        assert len(opened) == 1


@pytest.mark.parametrize("count", [5, 7, 9])
def test_the_peers_of_one_site_are_not_said_to_be_missing(count: int) -> None:
    # The victim masks with as few sites as may be. Of these, each other site is told that they
    # have dropped out: with their keys, the coordinator would know all masks of the victim.
    names = [f"site {i}" for i in range(count)]
    victim, threshold = names[0], count // 2 + 1
    peers = names[1:threshold]
    sites = make_sites({name: VALUES["a"] for name in names})
    coordinator = CoordinatorSide("s", names)
    requests: dict[str, Message | None] = dict.fromkeys(names)
    for _ in range(2):
        for name in names:
            coordinator.receive(name, sites[name].answer(requests[name]))
        requests = dict(coordinator.advance())
    for name in names:
        shares = requests[name].header["shares"]
        shares = {n: x for n, x in shares.items() if name != victim or n in peers}
        sites[name].answer(Message({"phase": "mask", "shares": shares}))
    lists = {
        name: [n for n in names if n == name or n not in peers] for name in names if name != victim
    }
    sent = {n: sites[n].answer(confirm(list_)).header["confirmed"] for n, list_ in lists.items()}
    for name, list_ in lists.items():
        heard = {n: texts[name] for n, texts in sent.items() if name in texts and n in list_}
        check_reveals_nothing(sites[name], heard, threshold)


@pytest.mark.parametrize("change", ["of another list", "of another sum", "damaged", "unknown"])
def test_confirmations_that_do_not_count(change: str) -> None:
    attack = Sum()
    lists = dict.fromkeys(NAMES, NAMES)
    if change == "of another list":
        lists |= dict.fromkeys("bcd", "abcd")
    heard = attack.confirmed(lists)["a"]
    if change == "of another sum":
        heard = Sum().confirmed(lists)["a"] | {"e": heard["e"]}
    elif change == "damaged":
        flipped = {n: ("B" if x[0] == "A" else "A") + x[1:] for n, x in heard.items() if n != "e"}
        heard = heard | flipped
    elif change == "unknown":
        heard = heard | {"x": heard["b"]}
        with pytest.raises(SecureSumError, match="confirmations of unknown sites"):
            attack.answer("a", reveal(heard))
        return
    answer = attack.answer("a", reveal(heard))
    assert answer.header == {"phase": "reveal", "accused": ["b", "c", "d"]}


def test_too_few_confirmations_reveal_nothing() -> None:
    attack = Sum()
    heard = attack.confirmed(dict.fromkeys(NAMES, NAMES))["a"]
    with pytest.raises(SecureSumError, match="2 sites have confirmed the list of present sites"):
        attack.answer("a", reveal({"b": heard["b"]}))


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
        Sum().answer("a", confirm(present))


def test_phases_are_answered_once_and_in_order() -> None:
    attack = Sum()
    one, two = attack.sites["a"], make_sites(VALUES)["a"]
    mask = attack.requests[2]["a"]
    assert one.answer(mask) is one.answer(mask)  # the answer was lost
    fewer = {k: v for k, v in mask.header["shares"].items() if k != "e"}
    with pytest.raises(SecureSumError, match="asks twice for the phase 'mask' of the sum 's'"):
        one.answer(Message({"phase": "mask", "shares": fewer}))
    for request in (mask, confirm(NAMES), reveal({})):
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
    sent = {name: sites[name].answer(requests[name]).header["shares"] for name in NAMES}
    assert "e" not in sent["a"]
    for name in "abcd":
        shares = {n: texts[name] for n, texts in sent.items() if n != name}
        if name == "a":
            del shares["e"]
        answer = sites[name].answer(Message({"phase": "mask", "shares": shares}))
        assert answer.header["accused"] == (["b", "c", "d"] if name == "a" else ["a"])
        assert not any(x.any() for x in answer.arrays.values())


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
    words = ""
    if change == "swapped":
        shares["b"], shares["c"] = shares["c"], shares["b"]
    elif change == "damaged":
        shares["b"] = ("B" if shares["b"][0] == "A" else "A") + shares["b"][1:]
    elif change == "few":
        shares, words = {"b": shares["b"]}, "2 sites are left"
    else:
        shares["a" if change == "of itself" else "x"], words = shares["b"], "unknown sites"
    request = Message({"phase": "mask", "shares": shares})
    if not words:
        answer = site.answer(request)
        assert answer.header["accused"] == (["b", "c"] if change == "swapped" else ["b"])
        assert not any(x.any() for x in answer.arrays.values())
        return
    with pytest.raises(SecureSumError, match=words):
        site.answer(request)


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
        (1, Message({"phase": "share", "shares": {"x": "A"}}), "shares to other sites"),
        (1, Message({"phase": "share", "shares": dict.fromkeys("bcd", "A")}), "to other sites"),
        (1, Message({"phase": "share", "shares": dict.fromkeys("bcde", 1)}), "base64 of 82 bytes"),
        (1, Message({"phase": "share", "shares": dict.fromkeys("bcde", "AAAA")}), "of 82 bytes"),
        (2, Message({"phase": "mask", "accused": ["x"]}), "accuses unknown sites"),
        (2, Message({"phase": "mask", "accused": ["a"]}), "accuses unknown sites"),
        (2, Message({"phase": "mask", "accused": "b"}), "accuses unknown sites"),
        (2, Message(MASK, {"x": np.zeros(3, np.uint32)}), "other names, shapes"),
        (2, Message(MASK, {"x": np.zeros((3, 2))}), "other names, shapes or dtypes"),
        (2, Message(MASK), "other names, shapes or dtypes"),
        (2, Message({**MASK, "asked": to_text(b"x")}), "asked for other values"),
        (2, Message({"phase": "mask"}), "asked for other values"),
        (3, Message({"phase": "confirm", "confirmed": {}}), "confirms to other sites"),
        (3, Message({"phase": "confirm", "confirmed": dict.fromkeys("bcde", "A")}), "of 16 bytes"),
        (4, Message({"phase": "reveal", "accused": ["x"]}), "accuses unknown sites"),
        (4, Message({"phase": "reveal", "own": {}, "keys": {}}), "other shares than it was asked"),
        (4, Message({"phase": "reveal", "own": [], "keys": {}}), "other shares than it was asked"),
        (4, Message({"phase": "reveal", "own": dict.fromkeys(NAMES, "A"), "keys": {}}), "base64"),
    ],
)
def test_malformed_answers_change_nothing(phase: int, message: Message, words: str) -> None:
    sites = make_sites(VALUES)
    shapes = {name: array.shape for name, array in VALUES["a"].items()}
    coordinator = CoordinatorSide("s", NAMES, shapes=shapes)
    requests: dict[str, Message | None] = dict.fromkeys(NAMES)
    for number in range(5):
        if number == phase:
            with pytest.raises(SecureSumError, match=words):
                coordinator.receive("a", message)
        for name in NAMES:
            assert coordinator.receive(name, sites[name].answer(requests[name]))
        requests = dict(coordinator.advance())
    total = sum(VALUES[name]["y"].astype(np.int64) for name in NAMES) & 0xFFFFFFFF
    assert coordinator.total["y"].view(np.uint32) == total

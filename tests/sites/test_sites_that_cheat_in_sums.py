"""A site that forges proofs or shares in secure sums: others train on, and it is named."""

from pathlib import Path
from typing import Any

import pytest

from fedpax.secure_sums import Message, SiteSide
from fedpax.secure_sums.arithmetic import SEALED_BYTES, SHARE_BYTES, TAG_BYTES
from fedpax.secure_sums.roster import to_text
from fedpax.sites.coordinator_rounds import FailedRoundError
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.site_table import read_sites
from fedpax.transport.admission import Admission, SiteLimits
from fedpax.transport.certificates import make_certificates, read_certificates
from fedpax.transport.signed_keys import CertificateSigner
from sites.federation import run
from sites.small_experiment import assert_made_by, small

NAMES = "abcd"
RULES = RoundRules(3, 60.0, secure_sums=True)


def test_a_site_that_forges_proofs_is_left_out_and_expelled(
    tmp_path: Path, notes: list[str]
) -> None:
    rounds = 3
    make_certificates(tmp_path / "own", ["coordinator", *NAMES])
    make_certificates(tmp_path / "other", [*NAMES])

    def signer(folder: str, name: str) -> CertificateSigner:
        return CertificateSigner(read_certificates(tmp_path / folder / name))

    signers = {name: signer("own", name) for name in ("coordinator", *NAMES)}
    signers["d"] = signer("other", "d")
    sites = {name: small(rounds=rounds, data_seed=i) for i, name in enumerate(NAMES)}
    admission = Admission(tmp_path, SiteLimits(mute_after=1, expel_after=2))
    outcome = run(
        small(rounds=rounds),
        sites,
        tmp_path,
        rules=RULES,
        first_round_needs=4,
        signers=signers,
        on_fault=admission.report,
    )
    rows = {site.name: (site.rounds, site.dropped) for site in read_sites(tmp_path / "coordinator")}
    assert rows == {"a": (3, 0), "b": (3, 0), "c": (3, 0), "d": (0, 3)}
    assert_made_by(outcome.params, sites, rounds, "abc")
    messages = [text for text in notes if text.startswith("site d does not keep to the protocol")]
    assert len(messages) == 3 and "the keys of site 'd' are not signed" in messages[0]
    assert admission.is_expelled("d") and not any(map(admission.is_expelled, "abc"))


def test_false_shares_of_one_site_stop_no_round(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = SiteSide.answer

    def lie(side: SiteSide, request: Any) -> Message:
        honest = answer(side, request)
        if side.name == "b" and request is not None and request.header["phase"] == "reveal":
            shares = dict.fromkeys(honest.header["own"], "A" * (SHARE_BYTES * 4 // 3))
            return Message({**honest.header, "own": shares})
        return honest

    monkeypatch.setattr(SiteSide, "answer", lie)
    faults: list[tuple[str, str]] = []
    sites = {name: small(rounds=2, data_seed=i) for i, name in enumerate(NAMES)}
    outcome = run(
        small(rounds=2),
        sites,
        tmp_path,
        rules=RULES,
        first_round_needs=4,
        on_fault=lambda *fault: faults.append(fault),
    )
    assert_made_by(outcome.params, sites, 2, NAMES)
    assert [name for name, _ in faults] == ["b", "b"]
    assert any(text.startswith("site b does not keep to the protocol: 4 shares") for text in notes)


def test_a_site_with_the_certificate_of_the_coordinator_is_in_no_sum(
    tmp_path: Path, notes: list[str]
) -> None:
    make_certificates(tmp_path / "own", ["syncer", *NAMES[:3]])

    def signer(name: str) -> CertificateSigner:
        return CertificateSigner(read_certificates(tmp_path / "own" / name), "syncer")

    sites = {name: small(rounds=2, data_seed=i) for i, name in enumerate([*NAMES[:3], "syncer"])}
    signers = {**{name: signer(name) for name in sites}, "coordinator": signer("syncer")}
    outcome = run(
        small(rounds=2), sites, tmp_path, rules=RULES, first_round_needs=4, signers=signers
    )
    assert_made_by(outcome.params, sites, 2, NAMES[:3])
    named = [text for text in notes if text.startswith("site syncer does not keep to the")]
    assert len(named) == 2 and "are of the coordinator's certificate, expected" in named[0]


def test_shares_that_do_not_open_name_their_sender_alone(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With certificates, its further messages are not handled, and the others train on.
    answer = SiteSide.answer

    def lie(side: SiteSide, request: Any) -> Message:
        honest = answer(side, request)
        if side.name == "d" and honest.header["phase"] == "share":
            false = dict.fromkeys(honest.header["shares"], to_text(bytes(SEALED_BYTES)))
            return Message({**honest.header, "shares": false})
        return honest

    monkeypatch.setattr(SiteSide, "answer", lie)
    faults: list[tuple[str, str]] = []
    sites = {name: small(rounds=2, data_seed=i) for i, name in enumerate(NAMES)}
    with pytest.raises(FailedRoundError, match="d: 3 shares that it has sent"):
        run(
            small(rounds=2),
            sites,
            tmp_path,
            rules=RULES,
            first_round_needs=4,
            on_fault=lambda *fault: faults.append(fault),
        )
    assert {name for name, _ in faults} == {"d"} and len(faults) == 5
    assert any(text.startswith("site d does not keep to the protocol: 3 shares") for text in notes)


@pytest.mark.parametrize("phase", ["share", "confirm"])
def test_what_one_site_cannot_open_is_told(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    answer, key = SiteSide.answer, {"share": "shares", "confirm": "confirmed"}[phase]
    size = {"share": SEALED_BYTES, "confirm": TAG_BYTES}[phase]

    def lie(side: SiteSide, request: Any) -> Message:
        honest = answer(side, request)
        if side.name == "d" and honest.header["phase"] == phase:
            texts = {**honest.header[key], "a": to_text(bytes(size))}
            return Message({**honest.header, key: texts})
        return honest

    monkeypatch.setattr(SiteSide, "answer", lie)
    sites = {name: small(rounds=1, data_seed=i) for i, name in enumerate(NAMES)}
    rules = RULES._replace(secure_threshold=4 if phase == "confirm" else None)
    told = "the reply of a is not counted: it cannot open what d sent"
    if phase == "confirm":  # with all others, three sites are fewer than the threshold
        with pytest.raises(FailedRoundError, match=r"counts \(a: it cannot open what d sent\)"):
            run(small(rounds=1), sites, tmp_path, rules=rules, first_round_needs=4)
        return
    outcome = run(small(rounds=1), sites, tmp_path, rules=rules, first_round_needs=4)
    assert_made_by(outcome.params, sites, 1, "bcd")
    assert [text for text in notes if told in text]

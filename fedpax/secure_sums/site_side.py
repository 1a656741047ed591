"""A site in a secure sum."""

import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from fedpax.secure_sums.arithmetic import (
    SEALED_BYTES,
    SECRET_BYTES,
    SHARE_BYTES,
    TAG_BYTES,
    Codes,
    SecureSumError,
    add_mask,
    agree,
    derive,
    public_key,
    seal,
    split,
    unseal,
)
from fedpax.secure_sums.message import Message
from fedpax.secure_sums.roster import (
    PROTOCOL,
    PublicKeys,
    Roster,
    Signer,
    commit,
    own_mask_key,
    pair_purpose,
    present_context,
    read_roster,
    sealing_purpose,
    to_bytes,
    to_text,
)

_PHASES = ("share", "mask", "confirm", "reveal")


class SiteSide:
    """One site's part in one secure sum: a state machine, which answers the coordinator's requests.

    The site trusts the coordinator with nothing but the sum. It answers one request of each phase,
    which may be repeated. Any other one raises: it could tell the coordinator two secrets of one
    site.

    Args:
        name: the site's name.
        session: the name of the sum, which no other sum has.
        values: arrays of int32 or uint32 by name, of the same names and shapes at all sites; or a
            function that returns them.
        asked: the hash of what this site was asked, which can be set before the phase `mask`: masks
            of sites that were asked other things do not cancel, and the sum is random.
        least_sites: number of sites whose values the sum must contain, at least 2. Default 3: of a
            sum of two, each of the sites learns the other's value.
        signer: signs the site's keys, and checks the keys of other sites. Default None: the site
            believes the coordinator which keys belong to which site.
        random: returns a number of random bytes.

    Example:
        >>> from fedpax.secure_sums import CoordinatorSide
        >>> values = {"a": [2, 0], "b": [2, 1], "c": [2, 2]}
        >>> sites = {n: SiteSide(n, "round 1", {"x": np.int32(x)}) for n, x in values.items()}
        >>> coordinator = CoordinatorSide("round 1", list(sites))
        >>> requests = {name: None for name in sites}
        >>> while not coordinator.done:
        ...     for name, request in requests.items():
        ...         _ = coordinator.receive(name, sites[name].answer(request))
        ...     requests = coordinator.advance()
        >>> coordinator.total["x"].tolist()
        [6, 3]

    Reference:
        Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning,
        CCS 2017, IACR ePrint 2017/281, section 4, figure 4. Sites confirm the list of present
        sites to each other under the keys of their shares, in place of signatures.
    """

    def __init__(
        self,
        name: str,
        session: str,
        values: Mapping[str, np.ndarray] | Callable[[], Mapping[str, np.ndarray]],
        *,
        asked: bytes = b"",
        least_sites: int = 3,
        signer: Signer | None = None,
        random: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.name, self.session, self.asked = name, session, asked
        self._values, self._least, self._signer = values, max(least_sites, 2), signer
        self._random = random
        self._cipher_key, self._mask_key, self._own = (random(SECRET_BYTES) for _ in range(3))
        self._answers: dict[str, tuple[Any, Message]] = {}
        self._roster: Roster | None = None
        self._digest = b""  # of the roster
        self._secrets: dict[str, bytes] = {}  # of the keys of each pair
        self._keys = self._advertise()
        # By sender: its shares of the secret of its own mask, and of its key of pairs' masks.
        self._shares: dict[str, tuple[bytes, bytes]] = {}
        self._present: list[str] = []

    @property
    def sites(self) -> Collection[str]:
        """The sites whose keys this site has, and later those of whom it has confirmed values."""
        return self._present or (() if self._roster is None else self._roster.sites)

    def answer(self, request: Message | None) -> Message:
        """Answer a request of the coordinator; None: begin."""
        if request is None:
            return Message({"phase": "keys", "keys": self._keys.to_json()})
        content = dict(request.header)
        phase = content.get("phase")
        if phase not in _PHASES:
            raise SecureSumError(f"the coordinator asks for {str(phase)[:100]!r}")
        if known := self._answers.get(phase):
            if known[0] != content:
                raise SecureSumError(
                    f"the coordinator asks twice for the phase {phase!r} of the sum "
                    f"{self.session!r}, and differently: it could learn this site's values"
                )
            return known[1]
        if len(self._answers) != _PHASES.index(phase):
            raise SecureSumError(f"the coordinator asks for the phase {phase!r} out of order")
        answer = getattr(self, f"_{phase}")(content)
        self._answers[phase] = content, answer
        return answer

    # The phases, in their order.

    def _advertise(self) -> PublicKeys:
        keys = PublicKeys(
            public_key(self._cipher_key), public_key(self._mask_key), commit(self._own), {}
        )
        if self._signer is None:
            return keys
        return keys._replace(proof=self._signer.sign(keys.signed_content(self.session, self.name)))

    def _share(self, content: dict[str, Any]) -> Message:
        roster = read_roster(content, self.session)
        if roster.sites.get(self.name) != self._keys:
            raise SecureSumError("the coordinator's list has other keys of this site")
        if len(roster.sites) < self._least:
            raise SecureSumError(
                f"the sum is of {len(roster.sites)} sites, expected at least {self._least}: it "
                "would tell too much about each of them"
            )
        if self._signer is not None:
            for site, keys in roster.sites.items():
                self._signer.check(site, keys.signed_content(self.session, site), keys.proof)
        self._roster, self._digest = roster, roster.digest()
        places = {site: roster.place(site) for site in roster.sites}
        own = split(self._own, roster.threshold, list(places.values()), self._random)
        key = split(self._mask_key, roster.threshold, list(places.values()), self._random)
        self._shares[self.name] = own[places[self.name]], key[places[self.name]]
        shares = {
            site: self._seal("share", site, own[place] + key[place], self._digest)
            for site, place in places.items()
            if site != self.name
        }
        return Message({"phase": "share", "shares": shares})

    def _mask(self, content: dict[str, Any]) -> Message:
        roster = self._known_roster()
        shares, digest = content.get("shares"), self._digest
        if not isinstance(shares, dict) or not set(shares) <= set(roster.sites) - {self.name}:
            raise SecureSumError("the coordinator sends shares of unknown sites")
        self._check_count(1 + len(shares))
        sealed = {site: to_bytes(text, SEALED_BYTES) for site, text in shares.items()}
        opened = {site: self._unseal("share", site, x, digest) for site, x in sealed.items()}
        values = self._values() if callable(self._values) else self._values
        masked = {name: _to_words(name, array) for name, array in values.items()}
        # Whoever changed a sender's shares, this site cannot help to open what the sender masks.
        if accused := sorted(site for site, both in opened.items() if both is None):
            zeros = {name: np.zeros_like(words) for name, words in masked.items()}
            return Message({"phase": "mask", "accused": accused}, zeros)
        for site, both in opened.items():
            assert both is not None
            self._shares[site] = both[:SHARE_BYTES], both[SHARE_BYTES:]
        add_mask(masked, own_mask_key(self._own, digest), +1)
        for site in shares:
            purpose = pair_purpose(digest, self.asked, self.name, site)
            key = agree(self._mask_key, roster.sites[site].mask, purpose)
            add_mask(masked, key, +1 if self.name < site else -1)
        return Message({"phase": "mask", "asked": to_text(self.asked)}, masked)

    def _confirm(self, content: dict[str, Any]) -> Message:
        present = content.get("present")
        if not isinstance(present, list) or not all(isinstance(site, str) for site in present):
            raise SecureSumError("the coordinator's list of present sites is malformed")
        if len(set(present)) != len(present) or not set(present) <= set(self._shares):
            raise SecureSumError("the coordinator's list of present sites has unknown ones")
        if self.name not in present:
            raise SecureSumError("the coordinator says that this site has dropped out")
        self._check_count(len(present))
        self._present = sorted(present)
        context = present_context(self._present)
        others = [site for site in self._present if site != self.name]
        confirmed = {site: self._seal("confirm", site, b"", context) for site in others}
        return Message({"phase": "confirm", "confirmed": confirmed})

    def _reveal(self, content: dict[str, Any]) -> Message:
        confirmed = content.get("confirmed")
        if not isinstance(confirmed, dict) or not set(confirmed) <= {*self._present} - {self.name}:
            raise SecureSumError("the coordinator sends confirmations of unknown sites")
        context = present_context(self._present)
        false = [
            site
            for site, text in confirmed.items()
            if self._unseal("confirm", site, to_bytes(text, TAG_BYTES), context) is None
        ]
        agreeing = 1 + len(confirmed) - len(false)
        # Two lists cannot both have as many: else, told that other sites have dropped out, sites
        # would reveal the keys of all masks of one of them.
        if agreeing < self._known_roster().threshold:
            if false:
                return Message({"phase": "reveal", "accused": sorted(false)})
            raise SecureSumError(
                f"{agreeing} sites have confirmed the list of present sites, expected at "
                f"least {self._known_roster().threshold}: the coordinator could tell each site "
                "another list, and learn the values of one site"
            )
        # Of each site one secret alone: of its own mask, or of its masks with others.
        own = {site: to_text(self._shares[site][0]) for site in self._present}
        missing = set(self._shares) - set(self._present)
        keys = {site: to_text(self._shares[site][1]) for site in missing}
        return Message({"phase": "reveal", "own": own, "keys": keys})

    # What sites tell each other through the coordinator.

    def _seal(self, purpose: str, receiver: str, content: bytes, context: bytes) -> str:
        return to_text(seal(self._key(purpose, self.name, receiver), content, context))

    def _unseal(self, purpose: str, sender: str, sealed: bytes, context: bytes) -> bytes | None:
        return unseal(self._key(purpose, sender, self.name), sealed, context)

    def _key(self, purpose: str, sender: str, receiver: str) -> bytes:
        other = receiver if sender == self.name else sender
        if other not in self._secrets:  # an agreement takes longer than its keys
            cipher = self._known_roster().sites[other].cipher
            self._secrets[other] = agree(self._cipher_key, cipher, PROTOCOL + b"cipher")
        named = sealing_purpose(purpose, self._digest, sender, receiver)
        return derive(self._secrets[other], named)

    def _known_roster(self) -> Roster:
        assert self._roster is not None
        return self._roster

    def _check_count(self, count: int) -> None:
        needed = max(self._known_roster().threshold, self._least)
        if count < needed:
            raise SecureSumError(
                f"{count} sites are left in the sum {self.session!r}, expected at least {needed}. "
                "Repeat the sum with the sites that answer"
            )


class SiteSums:
    """A site's part in one secure sum after another, each with secrets of its own."""

    def __init__(self, least_sites: int, signer: Signer | None = None) -> None:
        self._least, self._signer = least_sites, signer
        self._side: SiteSide | None = None
        self._begun: set[str] = set()  # the sessions of all sums
        self._values: Codes = {}

    @property
    def sites(self) -> Collection[str]:
        """The sites of the sum, once this site has their keys."""
        return () if self._side is None else self._side.sites

    def knows(self, name: str, session: str) -> bool:
        """Return whether a sum began in this process, as this site."""
        return self._side is not None and (self._side.name, self._side.session) == (name, session)

    def answer(
        self,
        name: str,
        session: str,
        request: Mapping[str, Any] | None,
        encode: Callable[[], Codes] | None = None,
        asked: bytes = b"",
    ) -> Message:
        """Answer a request of the coordinator; `encode` makes the values that are `asked` for."""
        if request is None and (self._side is None or session != self._side.session):
            if session in self._begun:
                raise SecureSumError("the coordinator gives two sums one name")
            self._begun.add(session)
            self._values = {}  # the values of an earlier sum are not sent again
            self._side = SiteSide(
                name,
                session,
                lambda: self._values,
                least_sites=self._least,
                signer=self._signer,
            )
        if self._side is None or not self.knows(name, session):
            raise UnknownSumError("this process began after the sum")
        if encode is not None:
            self._values, self._side.asked = encode(), asked
        return self._side.answer(None if request is None else Message(request))


class UnknownSumError(SecureSumError):
    """A request of a sum whose secrets this process, or this site, does not have."""


def _to_words(name: str, array: np.ndarray) -> np.ndarray:
    """Copy integers as words modulo 2^32."""
    array = np.asarray(array)
    if array.dtype not in (np.int32, np.uint32):
        raise SecureSumError(f"values[{name!r}] has dtype {array.dtype}, expected int32 or uint32")
    return np.array(array, order="C").view(np.uint32)

"""The coordinator of a secure sum, which learns the sum alone."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from fedpax.secure_sums.arithmetic import (
    KEY_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    TAG_BYTES,
    SecureSumError,
    add_mask,
    agree,
    public_key,
    restore,
)
from fedpax.secure_sums.message import Message
from fedpax.secure_sums.roster import (
    MAX_SITES,
    PublicKeys,
    Roster,
    Signer,
    commit,
    own_mask_key,
    pair_purpose,
    to_bytes,
    to_text,
)

PHASES = ("keys", "share", "mask", "confirm", "reveal")
_ANY_KEY = bytes(range(KEY_BYTES))


class CoordinatorSide:
    """The coordinator's part in one secure sum: a state machine.

    In each of the five phases it receives messages of sites, until `waiting` is empty or it waits
    no longer. `advance` then ends the phase, and returns the request for each site that is left.
    Sites may drop out in any phase as long as `threshold` are left; late values are of no use to
    the coordinator.

    Args:
        session: the name of the sum, which no other sum has.
        sites: the sites that are asked.
        threshold: number of sites that have to stay until the end; more than half of those with
            keys. If c sites tell the coordinator all they know, values stay secret while
            `2 threshold > n + c`. Default None: one more than half of the sites in the first phase.
        shapes: the shapes of the values by name. Default None: the first site's shapes.
        asked: the hash of what the sites are asked. Values of a site that was asked something else
            raise.
        signer: checks the signatures of the sites' keys. Default None: the other sites alone check
            them, and leave a sum with a forged one.

    Attributes:
        total: after the last phase, the sums modulo 2^32 of the present sites, int32 by name.
        present: the sites in the sum.
        phase: the current phase; "done" after the last one.
        suspects: sites that do not keep to the protocol, with reasons, although the sum may be
            complete: several shares that a suspect has sent or made do not fit.
    """

    def __init__(
        self,
        session: str,
        sites: Collection[str],
        *,
        threshold: int | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        asked: bytes = b"",
        signer: Signer | None = None,
    ) -> None:
        if not 2 <= len(sites) <= MAX_SITES:
            raise SecureSumError(f"a secure sum is of 2 to {MAX_SITES} sites, not of {len(sites)}")
        self.session, self.phase = session, PHASES[0]
        self.total: dict[str, np.ndarray] = {}
        self.present: tuple[str, ...] = ()
        self.suspects: dict[str, str] = {}
        self._signer, self._task = signer, asked
        self._misfits = set[tuple[str, str]]()  # who sent and who made each wrong share
        self._threshold = threshold
        self._asked = set(sites)
        self._received: dict[str, Any] = {}
        self._shared: set[str] = set()  # the sites with shares at all others that are left
        self._roster = Roster(session, 0, {})
        zeros = {name: np.zeros(shape, np.uint32) for name, shape in (shapes or {}).items()}
        self._sum: dict[str, np.ndarray] = zeros

    @property
    def done(self) -> bool:
        """Return whether `total` is the sum."""
        return self.phase == "done"

    @property
    def waiting(self) -> set[str]:
        """Return the sites that have not answered in this phase."""
        return self._asked - set(self._received)

    def receive(self, site: str, message: Message) -> bool:
        """Receive the answer of a site; False if it is too late, or has come before."""
        # A malformed answer raises, and changes nothing: the site can be treated as dropped out.
        phase = message.header.get("phase")
        if phase not in PHASES:
            raise SecureSumError(f"a site sends the phase {str(phase)[:100]!r}")
        if phase != self.phase or site not in self.waiting:
            return False
        answer = self._STEPS[phase][0](self, site, message)
        if phase == PHASES[0] and self._signer is not None:
            self._signer.check(site, answer.signed_content(self.session, site), answer.proof)
        self._received[site] = answer
        return True

    def advance(self) -> dict[str, Message]:
        """End the phase, and return the request for each site that is left; {} at the end."""
        self._received = {site: x for site, x in self._received.items() if x is not None}
        left = set(self._received)
        if self.phase == "keys":
            least = len(left) // 2 + 1
            self._threshold = least if self._threshold is None else self._threshold
            if not len(left) // 2 < self._threshold <= len(left):
                raise SecureSumError(
                    f"threshold={self._threshold} of {len(left)} sites, expected at least {least} "
                    "and at most all of them"
                )
        elif len(left) < self._roster.threshold:
            missing = ", ".join(sorted(self.waiting))
            raise SecureSumError(
                f"{len(left)} sites are left in the phase {self.phase!r} of the sum "
                f"{self.session!r}, expected at least {self._roster.threshold}. Missing: "
                f"{missing[:300]}. Repeat the sum with the sites that answer"
            )
        requests = self._STEPS[self.phase][1](self)
        self.phase = (*PHASES, "done")[PHASES.index(self.phase) + 1]
        self._asked, self._received = left, {}
        return requests

    # The phases, in their order.

    def _receive_keys(self, site: str, message: Message) -> PublicKeys:
        del site
        keys = PublicKeys.from_json(message.header.get("keys"))
        for key in (keys.cipher, keys.mask):
            agree(_ANY_KEY, key, b"")  # raises for a key with which no site could go on
        return keys

    def _end_keys(self) -> dict[str, Message]:
        assert self._threshold is not None
        self._roster = Roster(self.session, self._threshold, dict(self._received))
        return dict.fromkeys(self._received, Message({"phase": "share"} | self._roster.to_json()))

    def _receive_share(self, site: str, message: Message) -> dict[str, str]:
        shares = message.header.get("shares")
        if not isinstance(shares, dict) or shares.keys() != self._roster.sites.keys() - {site}:
            raise SecureSumError("a site sends shares to other sites than it was asked for")
        for text in shares.values():
            to_bytes(text, SEALED_BYTES)
        return shares

    def _end_share(self) -> dict[str, Message]:
        self._shared = set(self._received)
        return {
            site: Message({"phase": "mask", "shares": of_site})
            for site, of_site in _by_receiver(self._received).items()
        }

    def _receive_accusation(self, site: str, message: Message) -> None:
        """Note which other sites sent a site what it cannot open; it leaves the sum."""
        accused = message.header["accused"]
        if not isinstance(accused, list) or not {*map(str, accused)} <= self._shared - {site}:
            raise SecureSumError("a site accuses unknown sites")
        self._misfits |= {(site, sender) for sender in accused}
        self._find_suspects()

    def _receive_mask(self, site: str, message: Message) -> bool | None:
        arrays = message.arrays
        if "accused" in message.header:
            self._receive_accusation(site, message)
            return None
        if message.header.get("asked") != to_text(self._task):
            raise SecureSumError(
                "a site was asked for other values than the coordinator asks for: its model or its "
                "inputs have other bytes. Install the same commit of fedpax on both sides"
            )
        known = self._sum or {n: np.zeros(a.shape, np.uint32) for n, a in arrays.items()}
        if {n: (a.shape, np.dtype(np.uint32)) for n, a in known.items()} != {
            n: (a.shape, a.dtype) for n, a in arrays.items()
        }:
            raise SecureSumError("the values of a site have other names, shapes or dtypes")
        for name, array in arrays.items():
            known[name] += array
        self._sum = known
        return True

    def _end_mask(self) -> dict[str, Message]:
        self.present = tuple(sorted(self._received))
        request = Message({"phase": "confirm", "present": list(self.present)})
        return dict.fromkeys(self._received, request)

    def _receive_confirm(self, site: str, message: Message) -> dict[str, str]:
        confirmed = message.header.get("confirmed")
        if not isinstance(confirmed, dict) or confirmed.keys() != {*self.present} - {site}:
            raise SecureSumError("a site confirms to other sites than it was asked for")
        for text in confirmed.values():
            to_bytes(text, TAG_BYTES)
        return confirmed

    def _end_confirm(self) -> dict[str, Message]:
        return {
            site: Message({"phase": "reveal", "confirmed": of_site})
            for site, of_site in _by_receiver(self._received).items()
        }

    def _receive_reveal(
        self, site: str, message: Message
    ) -> tuple[dict[str, bytes], dict[str, bytes]] | None:
        if "accused" in message.header:
            self._receive_accusation(site, message)
            return None
        own, keys = message.header.get("own"), message.header.get("keys")
        if (
            not isinstance(own, dict)
            or not isinstance(keys, dict)
            or set(own) != set(self.present)
            or set(keys) != self._shared - set(self.present)
        ):
            raise SecureSumError("a site reveals other shares than it was asked for")
        own = {site: to_bytes(text, SHARE_BYTES) for site, text in own.items()}
        return own, {site: to_bytes(text, SHARE_BYTES) for site, text in keys.items()}

    def _end_reveal(self) -> dict[str, Message]:
        roster, digest = self._roster, self._roster.digest()
        senders = {roster.place(sender): sender for sender in self._received}
        own = {
            site: self._restore(site, senders, 0, commit, roster.sites[site].commitment)
            for site in self.present
        }
        keys = {
            site: self._restore(site, senders, 1, public_key, roster.sites[site].mask)
            for site in sorted(self._shared - set(self.present))
        }
        self._find_suspects()
        for secret in own.values():
            add_mask(self._sum, own_mask_key(secret, digest), -1)
        for dropped, key in keys.items():
            for site in self.present:
                purpose = pair_purpose(digest, self._task, site, dropped)
                pair = agree(key, roster.sites[site].mask, purpose)
                add_mask(self._sum, pair, -1 if site < dropped else +1)
        self.total = {name: array.view(np.int32) for name, array in self._sum.items()}
        self._sum = {}
        return {}

    # By phase, how an answer is read and how the phase ends.
    _STEPS: ClassVar[Mapping[str, tuple[Callable[..., Any], Callable[..., dict[str, Message]]]]] = {
        "keys": (_receive_keys, _end_keys),
        "share": (_receive_share, _end_share),
        "mask": (_receive_mask, _end_mask),
        "confirm": (_receive_confirm, _end_confirm),
        "reveal": (_receive_reveal, _end_reveal),
    }

    def _restore(
        self,
        site: str,
        senders: Mapping[int, str],
        kind: int,
        publish: Callable[[bytes], bytes],
        published: bytes,
    ) -> bytes:
        """Restore a secret of a site, also if some of its shares are wrong."""
        answers: Mapping[str, tuple[dict[str, bytes], dict[str, bytes]]] = self._received
        shares = {place: answers[sender][kind][site] for place, sender in senders.items()}
        restored = restore(
            shares, self._roster.threshold, lambda secret: publish(secret) == published
        )
        if restored is None:
            words = f"the shares of a secret of site {site!r} do not fit together"
            if len(shares) > self._roster.threshold:  # one sender cannot have made them all wrong
                self.suspects[site] = words
            raise SecureSumError(
                f"{words}: this site or one that has its shares does not keep to the protocol. "
                "Repeat the sum with other sites"
            )
        self._misfits |= {(senders[place], site) for place in restored.wrong}
        return restored.secret

    def _find_suspects(self) -> None:
        """Find the sites with a part in several wrong shares: one can be another site's fault."""
        parts = Counter(site for pair in self._misfits for site in set(pair))
        for site, count in parts.items():
            if count > 1:
                self.suspects[site] = f"{count} shares that it has sent or made do not fit"


def _by_receiver(sent: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return what each sender has received from the other senders."""
    return {
        site: {sender: texts[site] for sender, texts in sent.items() if sender != site}
        for site in sent
    }

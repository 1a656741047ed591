"""The sites of a secure sum with their public keys, as the coordinator tells them to each site."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fedpax.secure_sums.arithmetic import KEY_BYTES, SecureSumError, derive

MAX_SITES = 500
"""The most sites: the shares for one site have to fit into the header of a message."""

PROTOCOL = b"fedpax secure sum 2 "

_MOST_PROOF = 10_000  # characters: the proofs of all sites are in one message


class Signer(Protocol):
    """Signs the public keys of a site, and checks the signatures of other sites."""

    def sign(self, content: bytes) -> dict[str, str]:
        """Return a proof, as JSON, that this site states the content."""

    def check(self, site: str, content: bytes, proof: Mapping[str, Any]) -> None:
        """Raise a `SecureSumError` if the proof is not by the site."""


class PublicKeys(NamedTuple):
    """What a site advertises at the start of a secure sum."""

    cipher: bytes  # the public key for shares
    mask: bytes  # the public key for the masks of pairs
    commitment: bytes  # to the secret of the site's own mask
    proof: Mapping[str, Any]  # of a `Signer`; empty without one

    def signed_content(self, session: str, site: str) -> bytes:
        """Return the bytes that the site signs."""
        fields = [session, site, *map(to_text, (self.cipher, self.mask, self.commitment))]
        return PROTOCOL + json.dumps(fields).encode()

    def to_json(self) -> dict[str, Any]:
        """Return the keys as JSON."""
        texts = {name: to_text(getattr(self, name)) for name in self._fields[:3]}
        return {**texts, "proof": dict(self.proof)}

    @classmethod
    def from_json(cls, fields: Any) -> "PublicKeys":
        """Read the keys from JSON of an untrusted process."""
        match fields:
            case {"proof": dict() as proof, **texts} if (
                set(texts) == set(cls._fields[:3])
                and all(isinstance(text, str) for text in proof.values())
                and sum(map(len, (*proof, *proof.values()))) <= _MOST_PROOF
            ):
                keys = {name: to_bytes(texts[name], KEY_BYTES) for name in cls._fields[:3]}
                return cls(**keys, proof=proof)
        raise SecureSumError("the public keys of a site are malformed")


class Roster(NamedTuple):
    """The sites of a secure sum; all sites and the coordinator must have the same."""

    session: str
    threshold: int  # number of sites without which no secret can be restored
    sites: Mapping[str, PublicKeys]

    def place(self, site: str) -> int:
        """Return the place of a site, from 1: its argument in secret sharing."""
        return sorted(self.sites).index(site) + 1

    def digest(self) -> bytes:
        """Return the hash of the roster, to which all keys are bound."""
        sites = {site: keys.to_json() for site, keys in sorted(self.sites.items())}
        content = json.dumps([self.session, self.threshold, sites], sort_keys=True)
        return hashlib.sha256(PROTOCOL + content.encode()).digest()

    def to_json(self) -> dict[str, Any]:
        """Return the roster as JSON."""
        sites = {site: keys.to_json() for site, keys in self.sites.items()}
        return {"session": self.session, "threshold": self.threshold, "sites": sites}


def read_roster(fields: Mapping[str, Any], session: str) -> Roster:
    """Read a roster from JSON of an untrusted coordinator, and check that it protects the sites."""
    match fields:
        case {"session": str() as named, "threshold": int() as threshold, "sites": dict() as sites}:
            pass
        case _:
            raise SecureSumError("the coordinator's list of sites is malformed")
    if named != session:
        raise SecureSumError(f"the coordinator mixes the sums {named[:100]!r} and {session!r}")
    count = len(sites)
    # With half or fewer, the coordinator could tell one half that a site is present and the other
    # that it is not, and learn both secrets of the site.
    if isinstance(threshold, bool) or not count // 2 < threshold <= count <= MAX_SITES:
        raise SecureSumError(
            f"the coordinator's threshold is {threshold} of {count} sites, expected more than half "
            f"of at most {MAX_SITES} sites"
        )
    return Roster(session, threshold, {k: PublicKeys.from_json(v) for k, v in sites.items()})


def pair_purpose(roster_digest: bytes, asked: bytes, first: str, second: str) -> bytes:
    """Return the purpose of the key of a pair's mask."""
    pair = json.dumps(sorted((first, second))).encode()
    return PROTOCOL + b"mask" + roster_digest + pair + asked


def sealing_purpose(name: str, roster_digest: bytes, sender: str, receiver: str) -> bytes:
    """Return the purpose of the key of what one site tells another: "share" or "confirm"."""
    return PROTOCOL + name.encode() + roster_digest + json.dumps((sender, receiver)).encode()


def present_context(present: Sequence[str]) -> bytes:
    """Return the bytes that authenticate a sorted list of present sites."""
    return PROTOCOL + b"present" + json.dumps(present).encode()


def own_mask_key(secret: bytes, roster_digest: bytes) -> bytes:
    """Return the key of a site's own mask."""
    return derive(secret, PROTOCOL + b"self" + roster_digest)


def commit(secret: bytes) -> bytes:
    """Return a commitment to a random secret, which tells nothing about it."""
    return derive(secret, PROTOCOL + b"commitment")


def to_text(content: bytes) -> str:
    """Return bytes as text for JSON."""
    return base64.b64encode(content).decode()


def to_bytes(text: Any, size: int) -> bytes:
    """Return a number of bytes from text of an untrusted process."""
    try:
        content = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        content = b""
    if len(content) != size:
        raise SecureSumError(f"a text of the message is not base64 of {size} bytes")
    return content

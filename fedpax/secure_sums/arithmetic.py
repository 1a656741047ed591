"""What both sides of a secure sum compute: keys, masks, shares of secrets, and exact words."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedpax.errors import FedpaxError
from fedpax.extras import optional

# The package cryptography is imported where it is needed: it is of the extras sites and flower.

KEY_BYTES, TAG_BYTES = 32, 16


def public_key(private: bytes) -> bytes:
    """Return the public key of a private X25519 key, 32 bytes each (RFC 7748)."""
    with optional("A secure sum"):
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """Return the 32 bytes that the owners of two key pairs alone can compute, for a purpose."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import (
        X25519PrivateKey,
        X25519PublicKey,
    )

    try:
        peer = X25519PublicKey.from_public_bytes(public)
        shared = X25519PrivateKey.from_private_bytes(private).exchange(peer)
    except ValueError:  # a public key of small order, with which the result is 0
        raise SecureSumError("a public key of a site is not one of X25519") from None
    return derive(shared, purpose)


def derive(secret: bytes, purpose: bytes) -> bytes:
    """Return 32 bytes by HKDF with SHA-256 (RFC 5869), without a salt."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=purpose).derive(secret)


def seal(key: bytes, content: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate the one content that a key is made for."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    # A key of `agree` is for one message: the nonce is constant.
    return ChaCha20Poly1305(key).encrypt(bytes(12), content, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes | None:
    """Decrypt what `seal` returned; None if it was changed."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, context)
    except InvalidTag:
        return None


# ---- masks of a secure sum: key streams of ChaCha20 that are added to integers modulo 2^32

_CHUNK = 1 << 18  # words

Codes = Mapping[str, np.ndarray]


def add_mask(arrays: Codes, key: bytes, sign: int) -> None:
    """Add the mask of a key to uint32 arrays, or subtract it, in place and modulo 2^32."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    # The stream's words, little-endian, cover the arrays in the order of their names.
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    for name in sorted(arrays):
        flat = arrays[name].reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            words = np.frombuffer(encryptor.update(bytes(4 * part.size)), "<u4")
            if sign > 0:
                np.add(part, words, out=part)
            else:
                np.subtract(part, words, out=part)


# ---- Shamir's secret sharing over the integers modulo a prime
#
# Reference:
#     Shamir, How to Share a Secret, Communications of the ACM 22 (11), 1979.

PRIME = 2**256 + 297
"""The smallest prime above all secrets of 32 bytes."""

SECRET_BYTES, SHARE_BYTES = 32, 33
SEALED_BYTES = 2 * SHARE_BYTES + TAG_BYTES  # a share of each of two secrets


def split(
    secret: bytes, threshold: int, places: Sequence[int], random: Callable[[int], bytes]
) -> dict[int, bytes]:
    """Return a share of a secret for each place, of which any `threshold` restore the secret."""
    assert len(secret) == SECRET_BYTES and 0 < threshold <= len(set(places)) and min(places) > 0
    # 48 bytes: the remainder is uniform up to 2^-127.
    higher = [int.from_bytes(random(48), "big") % PRIME for _ in range(threshold - 1)]
    coefficients = [int.from_bytes(secret, "big"), *higher]
    return {x: _evaluate(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in places}


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Restore a secret from `threshold` shares by place; b"" if they belong to no secret."""
    value = 0
    for x, share in shares.items():
        numerator = denominator = 1
        for other in shares:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        factor = numerator * pow(denominator, -1, PRIME)
        value = (value + int.from_bytes(share, "big") * factor) % PRIME
    return value.to_bytes(SECRET_BYTES, "big") if value < 1 << (8 * SECRET_BYTES) else b""


def _evaluate(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


# ---- restore secrets from shares of which some can be wrong

MOST_SUBSETS = 500


class Restored(NamedTuple):
    """A secret, and the places of wrong shares: none if the first shares restore the secret."""

    secret: bytes
    wrong: frozenset[int] = frozenset()


def restore(
    shares: Mapping[int, bytes], threshold: int, fits: Callable[[bytes], bool]
) -> Restored | None:
    """Restore a secret from any `threshold` shares whose secret fits; None without such shares."""
    for number, chosen in enumerate(_subsets(sorted(shares), threshold)):
        secret = combine({place: shares[place] for place in chosen})
        if secret and fits(secret):
            if not number:
                return Restored(secret)
            # A share of the same polynomial can take the place of any other one.
            rest = {place: shares[place] for place in chosen[1:]}
            others = shares.keys() - set(chosen)
            wrong = {x for x in others if combine({**rest, x: shares[x]}) != secret}
            return Restored(secret, frozenset(wrong))
    return None


def _subsets(places: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield all subsets or, if they are many, the first one and random ones."""
    if math.comb(len(places), size) <= MOST_SUBSETS:
        yield from itertools.combinations(places, size)
        return
    yield places[:size]
    draw = random.SystemRandom()  # no site can foresee the subsets
    for _ in range(MOST_SUBSETS):
        yield sorted(draw.sample(places, size))


# ---- numbers as integers of 32 bits whose sums are exact
#
# Floats are sent as multiples of 2^-24, in three words of 21 bits, whose sums do not overflow. Each
# float32 is a multiple of 2^-149 and less than 2^128: 14 words.

WORDS, EXACT_WORDS, _BITS = 3, 14, 21
_SCALE, _EXACT_SCALE = 2.0**24, 2**149
_LARGEST_FLOAT, _LARGEST_INTEGER = 2.0**29, 2**53  # such that 500 of them do not overflow


class NotSummableError(FedpaxError, ValueError):
    """A term that cannot be part of a sum, such as NaN, or a sum that its dtype cannot hold."""


def to_words(x: np.ndarray) -> np.ndarray:
    """Return numbers as words `[..., 3]`, which can be summed."""
    value, is_float = _real_numbers(x)
    if not is_float:
        return _split(value.astype(np.int64), WORDS)
    if not np.all(np.abs(value) < _LARGEST_FLOAT):
        raise NotSummableError("it has NaN, or numbers of 2**29 or more")
    return _split(np.rint(value * _SCALE).astype(np.int64), WORDS)


def to_exact_words(x: np.ndarray) -> np.ndarray:
    """Return numbers as words `[..., 14]`, of which sums of float32 of any size are exact."""
    value, is_float = _real_numbers(x)
    if is_float and not np.all(np.abs(value) < 2.0**128):
        raise NotSummableError("it has NaN, or numbers of 2**128 or more")
    scale = _EXACT_SCALE if is_float else 1
    ratios = [number.as_integer_ratio() for number in value.ravel().tolist()]
    integers = np.empty(value.shape, object)
    integers.ravel()[:] = [n * scale // d for n, d in ratios]
    return _split(integers, EXACT_WORDS)


def _real_numbers(x: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return integers, or floats as float64 and True; raise if they have no words."""
    x = np.asarray(x)
    if x.dtype.kind == "c":
        raise NotSummableError("it has complex numbers")
    if x.dtype.kind not in "biu":
        return x.astype(np.float64), True
    if x.size and not np.abs(x.astype(np.float64)).max() < _LARGEST_INTEGER:
        raise NotSummableError("it has integers of 2**53 or more")
    return x, False


def _split(value: np.ndarray, words: int) -> np.ndarray:
    """Return the words of integers."""
    parts = [(value >> (_BITS * k)) & ((1 << _BITS) - 1) for k in range(words)]
    return np.stack(parts, -1).astype(np.uint32)


def from_words(words: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the numbers whose words, or sums of words, are given."""
    parts, scale = words.view(np.uint32), _SCALE
    if parts.shape[-1] == WORDS:
        shifts = np.uint64(_BITS) * np.arange(WORDS, dtype=np.uint64)
        total = np.sum(parts.astype(np.uint64) << shifts, -1, dtype=np.uint64)
        total &= np.uint64(2**63 - 1)
        value = np.where(total >= 2**62, total | np.uint64(2**63), total).view(np.int64)
    else:
        factors = np.array([1 << (_BITS * k) for k in range(EXACT_WORDS)], object)
        total = np.asarray((parts.astype(object) * factors).sum(-1) % (1 << _BITS * EXACT_WORDS))
        value = np.asarray(total - (total >> (_BITS * EXACT_WORDS - 1) << _BITS * EXACT_WORDS))
        scale = _EXACT_SCALE
    if dtype.kind not in "biu":
        return np.asarray(value / scale).astype(dtype)
    if dtype.kind != "b" and value.size:
        info = np.iinfo(dtype)
        if (beyond := value[(value < info.min) | (value > info.max)]).size:
            raise NotSummableError(
                f"A sum of integers is {beyond.flat[0]}, expected {info.min} to {info.max} "
                f"({dtype}). Sum floats, or divide the terms."
            )
    return np.asarray(value).astype(dtype)


class SecureSumError(FedpaxError, ValueError):
    """A message that the protocol of a secure sum does not allow, or too few sites."""

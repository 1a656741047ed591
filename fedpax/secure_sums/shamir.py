"""Shamir's secret sharing over the integers modulo a prime.

Reference:
    Shamir, How to Share a Secret, Communications of the ACM 22 (11), 1979.
"""

from collections.abc import Callable, Mapping, Sequence

PRIME = 2**256 + 297
"""The smallest prime above all secrets of 32 bytes."""

SECRET_BYTES, SHARE_BYTES = 32, 33


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

"""The primitives of a secure sum against published vectors, NumPy, and laws."""

import itertools
import secrets

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.secure_sums import SecureSumError
from fedpax.secure_sums.arithmetic import (
    PRIME,
    SHARE_BYTES,
    add_mask,
    agree,
    combine,
    derive,
    public_key,
    seal,
    split,
    unseal,
)

HEX = bytes.fromhex
# RFC 7748, section 6.1.
ALICE = HEX("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
ALICE_PUBLIC = HEX("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
BOB = HEX("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
BOB_PUBLIC = HEX("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
SHARED = HEX("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
# RFC 5869, appendix A.3, the first 32 bytes.
DERIVED = HEX("8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d")
# RFC 8439, appendix A.1, the first two blocks.
STREAM = HEX(
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
    "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
)


def test_keys_are_agreed_as_in_the_rfcs() -> None:
    assert (public_key(ALICE), public_key(BOB)) == (ALICE_PUBLIC, BOB_PUBLIC)
    assert derive(b"\x0b" * 22, b"") == DERIVED
    key = agree(ALICE, BOB_PUBLIC, b"purpose")
    assert key == agree(BOB, ALICE_PUBLIC, b"purpose") == derive(SHARED, b"purpose")
    assert key != agree(ALICE, BOB_PUBLIC, b"another")


@pytest.mark.parametrize("public", [bytes(32), b"\x01" + bytes(31)])
def test_keys_of_small_order_are_refused(public: bytes) -> None:
    with pytest.raises(SecureSumError, match="not one of X25519"):
        agree(ALICE, public, b"")


def test_masks_are_the_stream_of_the_rfc() -> None:
    arrays = {"b": np.zeros((3, 5), np.uint32), "a": np.zeros(17, np.uint32)}
    add_mask(arrays, bytes(32), +1)
    assert arrays["a"].tobytes() + arrays["b"].tobytes() == STREAM
    add_mask(arrays, bytes(32), -1)
    assert not any(array.any() for array in arrays.values())


def test_masks_of_large_arrays_are_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask() -> np.ndarray:
        arrays = {"a": np.zeros(1000, np.uint32), "b": np.zeros((7, 11), np.uint32)}
        add_mask(arrays, ALICE, +1)
        return np.concatenate([array.reshape(-1) for array in arrays.values()])

    whole = mask()
    monkeypatch.setattr("fedpax.secure_sums.arithmetic._CHUNK", 100)
    np.testing.assert_array_equal(mask(), whole)


def test_what_is_sealed_cannot_be_changed() -> None:
    sealed = seal(ALICE, b"content", b"context")
    assert unseal(ALICE, sealed, b"context") == b"content"
    changed = bytes([sealed[0] ^ 1]) + sealed[1:]
    for key, text, context in (
        (BOB, sealed, b"context"),
        (ALICE, changed, b"context"),
        (ALICE, sealed, b"another"),
    ):
        assert unseal(key, text, context) is None


def test_shares_of_a_fixed_polynomial() -> None:
    # f(x) = 5 + 3 x + 2 x^2: 10, 19, 32.
    random = iter([3, 2])
    shares = split((5).to_bytes(32, "big"), 3, [1, 2, 3], lambda n: next(random).to_bytes(n, "big"))
    assert [int.from_bytes(shares[x], "big") for x in (1, 2, 3)] == [10, 19, 32]
    assert combine(shares) == (5).to_bytes(32, "big")


@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.integers(0, 4))
@settings(deadline=None, max_examples=30)
def test_any_threshold_of_shares_restores_a_secret(secret: bytes, least: int, more: int) -> None:
    places = list(range(1, least + more + 1))
    shares = split(secret, least, places, secrets.token_bytes)
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    for chosen in itertools.combinations(places, least):
        assert combine({x: shares[x] for x in chosen}) == secret
    if least > 1:  # one share less restores another secret, except with probability 2^-256
        assert combine({x: shares[x] for x in places[: least - 1]}) != secret


def test_largest_secret_and_damaged_shares() -> None:
    shares = split(b"\xff" * 32, 2, [1, 2], secrets.token_bytes)
    assert combine(shares) == b"\xff" * 32
    # A value above all secrets: f(0) = PRIME - 1.
    assert combine({1: (PRIME - 1).to_bytes(33, "big"), 2: (PRIME - 1).to_bytes(33, "big")}) == b""


def test_one_share_is_uniform() -> None:
    # The shares of two secrets have the same distribution: their top bytes fill the same range.
    for secret in (bytes(32), b"\xff" * 32):
        first = [split(secret, 2, [1, 2], secrets.token_bytes)[1][1] for _ in range(2000)]
        counts = np.bincount(np.array(first) // 64, minlength=4)
        assert (abs(counts - 500) < 120).all()  # 6 standard deviations

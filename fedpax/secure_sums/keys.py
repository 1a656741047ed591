"""Keys of a secure sum: agreed in pairs by X25519 and HKDF, and used to seal shares."""

from fedpax.extras import optional
from fedpax.secure_sums.errors import SecureSumError

# The package cryptography is imported where it is needed: it is of the extras sites and flower.

KEY_BYTES = 32


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

    # The nonce is constant because a key of `agree` is for one message in one direction.
    return ChaCha20Poly1305(key).encrypt(bytes(12), content, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """Decrypt what `seal` returned."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, context)
    except InvalidTag:
        raise SecureSumError("the shares of a site were changed on their way") from None

"""Masks of a secure sum: key streams of ChaCha20 that are added to integers modulo 2^32."""

from collections.abc import Mapping

import numpy as np

_CHUNK = 1 << 18  # words

Codes = Mapping[str, np.ndarray]


def add_mask(arrays: Codes, key: bytes, sign: int) -> None:
    """Add the mask of a key to uint32 arrays, or subtract it, in place and modulo 2^32."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    # The stream's words, little-endian, cover the arrays in the order of their names. The memory is
    # one chunk's, however large the arrays are.
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

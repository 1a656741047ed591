"""The way down: what the coordinator sends to all sites, as differences in few bits."""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.aggregators import codecs
from fedpax.aggregators.codecs.update_coder import UpdateCoder
from fedpax.errors import ArgumentError

WHOLE = "float32"
CODECS: Mapping[str, Callable[[], codecs.Codec]] = {
    "e3m0": codecs.e3m0,
    "drive": functools.partial(codecs.drive, unbiased=False),  # contractive: errors do not add up
    "sign": codecs.sign,
}
SMALLEST = 256
"""Arrays of fewer entries are sent whole."""

CODED = "coded"
Arrays = Mapping[str, np.ndarray]


class DownlinkArrays(NamedTuple):
    """Arrays for all sites: whole, or coded as differences from `base`, to `target`."""

    whole: Arrays
    coded: Arrays | None
    base: str
    target: str
    checksum: int

    def for_site(self, have: str | None) -> tuple[dict[str, Any], Arrays]:
        """Return header fields and arrays for a site that has what a packet before left there."""
        if not self.target:
            return {}, self.whole
        fields = {"target": self.target, "checksum": self.checksum}
        if self.coded is None or have != self.base:
            return {**fields, "base": None}, self.whole
        return {**fields, "base": self.base}, self.coded


def whole(arrays: Arrays) -> DownlinkArrays:
    """Return a packet of arrays that are not compressed."""
    return DownlinkArrays(arrays, None, "", "", 0)


class Downlink:
    """The coordinator's side: x_t is sent as Q(x_t - r), and r <- r + Q(x_t - r) at both sides."""

    def __init__(self, codec: str, epoch: str) -> None:
        self._codec, self._epoch, self._version = make_codec(codec), epoch, 0
        self._reference: dict[str, jax.Array] = {}

    def pack(self, arrays: Arrays) -> DownlinkArrays:
        """Return the packet of the next round."""
        base, names = self._place, _coded_names(arrays, self._codec)
        self._version += 1
        if not names:
            return whole(arrays)
        now = [jnp.asarray(arrays[name]) for name in names]
        if self._reference.keys() != set(names):
            self._reference, coded = dict(zip(names, now, strict=True)), None
        else:
            reference = [self._reference[name] for name in names]
            assert self._codec is not None
            words, new = encode(self._codec, self._version, now, reference)
            self._reference = dict(zip(names, new, strict=True))
            coded = {name: x for name, x in arrays.items() if name not in names}
            for name, word in zip(names, words, strict=True):
                coded[f"{CODED} {name}"] = np.asarray(word)
        known = {name: np.asarray(x) for name, x in self._reference.items()}
        return DownlinkArrays({**arrays, **known}, coded, base, self._place, checksum(known))

    @property
    def _place(self) -> str:
        return f"{self._epoch} {self._version}"


class Receiver:
    """A site's side; `have` names what it has."""

    def __init__(self, codec: str) -> None:
        self._codec = make_codec(codec)
        self._reference: dict[str, jax.Array] = {}
        self.have: str | None = None

    def unpack(self, header: Mapping[str, Any], arrays: Arrays) -> Arrays | None:
        """Return the arrays of a packet, whole; None if what this site has does not fit."""
        if "target" not in header:
            return arrays
        names = _coded_names(arrays, self._codec)
        if header.get("base") is not None:
            if header["base"] != self.have:
                return None
            names = [name[len(CODED) + 1 :] for name in arrays if name.startswith(f"{CODED} ")]
            if self._codec is None or set(names) != self._reference.keys():
                return None
            words = [jnp.asarray(arrays[f"{CODED} {name}"]) for name in names]
            reference = [self._reference[name] for name in names]
            version = int(header["target"].rpartition(" ")[2])
            new = decode(self._codec, version, words, reference)
            rest = {n: x for n, x in arrays.items() if not n.startswith(f"{CODED} ")}
            self._reference = dict(zip(names, new, strict=True))
            arrays = rest | {name: np.asarray(x) for name, x in self._reference.items()}
        else:
            self._reference = {name: jnp.asarray(arrays[name]) for name in names}
        if self._reference and checksum(self._reference) != header["checksum"]:
            self.have = None  # this machine rounds otherwise: it takes the whole arrays
            return None
        self.have = header["target"]
        return arrays


@functools.cache
def make_codec(name: str, flag: str = "down") -> codecs.Codec | None:
    """Return the codec that a flag names; None for whole arrays."""
    if name == WHOLE:
        return None
    if name not in CODECS:
        raise ArgumentError(
            f"{flag}={name!r}, expected one of {', '.join((WHOLE, *CODECS))}. Set for example "
            f"--{flag}=e3m0."
        )
    return CODECS[name]()


def _coded_names(arrays: Arrays, codec: codecs.Codec | None) -> list[str]:
    """Return the arrays that a codec is used for."""
    if codec is None:
        return []
    return [n for n, x in arrays.items() if x.dtype == np.float32 and x.size >= SMALLEST]


def _coder(codec: codecs.Codec, version: Any, like: Sequence[Any]) -> UpdateCoder:
    return UpdateCoder(codec, jax.random.key(version), [jax.typeof(x) for x in like], ())


@functools.partial(jax.jit, static_argnums=0)
def encode(
    codec: codecs.Codec, version: int, now: Sequence[Any], reference: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the words of differences, and the new reference."""
    difference = [x - r for x, r in zip(now, reference, strict=True)]
    words = _coder(codec, version, difference).encode(jnp.int32(0), difference)
    return words, decode(codec, version, words, reference)


@functools.partial(jax.jit, static_argnums=0)
def decode(
    codec: codecs.Codec, version: int, words: Sequence[Any], reference: Sequence[Any]
) -> list[Any]:
    """Return the new reference."""
    steps = _coder(codec, version, reference).decode(jnp.int32(0), list(words))
    return [r + s for r, s in zip(reference, steps, strict=True)]


def checksum(arrays: Mapping[str, Any]) -> int:
    """Return a checksum of arrays by name."""
    crc = 0
    for name in sorted(arrays):
        crc = zlib.crc32(np.asarray(arrays[name]).tobytes(), crc)
    return crc

"""The sums of a site's clients in few bits, whose errors stay at the site."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.aggregators.codecs import Codec
from fedpax.aggregators.codecs.update_coder import UpdateCoder
from fedpax.errors import ConfigurationError
from fedpax.sites.downlink import SMALLEST, WHOLE, make_codec
from fedpax.sites.tasks import TERM, ArrayTypes
from fedpax.transforms.client_stages import Stage
from fedpax.transforms.stages import Stages

Arrays = Mapping[str, np.ndarray]

SUM = "sum"
"""First word of the names of encoded sums."""


class Uplink:
    """Encodes the sums of a site: sends q = Q(s_t + e), and keeps e <- s_t + e - q."""

    def __init__(self, up: str, stage: Stage, adds: bool) -> None:
        self._codec = make_codec(up, "up")
        large = {
            i: jax.ShapeDtypeStruct(v.shape, np.float32)
            for i, v in enumerate(stage.terms)
            if v.dtype == np.float32 and math.prod(v.shape) >= SMALLEST
        }
        self._types = large if adds and self._codec is not None else {}

    @property
    def is_active(self) -> bool:
        """Tell whether a sum of the stage is encoded."""
        return bool(self._types)

    def types(self, expected: Mapping[str, ArrayTypes]) -> dict[str, ArrayTypes]:
        """Return the types of a reply from its types in float32."""
        words = jax.eval_shape(
            functools.partial(_encode, self._codec, 0, 0), [*self._types.values()], self.zeros()
        )[0]
        encoded = {
            f"{SUM} {i}": (x.shape, np.dtype(x.dtype))
            for i, x in zip(self._types, words, strict=True)
        }
        return {n: x for n, x in expected.items() if n not in self._terms()} | encoded

    def zeros(self) -> list[np.ndarray]:
        """Return the losses before the first sum: zeros."""
        return [np.zeros(x.shape, np.float32) for x in self._types.values()]

    def encode(
        self, number: int, site: int, arrays: Arrays, unsent: Sequence[Any]
    ) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """Return a reply with encoded sums, and the losses of the sums."""
        sums = [arrays[name] for name in self._terms()]
        words, lost = _encode(self._codec, number, site, sums, [*unsent])
        encoded = {f"{SUM} {i}": np.asarray(x) for i, x in zip(self._types, words, strict=True)}
        rest = {n: x for n, x in arrays.items() if n not in self._terms()}
        return {**rest, **encoded}, [np.asarray(x) for x in lost]

    def decode(self, number: int, site: int, arrays: Arrays) -> dict[str, np.ndarray]:
        """Return the reply in float32."""
        words = [arrays[f"{SUM} {i}"] for i in self._types]
        sums = _decode(self._codec, number, site, words, tuple(self._types.values()))
        rest = {n: x for n, x in arrays.items() if not n.startswith(f"{SUM} ")}
        return rest | {n: np.asarray(x) for n, x in zip(self._terms(), sums, strict=True)}

    def _terms(self) -> list[str]:
        return [f"{TERM} {i}" for i in self._types]


def check_up(up: str, divided: Stages, is_private: bool) -> str:
    """Return a note if no sum is encoded, else ""; raise if sums must not be encoded."""
    if up == WHOLE:
        return ""
    if is_private:
        raise ConfigurationError(
            f"up={up!r} with private means: an encoded sum has no bound that the noise hides, "
            f"expected up={WHOLE!r}. Leave --up out."
        )
    if any(Uplink(up, stage, divided.adds(i)).is_active for i, stage in enumerate(divided)):
        return ""
    return f"up={up} has no effect: no site sends a sum of {SMALLEST} numbers or more"


def _coder(codec: Any, number: Any, like: Sequence[Any]) -> UpdateCoder:
    types = [jax.typeof(jnp.zeros(x.shape, jnp.float32)) for x in like]
    return UpdateCoder(codec, jax.random.key(number), types, ())


@functools.partial(jax.jit, static_argnums=0)
def _encode(
    codec: Codec, number: Any, site: Any, sums: Sequence[Any], unsent: Sequence[Any]
) -> tuple[list[jax.Array], list[jax.Array]]:
    whole = [jnp.asarray(x) + e for x, e in zip(sums, unsent, strict=True)]
    coder = _coder(codec, number, whole)
    # Else a CPU encodes a word again for each value that it decodes.
    words = jax.lax.optimization_barrier(coder.encode(jnp.int32(site), whole))
    decoded = coder.decode(jnp.int32(site), words)
    return words, [x - q for x, q in zip(whole, decoded, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _decode(
    codec: Codec, number: Any, site: Any, words: Sequence[Any], like: Sequence[Any]
) -> list[jax.Array]:
    return _coder(codec, number, like).decode(jnp.int32(site), words)

"""Marks in a jaxpr: whose value an equation computes, and noise that a party draws."""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fedpax.primitives._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Primitive,
    aval_of,
    define,
    eliminate_dead_code,
    name_results,
)
from fedpax.primitives.jaxpr_analysis import all_eqns, inner_jaxprs
from fedpax.primitives.layout import unplaced_aval
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import Placement, resolve_placement
from fedpax.transforms.value_names import SAME

if TYPE_CHECKING:
    import chex


READ_CLIENTS, WRITE_CLIENTS = "fedpax_read_clients", "fedpax_write_clients"
"""The names of the jitted functions that read and write rows of a store, on one device."""

SENT = "fedpax_sent"
"""The name in the jaxpr of a sent value, followed by the bytes that it replaces."""

KEPT = "fedpax_kept"
"""The name in the jaxpr of a placed value that participants keep between rounds."""

MASKED = "fedpax_masked"
"""The name in the jaxpr of a term that only its sum may show, followed by the fewest of its terms
that a sum may have."""

SERVER = "fedpax_server"
"""The name in the jaxpr of a value that the server computes for a participant, on its device."""


LOSS_MASK = "fedpax_loss_mask"
"""The name in the jaxpr of the mask that a loss function gets, in a trace that looks for it."""


def is_mark(eqn: JaxprEqn, mark: str) -> bool:
    """Return whether an equation marks its operand."""
    return bool(eqn.primitive.name == "name" and eqn.params["name"] == mark)


def least_masked(jaxpr: Jaxpr) -> int | None:
    """Return the fewest participants that the masked sums of a jaxpr may have; None without any."""
    names = [str(eqn.params["name"]) for eqn in all_eqns(jaxpr) if eqn.primitive.name == "name"]
    return max((int(n.removeprefix(MASKED)) for n in names if n.startswith(MASKED)), default=None)


def has_mark(jaxpr: Jaxpr, mark: str) -> bool:
    """Return whether a jaxpr has a marked value, at any depth."""
    return any(is_mark(eqn, mark) for eqn in all_eqns(jaxpr))


def has_live_mark(jaxpr: Jaxpr, mark: str) -> bool:
    """Return whether a jaxpr reads a marked value, at any depth."""
    if not jaxpr.constvars:
        jaxpr = eliminate_dead_code(ClosedJaxpr(jaxpr, ())).jaxpr
    return any(
        is_mark(eqn, mark) or any(has_live_mark(inner, mark) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def identity_map(x: jax.Array, placement: Placement, name: str = SAME) -> jax.Array:
    """Return a placed value as the result of a map that returns its argument."""
    jaxpr = _identity(unplaced_aval(jax.typeof(x)), name)
    (same,) = federated_map_p.bind(x, jaxpr=jaxpr, placement=placement, chunk_size=None)
    return same


@functools.cache
def _identity(aval: Any, name: str) -> ClosedJaxpr:
    """Return the function `x -> x`, which a later phase may run again instead of storing `x`."""
    jaxpr = jax.make_jaxpr(jax.checkpoint(lambda x: checkpoint_name(x, SAME)))(aval)
    return name_results(jaxpr, [name])


# ---- noise that the server or a participant draws by itself: no other party can subtract it
#
# In a program that `fedpax.stages` traces, an aggregator binds these primitives in place of noise
# from a seed, which all parties know.

own_noise_p = Primitive("own_noise")
"""Noise of each participant, of the shape of its placed operand: int32, or float32 numbers."""

server_noise_p = Primitive("server_noise")
"""float32, of the shape of its operand: standard normal numbers that the server draws."""


class Noise(NamedTuple):
    """Numbers that a party draws: discrete Gaussian integers, or normal float32 numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    stddev: float

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def __str__(self) -> str:
        size = f"{self.nbytes:,} B, standard deviation {self.stddev:.3g}"
        return f"{self.name}: {self.dtype}{list(self.shape)}, {size}"


def own_noise(like: "chex.ArrayTree", stddev: float, dtype: Any = jnp.int32) -> "chex.ArrayTree":
    """Return noise of each participant, of the shapes of placed values. In a program."""
    placement = resolve_placement("own_noise", None).placement
    params = {"placement": placement, "stddev": stddev, "dtype": jnp.dtype(dtype)}
    return jax.tree.map(lambda x: own_noise_p.bind(jax.lax.stop_gradient(x), **params), like)


def server_noise(like: jax.Array) -> jax.Array:
    """Return standard normal numbers of the server, of the shape of a value. In a program."""
    return cast("jax.Array", server_noise_p.bind(jax.lax.stop_gradient(like)))


def draws_noise(eqn: JaxprEqn) -> bool:
    """Return whether an equation draws noise of its own, at any depth."""
    return eqn.primitive in (server_noise_p, own_noise_p) or any(
        draws_noise(inner_eqn) for inner in inner_jaxprs(eqn) for inner_eqn in inner.eqns
    )


def noise_as_arguments(
    closed: ClosedJaxpr,
) -> tuple[ClosedJaxpr, tuple[Noise, ...], tuple[float, ...]]:
    """Make the noise of a jaxpr its last arguments: of the server, then of participants."""
    servers = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive is server_noise_p]
    owned = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive is own_noise_p]
    eqns = [*servers, *owned]
    if not eqns:
        return closed, (), ()
    jaxpr = closed.jaxpr
    alone = jaxpr.replace(
        invars=[*jaxpr.invars, *(eqn.outvars[0] for eqn in eqns)],
        eqns=[e for e in jaxpr.eqns if e.primitive not in (server_noise_p, own_noise_p)],
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    drawn = tuple(
        Noise(f"server noise {k}", aval_of(v).shape, aval_of(v).dtype, 1.0)
        for k, v in enumerate(eqn.outvars[0] for eqn in servers)
    )
    stddevs = tuple(float(eqn.params["stddev"]) for eqn in owned)
    return eliminate_dead_code(ClosedJaxpr(alone, closed.consts)), drawn, stddevs


def _shape(x: Any, *, dtype: Any = jnp.float32, **_: Any) -> tuple[Any, set[Any]]:
    return x.update(dtype=jnp.dtype(dtype), weak_type=False), set()


def _not_here(x: Any, **_: Any) -> Any:
    raise NotImplementedError(
        "noise of fedpax.stages() inside a loop or a conditional of the server, expected an "
        "aggregator at the top level of the round. Choose another aggregator."
    )


def _batch_own(axis: Any, args: Any, dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
    # Each element of the batch has noise of its own.
    return own_noise_p.bind(jnp.moveaxis(args[0], dims[0], 1), **params), 1


def _batch_server(axis: Any, args: Any, dims: Sequence[Any]) -> tuple[Any, Any]:
    return server_noise_p.bind(*args), dims[0]


define(own_noise_p, abstract=_shape, implementation=_not_here, batch=_batch_own)
define(server_noise_p, abstract=_shape, implementation=_not_here, batch=_batch_server)

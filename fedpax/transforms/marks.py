"""Marks in a jaxpr: whose value an equation computes, and noise that a participant draws."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fedpax.primitives._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Primitive,
    define,
    eliminate_dead_code,
    name_results,
)
from fedpax.primitives.jaxpr_analysis import inner_jaxprs
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
    least = [
        int(eqn.params["name"].removeprefix(MASKED))
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "name" and str(eqn.params["name"]).startswith(MASKED)
    ]
    inner = [least_masked(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn)]
    return max((k for k in (*least, *inner) if k is not None), default=None)


def has_mark(jaxpr: Jaxpr, mark: str) -> bool:
    """Return whether a jaxpr has a marked value, at any depth."""
    return any(
        is_mark(eqn, mark) or any(has_mark(inner, mark) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def has_live_mark(jaxpr: Jaxpr, mark: str) -> bool:
    """Return whether a jaxpr reads a marked value, at any depth."""
    if not jaxpr.constvars:
        jaxpr = eliminate_dead_code(ClosedJaxpr(jaxpr, ())).jaxpr
    return any(
        is_mark(eqn, mark) or any(has_live_mark(inner, mark) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


# The map that returns its argument, which makes a placed value a value of the participants.
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


# Noise that each participant draws by itself, so that no other party can subtract it.
#
# In a program that `fedpax.stages` traces, an aggregator binds `own_noise_p` in place of noise from
# a key of the server. The stages then have the noise as a value that a participant draws at each
# call (`fedpax.transforms.discrete_gaussian`).
own_noise_p = Primitive("own_noise")
"""int32, of the shape of its placed operand: discrete Gaussian noise of each participant."""


def own_noise(like: "chex.ArrayTree", stddev: float) -> "chex.ArrayTree":
    """Return noise of each participant, integers of the shapes of placed values. In a program."""
    placement = resolve_placement("own_noise", None).placement
    return jax.tree.map(
        lambda x: own_noise_p.bind(jax.lax.stop_gradient(x), placement=placement, stddev=stddev),
        like,
    )


def noise_as_arguments(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[float, ...]]:
    """Make the noise of a jaxpr its last arguments; return their standard deviations too."""
    eqns = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive is own_noise_p]
    if not eqns:
        return closed, ()
    jaxpr = closed.jaxpr
    alone = jaxpr.replace(
        invars=[*jaxpr.invars, *(eqn.outvars[0] for eqn in eqns)],
        eqns=[eqn for eqn in jaxpr.eqns if eqn.primitive is not own_noise_p],
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    stddevs = tuple(float(eqn.params["stddev"]) for eqn in eqns)
    return eliminate_dead_code(ClosedJaxpr(alone, closed.consts)), stddevs


def _shape(x: Any, *, placement: Placement, stddev: float) -> tuple[Any, set[Any]]:
    del placement, stddev
    return x.update(dtype=jnp.dtype(jnp.int32), weak_type=False), set()


def _not_here(x: Any, *, placement: Placement, stddev: float) -> Any:
    raise NotImplementedError("own_noise() outside of fedpax.stages()")


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, placement: Placement, stddev: float
) -> tuple[Any, int]:
    # Each element of the batch has noise of its own.
    moved = jnp.moveaxis(args[0], dims[0], 1)
    return own_noise_p.bind(moved, placement=placement, stddev=stddev), 1


define(own_noise_p, abstract=_shape, implementation=_not_here, batch=_batch)

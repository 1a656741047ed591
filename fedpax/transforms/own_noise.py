"""Noise that each participant draws by itself, so that no other party can subtract it.

In a program that `fedpax.stages` traces, an aggregator binds `own_noise_p` in place of noise from a
key of the server. The stages then have the noise as a value that a participant draws at each call
(`fedpax.transforms.discrete_gaussian`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import ClosedJaxpr, Primitive, define, eliminate_dead_code
from fedpax.primitives.placement import Placement, resolve_placement

if TYPE_CHECKING:  # chex imports absl.flags
    import chex

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

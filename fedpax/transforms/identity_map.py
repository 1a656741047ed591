"""The map that returns its argument, which makes a placed value a value of the participants."""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from fedpax.primitives._jax import ClosedJaxpr, name_results
from fedpax.primitives.layout import unplaced_aval
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import Placement
from fedpax.transforms.value_names import SAME


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

"""`federated_mask`: a mask that keeps the participants' axis first, for rules of derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import Primitive, Zero, define, is_zero, zero_tangent

federated_mask_p = Primitive("federated_mask")
"""`where(mask, t, 0)` for each participant, linear in `t`.

`jnp.where` computes the same. Under `jax.vmap` it puts the batch axis in front of the participants'
axis, and there the streaming pass does not recognize a placed value.
"""


def apply_mask(mask: jax.Array, t: jax.Array) -> jax.Array:
    """Compute `where(mask, t, 0)`, for all participants or for one."""
    return jnp.where(mask, t, 0)


def _mask_jvp(primals, tangents, *, placement):
    (mask, t), (_, tangent) = primals, tangents
    out = federated_mask_p.bind(mask, t, placement=placement)
    if is_zero(tangent):
        return out, zero_tangent(out)
    return out, federated_mask_p.bind(mask, tangent, placement=placement)


def _mask_transpose(cotangent, mask, t, *, placement):
    if is_zero(cotangent):
        return [None, Zero(t.aval)]
    return [None, federated_mask_p.bind(mask, cotangent, placement=placement)]


def _mask_batch(axis, args, dims, *, placement):
    batch_second = [
        jnp.broadcast_to(jnp.expand_dims(a, 1), (a.shape[0], axis.size, *a.shape[1:]))
        if d is None
        else jnp.moveaxis(a, d, 1)
        for a, d in zip(args, dims, strict=True)
    ]
    return federated_mask_p.bind(*batch_second, placement=placement), 1


define(
    federated_mask_p,
    abstract=lambda mask, t, *, placement: (t, set()),
    implementation=lambda mask, t, *, placement: apply_mask(mask, t),
    jvp=_mask_jvp,
    transpose=_mask_transpose,
    batch=_mask_batch,
)

"""Local steps: a participant's optimizer steps on its own batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Num

from fedpax.algorithm import LossFn, Metrics, Params, WithGradientNorm, loss_and_metrics
from fedpax.algorithms.parts.method_checks import check_float_params, explain_needs
from fedpax.algorithms.parts.participation import is_all_or_none, valid_steps
from fedpax.algorithms.parts.tree_arithmetic import scale, select, subtract
from fedpax.clients.cohort import MASK
from fedpax.errors import ArgumentError

Carry = TypeVar("Carry", bound=chex.ArrayTree)


def local_steps(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    params: Params,
    optimizer_state: optax.OptState,
    batches: chex.ArrayTree,
    num_steps: Int[Array, ""] | int | None = None,
) -> tuple[Params, optax.OptState, Metrics]:
    """Take one optimizer step per batch: `y <- y + update(grad loss_fn(y, batch))`.

    A batch is padding if its index is `num_steps` or more, or if `batches` is a dict with a field
    `"mask"` that is zero for the whole batch. Its step changes nothing.

    With `num_steps`, a loop of variable length computes no padded step, and `jax.grad` raises, but
    not `jax.jvp`.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars, or None)`.
        optimizer: any optax optimizer of a pytree. One with extra arguments receives the step's
            `batch`, and the loss as `value`, `grad` and `value_fn`, such as `optax.lbfgs()`.
        params: a pytree of float arrays.
        optimizer_state: the optimizer's state for `params`.
        batches: a pytree of arrays `[steps, batch, ...]`.
        num_steps: integer scalar, how many of the first batches to train on; values above `steps`
            mean `steps`. Default None: train on every batch that is not padding by its mask.

    Returns:
        The new parameters, the new optimizer state, and metrics: `"loss"` and the metrics of
        `loss_fn`, each averaged in float32 over the steps that were taken; 0 if there were none.

    Raises:
        TypeError: `num_steps` is not an integer scalar; `loss_fn` does not return a pair of a
            scalar and a dict (or None).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> descent = optax.sgd(0.25)
        >>> w = jnp.float32(0.0)
        >>> w, _, metrics = local_steps(loss_fn, descent, w, descent.init(w), jnp.ones((2, 1)))
        >>> w.item(), metrics["loss"].item()
        (0.75, 0.625)
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def step(
        carry: tuple[Params, optax.OptState], batch: chex.ArrayTree
    ) -> tuple[tuple[Params, optax.OptState], Metrics]:
        params, state = carry
        gradient, metrics = gradient_and_metrics(loss_fn, params, batch)

        # optax's line searches raise for an extra argument that `value_fn` does not take.
        def value_fn(params: Params, batch: chex.ArrayTree) -> jax.Array:
            return loss_and_metrics(loss_fn, params, batch)[0]

        loss = {"value": metrics["loss"], "grad": gradient, "value_fn": value_fn}
        stepped = optimizer_step(optimizer, gradient, state, params, batch=batch, **loss)
        return stepped, metrics

    end, metrics = fold_steps(step, (params, optimizer_state), batches, num_steps)
    return *end, metrics


def local_update(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    params: Params,
    batches: chex.ArrayTree,
    num_steps: Int[Array, ""] | int | None = None,
) -> tuple[Params, Metrics]:
    """Train from `params` x with a new optimizer state to y: a participant's pseudo-gradient."""
    trained, _, metrics = local_steps(
        loss_fn, optimizer, params, optimizer.init(params), batches, num_steps
    )
    return subtract(params, trained), metrics


def fold_steps(
    step: Callable[[Carry, chex.ArrayTree], tuple[Carry, Metrics]],
    start: Carry,
    batches: chex.ArrayTree,
    num_steps: Int[Array, ""] | int | None = None,
) -> tuple[Carry, Metrics]:
    """Fold a function over a participant's batches, and average its metrics."""
    valid = valid_steps(batches, num_steps)
    if valid is None:
        end, metrics = jax.lax.scan(step, start, batches)
        return end, jax.tree.map(lambda x: jnp.mean(x.astype(jnp.float32)), metrics)

    # Valid steps first. Later places repeat a valid batch, so that the values of padding, which may
    # be NaN, reach no gradient.
    taken = jnp.sum(valid, dtype=jnp.int32)
    places = jnp.argsort(~valid, stable=True)

    def batch_at(i: Int[Array, ""]) -> chex.ArrayTree:
        place = places[jnp.where(i < taken, i, 0)]
        return jax.tree.map(
            lambda b: jax.lax.dynamic_index_in_dim(b, place, keepdims=False), batches
        )

    def add_step(i: Int[Array, ""], carry: tuple[Carry, Metrics]) -> tuple[Carry, Metrics]:
        at, totals = carry
        at, metrics = step(at, batch_at(i))
        return at, jax.tree.map(lambda t, m: t + jnp.asarray(m, jnp.float32), totals, metrics)

    def add_step_if_valid(carry: tuple[Carry, Metrics], i: Int[Array, ""]) -> tuple[Any, None]:
        after = add_step(i, carry)
        return select(i < taken, after, carry), None

    metrics = jax.eval_shape(lambda: step(start, batch_at(jnp.int32(0)))[1])
    totals = jax.tree.map(lambda m: jnp.zeros(m.shape, jnp.float32), metrics)
    if num_steps is None or is_all_or_none(num_steps):
        indices = jnp.arange(valid.shape[0], dtype=jnp.int32)
        (end, totals), _ = jax.lax.scan(add_step_if_valid, (start, totals), indices)
    else:
        end, totals = jax.lax.fori_loop(0, taken, add_step, (start, totals))
    return end, jax.tree.map(lambda t: t / jnp.maximum(taken, 1), totals)


def gradient_and_metrics(
    loss_fn: LossFn, params: Params, batch: chex.ArrayTree
) -> tuple[Params, Metrics]:
    """Return the gradient of a loss in the parameters, and its metrics with `"loss"`."""
    # The gradient's norm is among them if `loss_fn` is a `fedpax.algorithm.WithGradientNorm`.
    check_float_params(params)
    gradient, metrics = jax.grad(functools.partial(loss_and_metrics, loss_fn), has_aux=True)(
        params, batch
    )
    if isinstance(loss_fn, WithGradientNorm):
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradient))
        measured = {
            "gradient_norm": norm,
            "non_finite_step_fraction": (~jnp.isfinite(norm)).astype(jnp.float32),
        }
        if taken := sorted(measured.keys() & metrics):
            raise ArgumentError(
                f"loss_fn returned the metrics {taken}, which WithGradientNorm adds itself. Rename "
                "them, or pass the loss without WithGradientNorm."
            )
        metrics = {**metrics, **measured}
    return gradient, metrics


def local_metrics(
    loss_fn: LossFn,
    params: Params,
    batches: chex.ArrayTree,
    num_steps: Int[Array, ""] | int | None = None,
) -> Metrics:
    """Average the loss and the metrics of a model over a participant's valid examples."""

    def metrics(batch: chex.ArrayTree) -> Metrics:
        measured = loss_and_metrics(loss_fn, params, batch)[1]
        return jax.tree.map(lambda m: jnp.asarray(m, jnp.float32), measured)

    return mean_over_examples(metrics, batches, num_steps)


def full_gradient(
    loss_fn: LossFn,
    params: Params,
    batches: chex.ArrayTree,
    num_steps: Int[Array, ""] | int | None = None,
) -> Params:
    """Average the gradient at one model over a participant's valid examples."""
    return mean_over_examples(
        lambda batch: gradient_and_metrics(loss_fn, params, batch)[0], batches, num_steps
    )


def mean_over_examples(
    function: Callable[[chex.ArrayTree], chex.ArrayTree],
    batches: chex.ArrayTree,
    num_steps: Int[Array, ""] | int | None,
) -> Any:
    """Average a function of a batch, where a batch counts by the sum of its mask."""
    first = jax.tree.map(lambda b: jax.ShapeDtypeStruct(b.shape[1:], b.dtype), batches)
    like = jax.eval_shape(function, first)

    def add(carry: tuple[Any, jax.Array], batch: chex.ArrayTree) -> tuple[Any, Metrics]:
        total, weight = carry
        has_mask = isinstance(batch, Mapping) and MASK in batch
        share = jnp.mean(jnp.asarray(batch[MASK], jnp.float32)) if has_mask else jnp.float32(1)
        added = jax.tree.map(lambda t, v: t + share * v, total, function(batch))
        return (added, weight + share), {}

    start = accumulator(like), jnp.float32(0)
    (total, weight), _ = fold_steps(add, start, batches, num_steps)
    return mean_of(total, weight, like)


def count_steps(
    batches: chex.ArrayTree, num_steps: Int[Array, ""] | int | None = None
) -> Int[Array, ""]:
    """Count a participant's valid steps: those that `local_steps` takes."""
    valid = valid_steps(batches, num_steps)
    if valid is None:
        return jnp.int32(jax.tree.leaves(batches)[0].shape[0])
    return jnp.sum(valid, dtype=jnp.int32)


def accumulator(params: Params) -> Params:
    """Return zeros to sum gradients in, of at least float32."""
    return jax.tree.map(
        lambda p: jnp.zeros_like(p, dtype=jnp.promote_types(p.dtype, jnp.float32)), params
    )


def mean_of(total: Params, count: Num[Array, ""], like: Params) -> Params:
    """Divide a sum by its count, in the dtypes of `like`; 0 where the count is 0."""
    divisor = jnp.where(count == 0, 1, count)
    return jax.tree.map(lambda t, p: (t / divisor).astype(p.dtype), total, like)


def optimizer_step(
    optimizer: optax.GradientTransformation,
    gradient: Params,
    state: optax.OptState,
    params: Params,
    **extra: Any,
) -> tuple[Params, optax.OptState]:
    """Step parameters along a gradient. Parameters and state keep their dtypes."""
    # A float32 setting to differentiate in would make the state of bfloat16 parameters float32.
    with explain_needs():
        updates, stepped = optimizer.update(gradient, state, params, **extra)
    return optax.apply_updates(params, updates), jax.tree.map(_like, stepped, state)


def _like(new: Any, old: Any) -> Any:
    dtype = jnp.result_type(old)
    return new if jnp.result_type(new) == dtype else jnp.asarray(new).astype(dtype)


# ---- terms for `after(proximal_term(mu, x), client_optimizer)`; SGD's rate


def after(*terms_and_optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Chain terms and an optimizer, which does not get the loss: its gradient lacks the terms."""
    *terms, optimizer = terms_and_optimizer
    optimizer = optax.with_extra_args_support(optimizer)

    def update(gradient: Params, state: Any, params: Any = None, **extra: Any) -> Any:
        kept = {k: x for k, x in extra.items() if k not in ("value", "grad", "value_fn")}
        return optimizer.update(gradient, state, params, **kept)

    return optax.chain(*terms, optax.GradientTransformationExtraArgs(optimizer.init, update))


def added_term(term: Params) -> optax.GradientTransformation:
    """Add a constant to each gradient: `g + term`."""
    return optax.stateless(lambda gradient, params: optax.tree.add(gradient, term))


def proximal_term(mu: Any, x: Params) -> optax.GradientTransformation:
    """Add the gradient of `mu / 2 |y - x|^2` to the gradient g of the loss: `g + mu (y - x)`."""

    def add(gradient: Params, y: Params | None) -> Params:
        return jax.tree.map(
            lambda g, pull: g + pull.astype(g.dtype), gradient, scale(mu, subtract(y, x))
        )

    return optax.stateless(add)


def constant_learning_rate(optimizer: optax.GradientTransformation, params: Params) -> float | None:
    """Return eta if each update of an optimizer is `-eta` times the gradient, as of `optax.sgd`."""
    # Then the sum of K gradients is the distance of K steps divided by eta, which rounding spoils
    # in narrow dtypes.
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    has_state = bool(jax.tree.leaves(jax.eval_shape(optimizer.init, params)))
    if has_state or not dtypes <= {"float32", "float64"}:
        return None
    update = jax.make_jaxpr(lambda g, w: optimizer.update(g, optimizer.init(w), w)[0])
    with explain_needs():
        jaxpr = update(params, params).jaxpr
    made_by = {id(equation.outvars[0]): equation for equation in jaxpr.eqns}
    rates = set()
    for gradient, result in zip(jaxpr.invars, jaxpr.outvars, strict=False):  # then params
        equation = made_by.get(id(result))
        if equation is None or equation.primitive.name != "mul":
            return None
        factor, factored = equation.invars
        if factored is not gradient or not hasattr(factor, "val"):
            return None
        rates.add(-float(factor.val))
    return rates.pop() if len(rates) == 1 else None

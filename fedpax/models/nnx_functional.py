"""A flax.nnx module as pure functions: `init` makes its parameters, `apply` computes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
from flax import nnx

Params: TypeAlias = dict[str, Any]


class FunctionalModel(NamedTuple):
    """A model as functions of its parameters, which optimizers and federated primitives handle.

    Attributes:
      init: makes parameters from a random key: `params = init(key)`, nested dicts of arrays. It
        runs under `jax.eval_shape`, and under `jax.jit` with `out_shardings`, so a model that no
        single device could hold is made in its parts.
      apply: `apply(params, *inputs)` is the module's `__call__`.
      logical_axes: what names the parameters' axes: the same dicts with a tuple for each array, as
        `fedpax.parallel.axes.shardings` takes it.
      bind: `bind(params)` is the module with these parameters, for its other methods.
    """

    init: Callable[[jax.Array], Params]
    apply: Callable[..., Any]
    logical_axes: Params
    bind: Callable[[Params], Any]


def to_functional(constructor: Callable[..., nnx.Module]) -> FunctionalModel:
    """Turns a flax.nnx module into pure functions.

    A parameter names its axes by metadata, `nnx.Param(value, logical_axes=("embed", "mlp"))`; one
    without them is whole on every device.

    Args:
      constructor: makes the module from `rngs=nnx.Rngs(key)`: a class, or a `functools.partial`
        of one with its other arguments.

    Returns:
      The module's functions; see `FunctionalModel`.

    Raises:
      ValueError: the module keeps a state besides its parameters, such as batch statistics, or
        names another number of axes than a parameter has.

    Example:
      >>> import functools
      >>> model = to_functional(functools.partial(nnx.Linear, 3, 2))
      >>> params = model.init(jax.random.key(0))
      >>> params["kernel"].shape, model.logical_axes["kernel"]
      ((3, 2), (None, None))
      >>> model.apply(params, jax.numpy.ones((5, 3))).shape
      (5, 2)
    """

    def parameters(key: jax.Array) -> nnx.State:
        return nnx.state(constructor(rngs=nnx.Rngs(key)), nnx.Param)

    module = nnx.eval_shape(lambda: constructor(rngs=nnx.Rngs(0)))
    graph, abstract, *rest = nnx.split(module, nnx.Param, ...)
    if others := [".".join(map(str, path)) for path, _ in nnx.to_flat_state(rest[0])]:
        raise ValueError(
            f"constructor makes a module with a state besides its parameters, {', '.join(others)}, "
            "which apply(params, ...) could not update: use layers without one, such as "
            "normalization over features in place of batches."
        )
    logical_axes = jax.tree.map(
        _logical_axes, abstract, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(parameters(key))

    def bind(params: Params) -> Any:
        return nnx.merge(graph, params)

    def apply(params: Params, *args: Any, **kwargs: Any) -> Any:
        return bind(params)(*args, **kwargs)

    return FunctionalModel(init, apply, nnx.to_pure_dict(logical_axes), bind)


def _logical_axes(parameter: nnx.Variable) -> tuple[str | None, ...]:
    shape = parameter.get_value().shape
    names = parameter.get_metadata().get("logical_axes", (None,) * len(shape))
    if len(names) != len(shape):
        raise ValueError(
            f"A parameter of shape {shape} has logical_axes={names}: give one name, or None, for each "
            "axis."
        )
    return tuple(names)

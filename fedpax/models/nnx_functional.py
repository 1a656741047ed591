"""Pure functions of a flax.nnx module: `init` makes the parameters, `apply` uses them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from fedpax.algorithm import Params
from fedpax.errors import ArgumentError


def _bind_nothing(params: Params) -> Any:
    raise ArgumentError(
        "bind(params) returns a module, but this FunctionalModel has functions, without one. Call "
        "apply(params, ...)."
    )


class FunctionalModel(NamedTuple):
    """A model as pure functions of its parameters: `init` and `apply` are enough.

    Attributes:
        init: `init(key)` makes the parameters, nested dicts of float32 arrays. Under `jax.jit` with
            `out_shardings`, it creates a model that does not fit one device sharded.
        apply: `apply(params, *inputs)` is the module's `__call__`.
        logical_axes: a tuple of axis names for each parameter, as
            `fedpax.parallel.axes.shardings` takes them. Default None: replicated.
        bind: `bind(params)` returns the module with these parameters, for its other methods.
            Default: raise a ValueError.

    Example:
        >>> linear = FunctionalModel(
        ...     init=lambda key: {"w": jax.random.normal(key, (3,))},
        ...     apply=lambda params, x: x @ params["w"],
        ... )
        >>> linear.apply(linear.init(jax.random.key(0)), jax.numpy.ones((5, 3))).shape
        (5,)
    """

    init: Callable[[jax.Array], Params]
    apply: Callable[..., Any]
    logical_axes: Params | None = None
    bind: Callable[[Params], Any] = _bind_nothing


def count_params(model: FunctionalModel) -> int:
    """Count the parameters of a model."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def to_functional(constructor: Callable[..., nnx.Module]) -> FunctionalModel:
    """Turn a flax.nnx module into pure functions.

    A parameter names its axes by metadata: `nnx.Param(value, logical_axes=("embed", "mlp"))`. A
    parameter without this metadata is replicated on all devices.

    Args:
        constructor: a class of modules, or a `functools.partial` of one, called as
            `constructor(rngs=nnx.Rngs(key))`.

    Raises:
        ValueError: the module has state besides its parameters, such as batch statistics, or
            a parameter has another number of axes than names.

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
    if other_state := [".".join(map(str, path)) for path, _ in nnx.to_flat_state(rest[0])]:
        raise ArgumentError(
            f"The module has state besides its parameters, {', '.join(other_state)}, which "
            "apply(params, ...) could not update. Use layers without such state: for example "
            "normalization over features instead of batch normalization."
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


def functional_model(module: Callable[..., nnx.Module], config: Any) -> FunctionalModel:
    """Make the functions of a module once for equal configurations: JAX compiles by function."""
    try:
        hash(config)
    except TypeError:  # a field is a list
        return to_functional(functools.partial(module, config))
    model = _functional_model(module, config)
    return model._replace(logical_axes=copy.deepcopy(model.logical_axes))


@functools.cache
def _functional_model(module: Callable[..., nnx.Module], config: Any) -> FunctionalModel:
    return to_functional(functools.partial(module, config))


def _logical_axes(parameter: nnx.Variable) -> tuple[str | None, ...]:
    shape = parameter.get_value().shape
    names = parameter.get_metadata().get("logical_axes", (None,) * len(shape))
    if len(names) != len(shape):
        raise ArgumentError(
            f"A parameter of shape {shape} has logical_axes={names}: expected one name, or None, "
            "for each axis."
        )
    return tuple(names)

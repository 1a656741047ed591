"""Run a jaxpr inside a `shard_map` that makes one more mesh axis manual."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from fedpax.primitives._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    bind_again,
    context_of,
)


def with_manual_axis(jaxpr: ClosedJaxpr, axis: str) -> Callable[..., list[jax.Array]]:
    """Return a jaxpr as a function for a region that is manual over a mesh axis."""
    # A jaxpr contains the mesh it was traced on: in the types of its values, in the shardings
    # among its parameters, in the contexts of its equations. JAX raises if it runs where the type
    # of an axis differs. This interpreter binds each equation again with the axis manual, and
    # retraces the jaxprs among the parameters (of loops, conditionals and calls) in the same way.
    return functools.partial(_Interpreter(axis).run, jaxpr)


def _without_mesh(const: Any) -> Any:
    """Convert a constant to NumPy, because the type of a JAX array contains its mesh."""
    # Literals of a jaxpr have such a type too, but are not instances of `jax.Array`.
    concrete = hasattr(const, "aval") and not isinstance(const, jax.core.Tracer)
    if concrete and not jnp.issubdtype(const.dtype, jax.dtypes.extended):
        return np.asarray(const)
    return const


class _Interpreter:
    """Bind equations again with one mesh axis manual."""

    def __init__(self, axis: str):
        self.axis = axis

    def run(self, closed: ClosedJaxpr, *args: Any) -> list:
        jaxpr = closed.jaxpr
        consts = map(_without_mesh, closed.consts)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(v):
            return _without_mesh(v.val) if isinstance(v, Literal) else values[v]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            with ExitStack() as stack:
                stack.enter_context(context_of(eqn))
                mesh = jax.sharding.get_abstract_mesh()
                if not mesh.empty:
                    stack.enter_context(jax.sharding.use_abstract_mesh(self.mesh(mesh)))
                outputs = self.bind(eqn, inputs)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def bind(self, eqn: JaxprEqn, inputs: list) -> list:
        if "call_jaxpr" in eqn.params and eqn.primitive.name.startswith("custom_"):
            # A custom derivative. Differentiation is complete, so only its function is needed.
            return self.run(eqn.params["call_jaxpr"], *inputs)
        if eqn.primitive.name == "shard_map":
            # Its function must be traced where the axes that it makes manual have names.
            body = ClosedJaxpr(eqn.params["jaxpr"], ())
            outputs = jax.shard_map(
                lambda *args: tuple(self.run(body, *args)),
                in_specs=tuple(eqn.params["in_specs"]),
                out_specs=tuple(eqn.params["out_specs"]),
                axis_names=set(eqn.params["newly_manual_axes"]),
                check_vma=eqn.params["check_vma"],  # the types of its collectives depend on it
            )(*inputs)
            return list(outputs)
        if eqn.primitive.name == "pallas_call":
            # A kernel contains no mesh; only the types of the results do.
            types = tuple(self.aval(a) for a in eqn.params["out_avals"])
            return bind_again(eqn, inputs, eqn.params | {"out_avals": types})
        params = {name: self.param(value) for name, value in eqn.params.items()}
        return bind_again(eqn, inputs, params)

    def param(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return self.jaxpr(value)
        if isinstance(value, Jaxpr):
            return self.jaxpr(ClosedJaxpr(value, ())).jaxpr
        if isinstance(value, NamedSharding):
            return NamedSharding(self.mesh(value.mesh), value.spec)
        if isinstance(value, AbstractMesh):
            return self.mesh(value)
        if type(value) in (tuple, list):
            return type(value)(map(self.param, value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.param, value))
        return value

    def jaxpr(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        avals = [self.aval(a) for a in closed.in_avals]
        return jax.make_jaxpr(functools.partial(self.run, closed))(*avals)

    def aval(self, aval: Any) -> Any:
        sharding = getattr(aval, "sharding", None)
        if sharding is None or sharding.mesh.empty:
            return aval
        return aval.update(sharding=sharding.update(mesh=self.mesh(sharding.mesh)))

    def mesh(self, mesh: Mesh | AbstractMesh) -> AbstractMesh:
        abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
        if self.axis not in abstract.axis_names:
            return abstract
        return abstract.update_axis_types({self.axis: AxisType.Manual})

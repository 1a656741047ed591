"""Everything of JAX that fedpax uses and JAX does not promise to keep.

No other module touches `jax.extend` or `jax.interpreters`. Three things live here: how a primitive
is defined from its rules, how a function becomes a jaxpr and back, and `with_manual_axis`, which
runs a jaxpr that was traced on automatic or explicit mesh axes where one of them is manual.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    jaxpr_as_fun,
)
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

__all__ = [
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Var",
    "Zero",
    "aval_of",
    "define",
    "depends_on",
    "eliminate_dead_code",
    "evaluate",
    "inner_jaxprs",
    "is_linear",
    "is_rematerialized",
    "is_zero",
    "prune",
    "reads_axis_index",
    "rebind",
    "register_pruning",
    "residual_sources",
    "set_implementation",
    "set_transpose",
    "strip_final",
    "trace",
    "with_manual_axis",
    "zero_tangent",
]

Zero = ad.Zero
Aval = Any

# The names of `jax.checkpoint`'s primitive.
CHECKPOINT_PRIMITIVES = ("checkpoint", "remat2")

# Equations that compute nothing.
LAYOUT = frozenset(["broadcast_in_dim", "reshape", "squeeze", "transpose"])


def is_zero(tangent: Any) -> bool:
    """Whether a tangent or cotangent is a symbolic zero."""
    return type(tangent) is ad.Zero


def zero_tangent(primal: Any) -> ad.Zero:
    """The symbolic zero that is the tangent of a value."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def is_linear(argument: Any) -> bool:
    """Whether a transpose rule is asked for the cotangent of this argument."""
    return ad.is_undefined_primal(argument)


def define(
    primitive: Primitive,
    *,
    abstract: Callable,
    implementation: Callable,
    jvp: Callable | None = None,
    batch: Callable | None = None,
    transpose: Callable | None = None,
) -> None:
    """Registers all rules of a primitive; one without arguments has neither jvp nor batch.

    Args:
        primitive: the primitive.
        abstract: `(*avals, **params) -> (avals, effects)`.
        implementation: the primitive in terms of other JAX functions; what it lowers to.
        jvp: `(primals, tangents, **params) -> (outputs, tangents)` with symbolic zeros.
        batch: `(axis, args, dims, **params) -> (outputs, dims)`; `axis` has `name`, `size`,
            `spmd_name`, and None among the dims means not batched.
        transpose: `(cotangents, *args, **params) -> cotangents of args`, with `ad.UndefinedPrimal`
            for the linear arguments.
    """
    primitive.def_effectful_abstract_eval(abstract)
    set_implementation(primitive, implementation)
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        set_transpose(primitive, transpose)
    if batch is None:
        return

    def batch_rule(axis, args, dims, **params):
        if all(d is None for d in dims) and not reads_axis_index(params.get("jaxpr"), axis.name):
            out = primitive.bind(*args, **params)
            return out, [None] * len(out) if primitive.multiple_results else None
        return batch(axis, args, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batch_rule


def set_transpose(primitive: Primitive, transpose: Callable) -> None:
    """Register the transpose rule of a primitive, as `define` takes it."""
    ad.primitive_transposes[primitive] = transpose


def set_implementation(primitive: Primitive, implementation: Callable) -> None:
    """Registers what a primitive lowers to, instead of what it lowered to before."""
    primitive.def_impl(functools.partial(_run_jitted, implementation))
    mlir.register_lowering(
        primitive, mlir.lower_fun(implementation, multiple_results=primitive.multiple_results)
    )


def _run_jitted(implementation: Callable, *args, **params):
    """Outside of any trace a primitive runs as its own compiled program."""
    if "jaxpr" not in params:
        return _jitted(implementation, tuple(sorted(params.items())))(*args)
    run = jax.jit(functools.partial(implementation, **params))
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return run(*args)
    # A function is traced at every call, since what it closes over may have changed; what it mostly
    # comes to is the same text, and that is compiled once.
    lowered = run.trace(*args).lower(lowering_platforms=(jax.default_backend(),))
    text = hashlib.sha256(lowered.as_text().encode()).digest()
    types = tuple(map(jax.typeof, args))
    return _of_text(_Text((text, types, jax.sharding.get_abstract_mesh()), run))(*args)


@functools.lru_cache(maxsize=512)
def _jitted(implementation: Callable, params: tuple) -> Callable:
    return jax.jit(functools.partial(implementation, **dict(params)))


class _Text:
    """A function by the text that it lowers to."""

    def __init__(self, key: tuple, run: Callable):
        self.key, self.run = key, run

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Text) and self.key == other.key


@functools.lru_cache(maxsize=512)
def _of_text(text: _Text) -> Callable:
    """The first function that had this text: `jax.jit` keeps what it compiled for it."""
    return text.run


# ---- functions and jaxprs


def trace(fn: Callable, avals: Sequence[Aval]) -> tuple[ClosedJaxpr, list]:
    """Traces `fn` on flat arguments and hoists the values that it closes over.

    Args:
        fn: takes flat arrays, returns a flat list of arrays.
        avals: the types of the arguments.

    Returns:
        A jaxpr whose first inputs are the hoisted values, and these values. Only numpy constants,
        which belong to the program's text, stay inside the jaxpr.
    """
    closed = jax.make_jaxpr(fn)(*avals)
    hoisted = [i for i, c in enumerate(closed.consts) if isinstance(c, jax.Array)]
    if not hoisted:
        return closed, []
    values = [closed.consts[i] for i in hoisted]

    def with_arguments(*flat):
        consts = list(closed.consts)
        for i, value in zip(hoisted, flat, strict=False):
            consts[i] = value
        return jax.core.eval_jaxpr(closed.jaxpr, consts, *flat[len(hoisted) :])

    return jax.make_jaxpr(with_arguments)(*map(jax.typeof, values), *avals), values


def evaluate(jaxpr: ClosedJaxpr, *args) -> list:
    """Runs a jaxpr on flat arguments; the equations are bound again, so it can be transformed."""
    return jaxpr_as_fun(jaxpr)(*args)


def depends_on(jaxpr: ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs may depend on the marked inputs; a no is certain, a yes is not."""
    marked = {v for v, mark in zip(jaxpr.jaxpr.invars, inputs, strict=True) if mark}
    for eqn in jaxpr.jaxpr.eqns:
        if any(v in marked for v in eqn.invars if not isinstance(v, Literal)):
            marked.update(eqn.outvars)
    return [not isinstance(v, Literal) and v in marked for v in jaxpr.jaxpr.outvars]


def reads_axis_index(jaxpr: ClosedJaxpr | None, axis_name: Any) -> bool:
    """Whether a function reads its index along the axis of a vmap, which no argument shows."""
    effects = jaxpr.effects if jaxpr is not None else ()
    return any(getattr(effect, "name", None) == axis_name for effect in effects)


def residual_sources(jaxpr: ClosedJaxpr, outputs: int) -> tuple[list[tuple[str, int]], list[bool]]:
    """Finds where the residuals, the outputs after the first `outputs`, can be had from.

    Returns:
        For each residual ("argument", i) or ("output", i), the latter counted among the outputs
        that remain; and for each whether it has to remain, because it stands nowhere else.
    """
    place: dict[Any, tuple[str, int]] = {}
    for i, v in enumerate(jaxpr.jaxpr.outvars[:outputs]):
        if not isinstance(v, Literal):
            place.setdefault(v, ("output", i))
    for i, v in enumerate(jaxpr.jaxpr.invars):
        place[v] = ("argument", i)
    sources, extra = [], []
    for v in jaxpr.jaxpr.outvars[outputs:]:
        known = None if isinstance(v, Literal) else place.get(v)
        extra.append(known is None)
        sources.append(known or ("output", outputs + sum(extra[:-1])))
        if not isinstance(v, Literal):
            place.setdefault(v, sources[-1])
    return sources, extra


def strip_final(
    jaxpr: ClosedJaxpr, outputs: int, primitive: Primitive
) -> tuple[ClosedJaxpr, list[JaxprEqn | None]]:
    """Leaves out a primitive where it is the last step to an output after the first `outputs`.

    Returns:
        The jaxpr, in which such an output is the primitive's argument, and for each of the outputs
        after the first `outputs` the equation that makes the former output of it, or None.
    """
    makers = {e.outvars[0]: e for e in jaxpr.jaxpr.eqns if e.primitive is primitive}
    changed, skipped = list(jaxpr.jaxpr.outvars), []
    for i, v in enumerate(jaxpr.jaxpr.outvars[outputs:], outputs):
        eqn = None if isinstance(v, Literal) else makers.get(v)
        skipped.append(eqn)
        changed[i] = v if eqn is None else eqn.invars[0]
    return ClosedJaxpr(jaxpr.jaxpr.replace(outvars=changed), jaxpr.consts), skipped


def prune(jaxpr: ClosedJaxpr, used: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """Drops the outputs that are not used, then the equations and inputs that nothing needs."""
    pruned, used_inputs = pe.dce_jaxpr(jaxpr.jaxpr, list(used))
    return jax.make_jaxpr(functools.partial(jax.core.eval_jaxpr, pruned, jaxpr.consts))(
        *[a for a, u in zip(jaxpr.in_avals, used_inputs, strict=True) if u]
    ), list(used_inputs)


def aval_of(v: Var | Literal) -> Aval:
    """The type of a value in a jaxpr."""
    return v.aval


def eliminate_dead_code(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Drops the equations that no output needs, and keeps all inputs."""
    alive, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.out_avals), instantiate=True)
    return ClosedJaxpr(alive, jaxpr.consts)


def rebind(eqn: JaxprEqn, inputs: Sequence[Any], params: dict[str, Any] | None = None) -> list:
    """Binds an equation's primitive again, in the equation's context."""
    with eqn.ctx.manager:
        bound = eqn.primitive.get_bind_params(eqn.params if params is None else params)
        outputs = eqn.primitive.bind(*inputs, **bound)
    return outputs if eqn.primitive.multiple_results else [outputs]


def is_rematerialized(jaxpr: ClosedJaxpr) -> bool:
    """Whether all that a function computes is under `jax.checkpoint`, without a policy."""
    eqns = jaxpr.jaxpr.eqns
    under = [is_checkpoint(eqn) for eqn in eqns]
    # A vmap brings what is not batched into shape outside.
    rest = (eqn.primitive.name for eqn, own in zip(eqns, under, strict=True) if not own)
    return any(under) and LAYOUT.issuperset(rest) and not jaxpr.effects


def is_checkpoint(eqn: JaxprEqn) -> bool:
    """Whether an equation calls a function under `jax.checkpoint`, without a policy."""
    if eqn.primitive.name == "jit":
        return is_rematerialized(eqn.params["jaxpr"])
    return eqn.primitive.name in CHECKPOINT_PRIMITIVES and eqn.params["policy"] is None


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def register_pruning(primitive: Primitive) -> None:
    """Lets dead-code elimination look inside a primitive that holds its function as `jaxpr`."""

    def rule(used_outputs, eqn):
        if not any(used_outputs) and not eqn.effects:
            return [False] * len(eqn.invars), None
        jaxpr, used_inputs = prune(eqn.params["jaxpr"], used_outputs)
        return used_inputs, eqn.replace(
            params=eqn.params | {"jaxpr": jaxpr},
            invars=[v for v, u in zip(eqn.invars, used_inputs, strict=True) if u],
            outvars=[v for v, u in zip(eqn.outvars, used_outputs, strict=True) if u],
        )

    pe.dce_rules[primitive] = rule


# ---- one axis made manual


def with_manual_axis(jaxpr: ClosedJaxpr, axis: str) -> Callable[..., list]:
    """The function of a jaxpr, to be called in a region that is manual over a mesh axis.

    A jaxpr remembers the mesh that it was traced on: in the types of its values, in the shardings
    among its parameters, in the context of its equations. JAX refuses to run it where the type of
    an axis differs. This interpreter binds each equation again with the axis declared manual, and
    traces the jaxprs that stand in the parameters (of loops, branches, calls) again likewise.

    Args:
        jaxpr: traced where `axis` was automatic or explicit; nothing in it is sharded over it.
        axis: the name of the mesh axis.

    Returns:
        A function of the jaxpr's flat arguments that returns its flat outputs.
    """
    return functools.partial(_Remesh(axis).run, jaxpr)


def _without_mesh(const: Any) -> Any:
    """A constant array as one of numpy, because an array of JAX is typed by the mesh it is on."""
    # A jaxpr's literals are typed so too, but are no `jax.Array`.
    known = hasattr(const, "aval") and not isinstance(const, jax.core.Tracer)
    if known and not jnp.issubdtype(const.dtype, jax.dtypes.extended):
        return np.asarray(const)
    return const


class _Remesh:
    def __init__(self, axis: str):
        self.axis = axis

    def run(self, closed: ClosedJaxpr, *args) -> list:
        jaxpr = closed.jaxpr
        consts = map(_without_mesh, closed.consts)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(v):
            return _without_mesh(v.val) if isinstance(v, Literal) else values[v]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            with ExitStack() as stack:
                stack.enter_context(eqn.ctx.manager)
                mesh = jax.sharding.get_abstract_mesh()
                if not mesh.empty:
                    stack.enter_context(jax.sharding.use_abstract_mesh(self.mesh(mesh)))
                outputs = self.bind(eqn, inputs)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def bind(self, eqn, inputs: list) -> list:
        if "call_jaxpr" in eqn.params and eqn.primitive.name.startswith("custom_"):
            # A custom derivative: all differentiation lies behind us, only the function is left.
            return self.run(eqn.params["call_jaxpr"], *inputs)
        if eqn.primitive.name == "shard_map":
            # Its function is traced where the axes that it makes manual have names.
            body = ClosedJaxpr(eqn.params["jaxpr"], ())
            outputs = jax.shard_map(
                lambda *args: tuple(self.run(body, *args)),
                in_specs=tuple(eqn.params["in_specs"]),
                out_specs=tuple(eqn.params["out_specs"]),
                axis_names=set(eqn.params["newly_manual_axes"]),
                check_vma=eqn.params["check_vma"],  # its collectives are typed by what varies
            )(*inputs)
            return list(outputs)
        if eqn.primitive.name == "pallas_call":
            # Its function is a kernel, which knows of no mesh; only the results' types do.
            types = tuple(self.aval(a) for a in eqn.params["out_avals"])
            params = eqn.primitive.get_bind_params(eqn.params | {"out_avals": types})
        else:
            params = eqn.primitive.get_bind_params(
                {name: self.param(value) for name, value in eqn.params.items()}
            )
        outputs = eqn.primitive.bind(*inputs, **params)
        return outputs if eqn.primitive.multiple_results else [outputs]

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

    def aval(self, aval: Aval) -> Aval:
        sharding = getattr(aval, "sharding", None)
        if sharding is None or sharding.mesh.empty:
            return aval
        return aval.update(sharding=sharding.update(mesh=self.mesh(sharding.mesh)))

    def mesh(self, mesh: Mesh | AbstractMesh) -> AbstractMesh:
        abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
        if self.axis not in abstract.axis_names:
            return abstract
        return abstract.update_axis_types({self.axis: AxisType.Manual})

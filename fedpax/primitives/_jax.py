"""Collect all unstable JAX interfaces that fedpax uses: `jax.extend` and `jax.interpreters`."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var
from jax.extend.core import get_opaque_trace_state as get_opaque_trace_state
from jax.extend.core import jaxpr_as_fun
from jax.extend.mlir import passmanager
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

Zero = ad.Zero
Aval = Any


def is_zero(tangent: Any) -> bool:
    """Return whether a tangent or cotangent is a symbolic zero."""
    return type(tangent) is ad.Zero


def zero_tangent(primal: Any) -> ad.Zero:
    """Return a symbolic zero tangent for a value."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def is_linear(argument: Any) -> bool:
    """Return whether a transpose rule must return the cotangent of an argument."""
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
    """Register the rules of a primitive. A primitive without arguments has no `jvp` or `batch`."""
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
    """Register the transpose rule of a primitive, in the form that `define` takes."""
    ad.primitive_transposes[primitive] = transpose


def set_implementation(primitive: Primitive, implementation: Callable) -> None:
    """Register the function that a primitive lowers to; it replaces an earlier one."""
    primitive.def_impl(functools.partial(_run_jitted, implementation))
    mlir.register_lowering(
        primitive, mlir.lower_fun(implementation, multiple_results=primitive.multiple_results)
    )


def _run_jitted(implementation: Callable, *args, **params):
    """Run a primitive outside of any trace as a compiled program of its own."""
    if "jaxpr" not in params:
        return _jitted(implementation, tuple(sorted(params.items())))(*args)
    run = jax.jit(functools.partial(implementation, **params))
    if jax.config.values["jax_disable_jit"]:
        return run(*args)
    # Traced at every call, because the values that the function closes over can change. Each
    # lowered text is compiled once.
    lowered = run.trace(*args).lower(lowering_platforms=(jax.default_backend(),))
    text = hashlib.sha256(lowered.as_text().encode()).digest()
    types = tuple(map(jax.typeof, args))
    key = text, types, jax.sharding.get_abstract_mesh()
    return _first_of_text(_LoweredFunction(key, run))(*args)


@functools.lru_cache(maxsize=512)
def _jitted(implementation: Callable, params: tuple) -> Callable:
    return jax.jit(functools.partial(implementation, **dict(params)))


class _LoweredFunction:
    """A jitted function; two are equal if they lower to the same text."""

    def __init__(self, key: tuple, run: Callable):
        self.key, self.run = key, run

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LoweredFunction) and self.key == other.key


@functools.lru_cache(maxsize=512)
def _first_of_text(function: _LoweredFunction) -> Callable:
    """Return the first function with this text; `jax.jit` caches its compiled program."""
    return function.run


def trace(
    fn: Callable[..., list], *args: Any, **kwargs: Any
) -> tuple[ClosedJaxpr, list[jax.Array]]:
    """Trace a function and hoist the arrays that it closes over."""
    closed = jax.make_jaxpr(fn)(*args, **kwargs)
    hoisted = [i for i, c in enumerate(closed.consts) if isinstance(c, jax.Array)]
    if not hoisted:
        return closed, []
    values = [closed.consts[i] for i in hoisted]

    def with_arguments(*flat):
        consts = list(closed.consts)
        for i, value in zip(hoisted, flat, strict=False):
            consts[i] = value
        return jax.core.eval_jaxpr(closed.jaxpr, consts, *flat[len(hoisted) :])

    return jax.make_jaxpr(with_arguments)(*map(jax.typeof, values), *closed.in_avals), values


def argument_names(jaxpr: ClosedJaxpr) -> tuple[str, ...]:
    """Return the names of a traced function's flat arguments, such as `state.params['w']`."""
    names = jaxpr.jaxpr.debug_info.arg_names or ("",) * len(jaxpr.in_avals)
    return tuple(name or "argument" for name in names)


def result_names(jaxpr: ClosedJaxpr) -> tuple[str, ...]:
    """Return the names of the results, such as `result[0]`, or those set by `name_results`."""
    paths = jaxpr.jaxpr.debug_info.result_paths
    if not isinstance(paths, tuple) or len(paths) != len(jaxpr.jaxpr.outvars):
        return ("result",) * len(jaxpr.jaxpr.outvars)
    return tuple(path or "result" for path in paths)


def name_results(jaxpr: ClosedJaxpr, names: Sequence[str]) -> ClosedJaxpr:
    """Set the names of the results of a jaxpr, for reports."""
    debug_info = jaxpr.jaxpr.debug_info._replace(result_paths=tuple(names))
    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(debug_info=debug_info))


def evaluate(jaxpr: ClosedJaxpr, *args: Any) -> list:
    """Run a jaxpr on flat arguments. Equations are bound again, so it can be transformed."""
    return jaxpr_as_fun(jaxpr)(*args)


def rebind(
    eqn: JaxprEqn,
    inputs: Sequence[Any],
    params: dict[str, Any] | None = None,
    line_of: JaxprEqn | None = None,
) -> list:
    """Bind an equation's primitive again, in its context and from the line of `line_of`."""
    line = source_info_util.user_context(
        (line_of or eqn).source_info.traceback, name_stack=source_info_util.current_name_stack()
    )
    with context_of(eqn), line:
        return bind_again(eqn, inputs, eqn.params if params is None else params)


def bind_again(eqn: JaxprEqn, inputs: Sequence[Any], params: dict[str, Any]) -> list:
    """Bind an equation's primitive again, in the context of the caller."""
    outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return outputs if eqn.primitive.multiple_results else [outputs]


def context_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """Return the context, such as the mesh, in which an equation was traced."""
    return eqn.ctx.manager


def aval_of(v: Var | Literal) -> Aval:
    """Return the type of a value in a jaxpr."""
    return v.aval


def read_atom(v: Var | Literal, values: Mapping[Var, Any]) -> Any:
    """Return the value of a literal or of a variable."""
    return v.val if isinstance(v, Literal) else values[v]


def without_locations(exported: jax.export.Exported) -> jax.export.Exported:
    """Remove the source locations from an exported function: equal programs have equal bytes."""
    target = stablehlo.get_version_from_compatibility_requirement(
        stablehlo.StablehloCompatibilityRequirement.WEEK_4
    )
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        _remove_empty_meshes(module.operation)
        content = stablehlo.serialize_portable_artifact(module, target, True)
    return dataclasses.replace(exported, mlir_module_serialized=content)


def _remove_empty_meshes(operation: Any) -> None:
    """Remove shardings over no axes, which JAX writes for keys and other compilers do not read."""
    for region in operation.regions:
        for block in region.blocks:
            for op in list(block.operations):
                _remove_empty_meshes(op.operation)
                if op.operation.name == "sdy.sharding_constraint" and "@empty_mesh" in str(op):
                    op.operation.results[0].replace_all_uses_with(op.operation.operands[0])
                    op.operation.erase()
                elif op.operation.name == "sdy.mesh" and "@empty_mesh" in str(op):
                    op.operation.erase()


def reads_axis_index(jaxpr: ClosedJaxpr | None, axis_name: Any) -> bool:
    """Return whether a function reads its index along an axis of `jax.vmap`."""
    effects = jaxpr.effects if jaxpr is not None else ()
    return any(getattr(effect, "name", None) == axis_name for effect in effects)


def prune(jaxpr: ClosedJaxpr, used: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """Remove unused outputs, then all that they alone need; return which inputs remain."""
    names = [name for name, u in zip(result_names(jaxpr), used, strict=True) if u]
    pruned, used_inputs = pe.dce_jaxpr(jaxpr.jaxpr, list(used))
    return name_results(ClosedJaxpr(pruned, jaxpr.consts), names), list(used_inputs)


def eliminate_dead_code(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Remove the equations that no output needs, and keep all inputs."""
    alive, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.out_avals), instantiate=True)
    return ClosedJaxpr(alive, jaxpr.consts)


def register_pruning(primitive: Primitive) -> None:
    """Register dead-code elimination for a primitive whose parameter `jaxpr` is its function."""

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


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """Return the numbers of constants and of carried values among the operands of a scan."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].update(eqn.invars).unpack()  # jax 0.11
    return len(list(consts)), len(list(carry))

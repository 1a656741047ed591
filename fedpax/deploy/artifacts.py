"""Exported stages: files that run without the program, its libraries, and fedpax."""

import datetime
import functools
import hashlib
import importlib.util
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fedpax
from fedpax.deploy.encoded_values import key_implementation
from fedpax.deploy.runtime import (
    FORMAT,
    MANIFEST,
    VERSION,
    Artifact,
    ArtifactError,
    load,
    program_hash,
)
from fedpax.errors import ArgumentError, MissingPackageError
from fedpax.inspect.cost import count_flops
from fedpax.primitives._jax import (
    ClosedJaxpr,
    JaxprEqn,
    evaluate,
    read_atom,
    rebind,
    without_locations,
)
from fedpax.primitives.jaxpr_analysis import all_eqns, replace_jaxprs
from fedpax.primitives.user_functions import callbacks, lines_of_custom_calls
from fedpax.transforms.client_stages import Stage, Value
from fedpax.transforms.marks import Noise
from fedpax.transforms.stages import Stages
from fedpax.transforms.wiring import HEADINGS

VALID_DAYS = 180
"""JAX reads exports of about six months."""


def export_stages(
    stages: Stages,
    folder: str | Path,
    *,
    platforms: Sequence[str] = ("cpu",),
    not_after: datetime.date | None = None,
) -> Artifact:
    """Write stages to a folder that `fedpax.deploy.runtime` runs with JAX and NumPy alone.

    The folder holds exports of JAX (`.jax`), the client's also as StableHLO (`.stablehlo`), and
    `manifest.json`. The same program gives the same files.

    Args:
        stages: the stages, as `fedpax.stages` makes them.
        folder: a new or an empty folder.
        platforms: the platforms to export for. Default `("cpu",)`.
        not_after: the last day of use. Default None: in 180 days; JAX promises six months.

    Returns:
        The artifact, loaded from the folder.

    Raises:
        ArgumentError: the folder has files.
        MissingPackageError: the package flatbuffers is missing.

    Example:
        >>> import tempfile
        >>> import fedpax, jax.numpy as jnp
        >>> @fedpax.program(clients=3)
        ... def average(w, x):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: w * x, x))
        >>> stages = fedpax.stages(average, 2.0, jnp.array([1.0, 4.0, 7.0]))
        >>> artifact = export_stages(stages, tempfile.mkdtemp())
        >>> next(artifact.run({"w": jnp.float32(2.0)})).stage
        0
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError(
            f"export_stages(): {folder} has files, expected a new or an empty folder. Give another."
        )
    manifest, files = pack_stages(stages, platforms=platforms, not_after=not_after)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")  # last: the folder is whole
    return load(folder)


def pack_stages(
    stages: Stages,
    *,
    platforms: Sequence[str] = ("cpu",),
    portable: bool = True,
    not_after: datetime.date | None = None,
    functions: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]] | None = None,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Export stages as `export_stages` does, in memory: return the arguments of `Artifact`.

    `portable` adds the client as portable StableHLO, and `functions` further functions by name,
    each with the types of its arguments.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise MissingPackageError(
            "export_stages() needs the package flatbuffers. Install it: pip install "
            "'fedpax[deploy]'."
        )
    files = _Files(platforms, portable)
    flops = [_add_stage(files, stages, number, stage) for number, stage in enumerate(stages)]
    wiring = stages.wiring()
    for part, wires in enumerate(wiring.parts):
        files.add(f"server_{part}", wires.run, wires.types)
    for name, (fn, types) in (functions or {}).items():
        files.add(name, fn, types)
    last = not_after or datetime.date.today() + datetime.timedelta(days=VALID_DAYS)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "format_version": VERSION,
        "name": stages.name,
        "placement": {"name": stages.placement.name, "size": stages.placement.size},
        "platforms": list(platforms),
        "arguments": wiring.arguments,
        "noise": _described(stages.server_noise),
        "noisy_request": stages.noisy_request,
        "results": wiring.results,
        "least_masked": stages.least_masked,
        "stages": [
            {kind: _described(getattr(stage, kind)) for kind in Stage._fields} for stage in stages
        ],
        "flops": flops,
        "lines": files.lines,
        "server": [
            {
                "inputs": wires.inputs,
                "results": wires.results,
                "stage": wires.stage,
                "shared": wires.shared,
                "rows": wires.rows,
                "shown": wires.shown,
            }
            for wires in wiring.parts
        ],
        "files": {name: hashlib.sha256(x).hexdigest() for name, x in files.content.items()},
        "versions": {"fedpax": fedpax.__version__, "jax": jax.__version__},
        "created": datetime.date.today().isoformat(),
        "not_after": last.isoformat(),
    }
    manifest["program"] = program_hash(manifest)
    return manifest, files.content


def _add_stage(files: "_Files", stages: Stages, number: int, stage: Stage) -> int:
    """Add the functions of a stage; return the FLOPs of a participant."""
    owned: list[Value | Noise] = [*stage.own, *stage.noise]
    names = [value.name for value in owned]
    kept = [value.name for value in stage.kept]
    num_shared, num_rows = len(stage.shared), len(stage.rows)

    def client(index: jax.Array, *given: jax.Array) -> list[Any]:
        shared, rows = given[:num_shared], given[num_shared : num_shared + num_rows]
        values = dict(zip(names, given[num_shared + num_rows :], strict=True))
        terms, shown, new = stages.client(number)(index, shared, rows, values)
        return [*terms, *shown, *(new[name] for name in kept)]

    def merge(*terms: jax.Array) -> list[Any]:
        half = len(terms) // 2
        return list(stages.merge(number)(terms[:half], terms[half:]))

    index = jax.ShapeDtypeStruct((), jax.numpy.int32)
    terms = list(map(_type, stage.terms))
    given = [*map(_type, (*stage.shared, *stage.rows)), *map(_type, owned)]
    files.add(f"client_{number}", client, [index, *given], portable=True)
    files.add(f"merge_{number}", merge, [*terms, *terms])
    files.add(f"empty_{number}", lambda: list(stages.empty(number)), [])
    (size,) = jax.export.symbolic_shape("participants")
    many = [jax.ShapeDtypeStruct((size, *t.shape), t.dtype) for t in terms]
    files.add(f"fold_{number}", lambda *terms: list(stages.fold(number)(terms)), many)
    return int(count_flops(jax.make_jaxpr(client)(index, *given).jaxpr).number)


class _Files:
    """Exported functions, as the content of files by name."""

    def __init__(self, platforms: Sequence[str], portable: bool) -> None:
        self.platforms, self.portable = list(platforms), portable
        self.content: dict[str, bytes] = {}
        self.lines: dict[str, dict[str, str]] = {}  # function -> custom call -> line of source

    def add(
        self, name: str, fn: Callable[..., Any], types: Sequence[Any], *, portable: bool = False
    ) -> None:
        def function(*args: Any) -> Any:  # its name is a part of the file
            return fn(*args)

        written = with_unique_keys(function) if portable and self.portable else function
        try:
            exported = jax.export.export(jax.jit(written), platforms=self.platforms)(*types)
            exported = without_locations(exported)
            self.content[f"{name}.jax"] = bytes(exported.serialize())
        except (NotImplementedError, ValueError) as error:
            raise ArgumentError(_obstacle(name, function, types, self.platforms, error)) from error
        if portable and self.portable:
            self.content[f"{name}.stablehlo"] = exported.mlir_module_serialized
        if portable and "stablehlo.custom_call" in exported.mlir_module():
            jaxpr = jax.make_jaxpr(function)(*types).jaxpr
            self.lines[name] = lines_of_custom_calls(jaxpr, self.platforms)


def _obstacle(
    name: str,
    function: Callable[..., Any],
    types: Sequence[Any],
    platforms: Sequence[str],
    error: Exception,
) -> str:
    """Say what cannot be exported, with the line of the user's source."""
    jaxpr = jax.make_jaxpr(function)(*types).jaxpr
    if uses := callbacks(jaxpr):
        remedy = "Compute it with JAX, or outside of the round."
    else:
        uses, remedy = lines_of_custom_calls(jaxpr, platforms), "Use other operations."
    listed = ", ".join(f"{what}{line}" for what, line in uses.items()) or "an operation"
    part = "The participant's part" if name.startswith("client") else "The server's part"
    return (
        f"{part} ({name}) has {listed}, which a file cannot have, expected operations that JAX "
        f"exports ({error}). {remedy}"
    )


def _type(value: Value | Noise) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _described(values: Iterable[Value | Noise]) -> list[dict[str, Any]]:
    return [{**v._asdict(), "shape": list(v.shape), "dtype": str(v.dtype)} for v in values]


_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.$-]+)")


def inspect_round(folder: str | Path) -> str:
    """Describe exported stages: messages, FLOPs and temporary bytes of a participant, obstacles.

    Custom calls and arrays of unknown size are obstacles.

    Raises:
        ArtifactError: the folder is damaged, foreign, of a newer format, or past its last day.
    """
    artifact = load(folder)
    try:
        return _describe(artifact)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(  # its sha256 is right: it was made so
            f"{Path(folder) / MANIFEST} is malformed ({type(error).__name__}: {error}), expected "
            "what `fedpax export --stages` writes. Export again."
        ) from error


def _describe(artifact: Artifact) -> str:
    manifest, placement = artifact.manifest, artifact.manifest["placement"]
    count = len(artifact)
    lines = [
        f"{manifest['name']}: {count} {'stage' if count == 1 else 'stages'} for each of "
        f"{placement['size']} {placement['name']}",
        f"program {artifact.program}",
        f"made by jax {manifest['versions']['jax']} and fedpax {manifest['versions']['fedpax']} on "
        f"{manifest['created']} for {', '.join(manifest['platforms'])}; use it until "
        f"{manifest['not_after']}",
    ]
    for number, stage in enumerate(manifest["stages"]):
        lines += _describe_stage(artifact, number, stage)
    return "\n".join(lines)


def _describe_stage(
    artifact: Artifact, number: int, stage: Mapping[str, list[dict[str, Any]]]
) -> Iterable[str]:
    down = sum(map(_num_bytes, [*stage["shared"], *stage["rows"]]))
    up = sum(map(_num_bytes, [*stage["terms"], *stage["shown"]]))
    yield f"stage {number}: receives {down:,} B, sends {up:,} B"
    for heading, values in HEADINGS.items():
        for value in stage[values]:
            shape = f"{value['dtype']}{value['shape']}"
            yield f"  {heading:<8} {value['name']}: {shape}, {_num_bytes(value):,} B"
    exported = artifact.exported(f"client_{number}")
    compiled = jax.jit(exported.call).lower(*map(_abstract, exported.in_avals)).compile()
    memory = compiled.memory_analysis()
    temporary = "unknown" if memory is None else f"{memory.temp_size_in_bytes:,}"
    flops = artifact.manifest["flops"][number]
    yield f"  {flops:,} FLOPs, {temporary} temporary bytes on this machine"
    text = exported.mlir_module()
    lines = artifact.manifest.get("lines", {}).get(f"client_{number}", {})
    calls = sorted(set(_CUSTOM_CALL.findall(text)))
    obstacles = [f"the custom call {name}{lines.get(name, '')}" for name in calls]
    if "tensor<?" in text:
        obstacles.append("an array of unknown size")
    if obstacles:
        yield f"  not for devices without JAX: it has {' and '.join(obstacles)}"
    else:
        yield "  for devices without JAX: StableHLO without custom calls or unknown sizes"


def _num_bytes(value: Mapping[str, Any]) -> int:
    size = math.prod(map(operator.index, value["shape"]))
    return size * _item_bytes(value["dtype"])


def _item_bytes(dtype: str) -> int:
    if dtype.startswith("key<"):
        return int(jax.random.key(0, impl=key_implementation(dtype)).dtype.itemsize)
    return jax.numpy.dtype(dtype).itemsize


def _abstract(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


# ---- unique keys for runtimes whose sort is not stable: IREE 3.13.0 drops `is_stable`


def with_unique_keys(fn: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Sort equal keys by their places, in each stable sort of a function of arrays."""

    @functools.wraps(fn)
    def function(*args: Any) -> list[Any]:
        return evaluate(_rewrite(jax.make_jaxpr(fn)(*args)), *args)

    return function


def _rewrite(closed: ClosedJaxpr) -> ClosedJaxpr:
    if not any(map(_is_sort, all_eqns(closed.jaxpr))):
        return closed

    def run(*args: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        given = (*closed.consts, *args)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))
        for eqn in jaxpr.eqns:
            inputs = [read_atom(v, values) for v in eqn.invars]
            outputs = _sort(eqn, inputs) if _is_sort(eqn) else _rebind(eqn, inputs)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read_atom(v, values) for v in jaxpr.outvars]

    return jax.make_jaxpr(run)(*closed.in_avals)


def _is_sort(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a stable sort that moves other values with its keys."""
    is_stable = eqn.primitive is jax.lax.sort_p and eqn.params["is_stable"]
    return is_stable and eqn.params["num_keys"] < len(eqn.invars)


def _sort(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    last = eqn.params["num_keys"]
    places = jax.lax.broadcasted_iota(jnp.int32, inputs[0].shape, eqn.params["dimension"])
    given = [*inputs[:last], places, *inputs[last:]]
    outputs = rebind(eqn, given, eqn.params | {"num_keys": last + 1})
    return [*outputs[:last], *outputs[last + 1 :]]


def _rebind(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    return rebind(eqn, inputs, {k: replace_jaxprs(_rewrite, v) for k, v in eqn.params.items()})

"""A report on exported stages."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedpax.deploy.runtime import MANIFEST, Artifact, ArtifactError, load
from fedpax.transforms.stage_report import HEADINGS

_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.$-]+)")


def inspect_round(folder: str | Path) -> str:
    """Describe exported stages: messages, FLOPs and temporary bytes of a participant, obstacles.

    A custom call, such as a callback into Python or a kernel of a library, and an array of unknown
    size are obstacles for devices without JAX.

    Args:
        folder: a folder that `fedpax.deploy.export_stages` wrote.

    Returns:
        The report.

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
    compiled = jax.jit(exported.call).lower(*map(_type, exported.in_avals)).compile()
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
    size = int(np.prod(value["shape"], dtype=int))
    return size * _item_bytes(value["dtype"])


def _item_bytes(dtype: str) -> int:
    if dtype.startswith("key<"):
        return int(jax.random.key(0, impl=dtype[4:-1]).dtype.itemsize)
    return jax.numpy.dtype(dtype).itemsize


def _type(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

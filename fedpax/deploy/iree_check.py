"""Check a participant's part that IREE compiled against JAX, with drawn values."""

import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.deploy.encoded_values import key_implementation, numbers_of
from fedpax.deploy.runtime import Artifact
from fedpax.errors import FedpaxError

NUDGE = 1e-6  # relative change of floats: it moves a result as rounding does
FLOAT, HALF = 1e-4, 0.05  # relative differences that rounding explains, without and with half types


class CompilationError(FedpaxError):
    """IREE cannot compile the participant's part, or its result is not JAX's."""


class _Value(NamedTuple):
    kind: str
    name: str
    shape: Sequence[int]
    dtype: str


def check_compiled(artifact: Artifact, stage: int, module: Path, command: str) -> None:
    """Compare the results of a compiled stage with JAX's, for several numbers of steps."""
    messages = artifact.manifest["stages"][stage]
    given = [_Value("index", "index", [], "int32")] + [
        _Value(kind, v["name"], v["shape"], v["dtype"])
        for kind in ("shared", "rows", "own", "noise")
        for v in messages[kind]
    ]
    names = [v["name"] for kind in ("terms", "shown", "kept") for v in messages[kind]]
    exported, call = artifact.exported(f"client_{stage}"), artifact.function(f"client_{stage}")
    relative = HALF if re.search(r"\bb?f16\b", exported.mlir_module()) else FLOAT
    random = np.random.default_rng(0)
    for number in _numbers(given):
        values = [_draw(v, number, random) for v in given]
        expected = [np.asarray(x) for x in call(*values)]
        nudged = call(*[_nudge(x, random) for x in values])
        kept = [numbers_of(values[i]) for i in exported.module_kept_var_idx]
        found = _run(command, module, kept, expected)
        for name, value, x, near in zip(names, found, expected, nudged, strict=True):
            error, allowed = _compare(value, x, np.asarray(near), relative)
            if not error <= allowed:
                raise CompilationError(
                    f"client_{stage}.stablehlo, compiled by IREE: {name} differs from JAX's by "
                    f"{error:.2g}, expected at most {allowed:.2g}, with drawn values whose integer "
                    f"scalars, such as num_steps, are {number}. The compiler changes the program. "
                    "Use other operations in the participant's part, or another version of IREE."
                )


def _numbers(given: Sequence[_Value]) -> Iterator[int]:
    """Yield the values of the integer scalars: the first and the last numbers of steps."""
    most = max((v.shape[0] for v in given if v.kind == "own" and len(v.shape) > 1), default=1)
    yield from sorted({*range(min(most, 5) + 1), max(0, most - 1), most})


def _draw(value: _Value, number: int, random: np.random.Generator) -> Any:
    shape = tuple(value.shape)
    if value.dtype.startswith("key<"):
        key = jax.random.key(random.integers(2**31), impl=key_implementation(value.dtype))
        return jax.random.split(key, shape)
    dtype = jnp.dtype(value.dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        scale = math.sqrt(math.prod(shape[:-1])) if value.kind == "shared" else 1.0
        return (random.random(shape) / scale).astype(dtype)
    if dtype == np.bool_:
        return np.asarray(random.random(shape) < 0.8)
    return np.asarray(random.integers(2, size=shape) if shape else number, dtype)


def _nudge(value: Any, random: np.random.Generator) -> Any:
    if jnp.issubdtype(value.dtype, jnp.floating):
        return (value * (1 + NUDGE * random.choice([-1, 1], value.shape))).astype(value.dtype)
    return value


def _run(
    command: str, module: Path, values: Sequence[np.ndarray], types: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Run a module; return its results, which have the types of `types`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.bin"
        flags = ["--device=local-sync", f"--module={module}", "--function=main"]
        for i, value in enumerate(values):
            path = Path(folder) / (f"{i}.npy" if value.dtype.isbuiltin else f"{i}.bin")
            if value.dtype.isbuiltin:
                np.save(path, value)
                flags.append(f"--input=@{path}")
            else:  # a .npy file has no bfloat16
                path.write_bytes(value.tobytes())
                flags.append(f"--input={'x'.join(map(str, value.shape))}xbf16=@{path}")
        flags += [f"--output={'+' if i else '@'}{out}" for i in range(len(types))]
        ran = subprocess.run([command, *flags], capture_output=True, text=True)
        if ran.returncode:
            raise CompilationError(
                f"{module.stem}.stablehlo, compiled by IREE, does not run: "
                f"{ran.stderr.strip()[:2000]}. Use other operations in the participant's part."
            )
        content = out.read_bytes() if types else b""
    starts = np.cumsum([0, *(x.nbytes for x in types)])
    return [
        np.frombuffer(content, x.dtype, x.size, start).reshape(x.shape)
        for x, start in zip(types, starts[:-1], strict=True)
    ]


def _compare(
    found: np.ndarray, expected: np.ndarray, nudged: np.ndarray, relative: float
) -> tuple[float, float]:
    """Return the difference of a result from JAX's, and the most that rounding explains."""
    if not jnp.issubdtype(expected.dtype, jnp.floating):  # numbers of different entries
        different = float(np.count_nonzero(nudged != expected))
        return float(np.count_nonzero(found != expected)), relative * expected.size + 4 * different
    found, expected, nudged = (x.astype(np.float64) for x in (found, expected, nudged))
    finite = np.isfinite(expected) & np.isfinite(nudged)
    found, expected, nudged = found[finite], expected[finite], nudged[finite]
    rounding = 4 * np.linalg.norm(nudged - expected) + NUDGE * math.sqrt(expected.size)
    allowed = relative * np.linalg.norm(expected) + rounding
    return float(np.linalg.norm(found - expected)), float(allowed)

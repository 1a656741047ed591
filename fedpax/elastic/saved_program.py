"""The compiled round of a process, kept in its host's memory beside the copies of the state.

A process that starts in the place of another one loads it, and neither traces nor compiles. JAX's
compilation cache saves the compilation alone, and on CPUs that of process 0 alone.

A program is only loaded where the same one would be compiled: it has a **label** of the
configuration, the mesh, the versions, the variables of JAX and XLA, and the source files. JAX
documents `jax.experimental.serialize_executable` as experimental. If it fails, the round is
compiled.
"""

import contextlib
import hashlib
import json
import os
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

import fedpax
from fedpax.algorithm import State
from fedpax.files import create_draft, is_private
from fedpax.processes.gather import all_agree

OF_A_START = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Variables that differ between starts of the same program."""

CALLS_PYTHON = re.compile(r'custom_call_target="\w*callback|is_host_transfer=true')


class Program(NamedTuple):
    """A compiled round.

    Attributes:
        round: the program.
        bytes_across_placement: as in `fedpax.training.compiled_round.CompiledRound`.
    """

    round: jax.stages.Compiled
    bytes_across_placement: float


@contextlib.contextmanager
def serializable(mesh: Mesh) -> Iterator[None]:
    """Compile programs that can be saved.

    On CPUs, programs from the compilation cache cannot: their functions are missing when they are
    loaded again. There, the body does not use the cache.

    Args:
        mesh: the mesh to compile for.
    """
    enabled = jax.config.values["jax_enable_compilation_cache"]
    if mesh.devices.flat[0].platform != "cpu" or not enabled:
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


class ProgramFile:
    """The file of a compiled round.

    Args:
        path: the file, in a folder of this user alone: its content is executed.
        configuration: the experiment as JSON.
    """

    def __init__(self, path: Path, configuration: Any) -> None:
        self._path, self._configuration = path, configuration

    def exists(self) -> bool:
        """Return whether there is such a file, which may hold another program."""
        return self._path.exists()

    def load(self, mesh: Mesh, state: State, arguments: tuple[Any, ...]) -> Program | None:
        """Load the program; None unless every process can load its own. A collective.

        Args:
            mesh: the mesh of the round.
            state: the abstract state, which the round returns first.
            arguments: all arguments of the round, as abstract values with shardings.
        """
        program = self._load(mesh, state, arguments)
        return program if all_agree(program is not None) else None

    def _load(self, mesh: Mesh, state: State, arguments: tuple[Any, ...]) -> Program | None:
        try:
            if not is_private(self._path.parent):
                return None
            header, _, content = self._path.read_bytes().partition(b"\n")
            saved = json.loads(header)
            if saved["label"] != self._label(mesh, arguments):
                return None
            if any(_signature(path) != signature for path, signature in saved["sources"].items()):
                return None
            # Any failure to load has the same remedy, which is to compile.
            loaded = serialize_executable.deserialize_and_load(
                content,
                jax.tree.structure((arguments, {})),
                jax.tree.structure((state, dict.fromkeys(saved["metrics"], 0))),
                execution_devices=list(mesh.devices.flat),
            )
        except Exception:
            return None
        return Program(loaded, saved["bytes_across_placement"])

    def save(self, program: Program, mesh: Mesh, arguments: tuple[Any, ...]) -> None:
        """Save the program, if JAX can and if there is room.

        A program that calls Python on the host holds addresses of this process, and is not saved.

        Args:
            program: the program.
            mesh: its mesh.
            arguments: its arguments, as abstract values with shardings.
        """
        text = program.round.as_text()
        if text is None or CALLS_PYTHON.search(text):
            return
        tree: Any = program.round.out_tree
        _, metrics = jax.tree.unflatten(tree, range(tree.num_leaves))
        try:
            content, _, _ = serialize_executable.serialize(program.round)
        except (ValueError, TypeError, NotImplementedError, AttributeError, pickle.PicklingError):
            return
        except jax.errors.JaxRuntimeError:
            return
        header = {
            "label": self._label(mesh, arguments),
            "sources": _sources(),
            "metrics": sorted(metrics),
            "bytes_across_placement": program.bytes_across_placement,
        }
        draft = self._path.with_name(f"{self._path.name}.draft")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with os.fdopen(create_draft(draft), "wb") as file:
                    file.write(json.dumps(header).encode() + b"\n" + content)
                draft.replace(self._path)
            finally:
                draft.unlink(missing_ok=True)

    def _label(self, mesh: Mesh, arguments: tuple[Any, ...]) -> str:
        """Return a text that differs if the program may differ."""
        variables = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("JAX_", "XLA_", "LIBTPU_")) and name not in OF_A_START
        }
        parts = (
            fedpax.__version__,
            jax.__version__,
            self._configuration,
            variables,
            [(device.id, device.device_kind) for device in mesh.devices.flat],
            str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), arguments)),
        )
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sources() -> dict[str, list[int]]:
    """Return the signatures of the modules of fedpax, and of those that are not installed."""
    found = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        installed = "site-packages" in path or path.startswith(sys.base_prefix)
        if path and (not installed or name.partition(".")[0] == "fedpax"):
            with contextlib.suppress(OSError):
                found[path] = _signature(path)
    return found


def _signature(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]

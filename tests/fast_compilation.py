"""Lower many programs in one MLIR context, and compile equal programs once."""

import contextlib
import functools
import hashlib
import io
import os
import platform
import threading
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import jaxlib
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client

LOWERED = 200  # programs of a context, which never frees their types and attributes
LOADED = 500  # programs that stay, of about 16 memory maps each
KEPT_BYTES = 500_000_000  # of all programs of a checkout


class _Context(threading.local):
    value: object = None
    programs = 0


def share_lowering_contexts() -> None:
    """Let the programs that a thread lowers share a context, if this JAX makes one for each."""
    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        return
    current = _Context()

    def context() -> object:
        if current.programs % LOWERED == 0:
            current.value = make()
        current.programs += 1
        return current.value

    mlir.make_ir_context = context


def describe_machine() -> str:
    """Return all that decides compiled programs beside their text and their options."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else [platform.platform()]
    features = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    flags = os.environ.get("XLA_FLAGS", "")
    return repr((jaxlib.__version__, flags, platform.machine(), sorted(features or lines)))


class KeptPrograms:
    """Compiled programs in a folder, which the workers of a run and the next runs share.

    A program is kept under a hash of all that decides it. It is written beside its place and moved
    there, so that a reader finds all of it or nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, name: str, backend: Any, devices: Any, options: Any) -> object | None:
        """Return the program that was kept under a name, None if there is none that loads."""
        try:
            content = zlib.decompress((self.folder / name).read_bytes())
            os.utime(self.folder / name)
            return backend.deserialize_executable(content, devices, options)
        except (OSError, zlib.error, RuntimeError):
            return None

    def keep(self, name: str, program: Any) -> None:
        """Write a program that was compiled, unless it cannot be written.

        A program that was loaded would be written without its functions.
        """
        beside = self.folder / f"{name}.{os.getpid()}.{threading.get_ident()}"
        with contextlib.suppress(OSError, RuntimeError):
            beside.write_bytes(zlib.compress(program.serialize(), 1))
            beside.replace(self.folder / name)

    def forget(self, limit: int = KEPT_BYTES) -> None:
        """Delete the programs that were not used for the longest time, above a number of bytes."""
        total = 0
        with contextlib.suppress(FileNotFoundError):  # another run moves and deletes files too
            files = [(path.stat(), path) for path in self.folder.iterdir()]
            for status, path in sorted(files, key=lambda file: -file[0].st_mtime):
                total += status.st_size
                if total > limit:
                    path.unlink()


def keep_programs(cache: Any) -> KeptPrograms | None:
    """Return the programs in pytest's cache; None if it has no folder that can be written."""
    try:
        return KeptPrograms(cache.mkdir("programs"))
    except (AttributeError, OSError):  # AttributeError: pytest runs without a cache
        return None


def share_compiled_programs(kept: KeptPrograms | None = None) -> None:
    """Compile programs of the same text, options and devices once.

    The islands and sites of a test are threads that compile the same programs, many tests train
    the same small experiment, and most programs are those of the run before.

    Args:
        kept: the programs of other processes, or None: share within this process alone.
    """
    compile_anew = getattr(compiler, "backend_compile_and_load", None)
    if compile_anew is None:
        return
    compiled: dict[tuple[str, int], object] = {}
    locks: defaultdict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)
    machine = describe_machine()

    @functools.wraps(compile_anew)
    def compile_once(*arguments: Any) -> object:
        backend, module, devices, options, host_callbacks = arguments
        if host_callbacks:  # the functions are not in the text
            return compile_anew(*arguments)
        text = io.BytesIO()
        module.operation.write_bytecode(text)  # with the names and lines that `as_text` shows
        where = repr((machine, backend.platform_version, [device.id for device in devices]))
        content = text.getvalue() + options.SerializeAsString() + where.encode()
        name = hashlib.sha256(content).hexdigest()
        # Clients of topologies cannot load a program.
        others = kept if type(backend) is xla_client.Client else None
        with locks[name, id(backend)]:
            program = compiled.get((name, id(backend)))
            if program is not None:
                return program
            program = others and others.load(name, backend, devices, options)
            if program is None:
                program = compile_anew(*arguments)
                if others is not None:
                    others.keep(name, program)
            if len(compiled) >= LOADED:
                compiled.clear()
            compiled[name, id(backend)] = program
            return program

    compiler.backend_compile_and_load = compile_once

"""Lower many programs in one MLIR context, and compile equal programs once."""

import hashlib
import io
import threading
from collections import defaultdict
from typing import Any

from jax._src import compiler
from jax._src.interpreters import mlir

PROGRAMS = 200  # a context never frees their types and attributes, and each has 16 memory maps


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
        if current.programs % PROGRAMS == 0:
            current.value = make()
        current.programs += 1
        return current.value

    mlir.make_ir_context = context


def share_compiled_programs() -> None:
    """Compile programs of the same text, options and devices once.

    The islands and sites of a test are threads that compile the same programs, and many tests
    train the same small experiment.
    """
    compile_anew = getattr(compiler, "backend_compile_and_load", None)
    if compile_anew is None:
        return
    compiled: dict[tuple[object, ...], object] = {}
    locks: defaultdict[tuple[object, ...], threading.Lock] = defaultdict(threading.Lock)

    def compile_once(*arguments: Any) -> object:
        backend, module, devices, options, host_callbacks = arguments
        if host_callbacks:  # the functions are not in the text
            return compile_anew(*arguments)
        text = io.BytesIO()
        module.operation.write_bytecode(text)  # with the names and lines that `as_text` shows
        digest = hashlib.sha256(text.getvalue() + options.SerializeAsString()).digest()
        key = (digest, id(backend), *[device.id for device in devices])
        with locks[key]:
            program = compiled.get(key)
            if program is None:
                program = compile_anew(*arguments)
                if len(compiled) >= PROGRAMS:
                    compiled.clear()
                compiled[key] = program
            return program

    compiler.backend_compile_and_load = compile_once

"""Lower many programs in one MLIR context: JAX makes one for each, with all of its dialects."""

import threading

from jax._src.interpreters import mlir

PROGRAMS = 200  # a context never frees the types and attributes of its programs


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

"""Timing of interleaved calls, of compilation and of processes, and what processes need."""

import contextlib
import functools
import importlib.util
import multiprocessing
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax

from fedpax.parallel.compiler_options import simulate_devices

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
Seconds: TypeAlias = dict[str, list[float]]


class Compiled(NamedTuple):
    """A compiled function, and a call of it with the arguments that it was compiled for."""

    program: Any
    call: Callable[[], Any]
    compile_seconds: float
    temporary_bytes: int


def compile_for(fn: Callable[..., Any], *arguments: Any, repeats: bool = False) -> Compiled:
    """Compile a function for arguments or their types.

    With `repeats`, a round `(state, ...) -> (state, metrics)` takes over the memory of its state,
    and each call continues from the last one's state.
    """
    start = time.perf_counter()
    jitted = jax.jit(fn, donate_argnums=0 if repeats else ())
    program: Any = jitted.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    call = repeated(program, *arguments) if repeats else functools.partial(program, *arguments)
    return Compiled(program, call, seconds, program.memory_analysis().temp_size_in_bytes)


def interleaved(
    calls: Mapping[str, Callable[..., Any]],
    arguments: Sequence[Any],
    repetitions: int,
    clock: str = "wall",
    warmups: int = 1,
) -> Seconds:
    """Time interleaved calls of functions, so that other load affects all of them equally.

    The order is drawn at random in every repetition: a call that frees gigabytes slows the next
    call, and must not always slow the same function.
    """
    seconds: Seconds = {name: [] for name in calls}
    orders, read_clock = random.Random(0), CLOCKS[clock]
    for repetition in range(warmups + repetitions if repetitions else 0):
        for name in orders.sample(list(calls), len(calls)):
            start = read_clock()
            jax.block_until_ready(calls[name](*arguments))
            if repetition >= warmups:
                seconds[name].append(read_clock() - start)
    return seconds


def paired_ratio(seconds: Sequence[float], others: Sequence[float]) -> float | None:
    """Return the median over repetitions of the ratio of two functions' seconds; None for none."""
    pairs = list(zip(seconds, others, strict=True))
    return statistics.median(a / b for a, b in pairs) if pairs else None


def repeated(step: Callable[..., Any], state: Any, *arguments: Any) -> Callable[[], Any]:
    """Return a function that runs one more round, from the state that the last one left."""
    last = [jax.tree.map(jax.numpy.copy, state)]

    def run() -> Any:
        last[0], metrics = step(last[0], *arguments)
        return last[0], metrics

    return run


def children_cpu_seconds() -> float:
    """Return the CPU seconds of the processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_python(*arguments: str) -> tuple[float, float, str]:
    """Run Python to its end; return its seconds, its CPU seconds and its output."""
    began, before = time.perf_counter(), children_cpu_seconds()
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - began, children_cpu_seconds() - before, done.stdout


def free_port() -> int:
    """Return a port of this machine that no program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextlib.contextmanager
def new_folder(inside: str | None = None) -> Iterator[Path]:
    """Make a temporary folder, in another folder if one is given, and remove it at the end."""
    with tempfile.TemporaryDirectory(dir=inside) as name:
        yield Path(name)


@contextlib.contextmanager
def in_process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run a function in a new process until the block ends, with a pipe to it."""
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    process = context.Process(target=target, args=(other_end, *arguments), daemon=True)
    process.start()
    other_end.close()
    try:
        yield pipe
    finally:
        process.kill()
        process.join()


def on_devices(
    devices: int, fn: Callable[..., Any], *arguments: Any, subgroups: bool = False
) -> Any:
    """Call a function in a new process, in which a CPU simulates several devices.

    A process can set the number of CPU devices only once. Other kinds of devices are unaffected.
    """
    context = multiprocessing.get_context("spawn")
    start = functools.partial(simulate_devices, devices, subgroups=subgroups)
    with ProcessPoolExecutor(1, context, start) as process:
        return process.submit(_listed, fn, *arguments).result()


def _listed(fn: Callable[..., Any], *arguments: Any) -> Any:
    result = fn(*arguments)
    return list(result) if isinstance(result, Iterator) else result


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None

"""Timing of interleaved calls of functions, with paired ratios, and of their compilation."""

import functools
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedpax.parallel.simulated_devices import simulate_devices

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
PACKAGES = ("fedpax", "jax", "jaxlib", "drjax", "flax", "numpy")


class Compiled(NamedTuple):
    """A compiled function.

    Attributes:
        call: runs the function.
        compile_seconds: seconds of tracing and compiling.
        temporary_bytes: bytes of temporaries on one device.
    """

    call: Callable[..., Any]
    compile_seconds: float
    temporary_bytes: int


def compile_for(
    fn: Callable[..., Any], *arguments: Any, donate_argnums: int | Sequence[int] = ()
) -> Compiled:
    """Compile a function for arguments of the given shapes.

    Args:
        fn: a function of arrays.
        *arguments: pytrees of arrays, or of `jax.ShapeDtypeStruct`s, which need no memory.
        donate_argnums: the arguments whose memory the results may take, as in `jax.jit`.

    Returns:
        The compiled function.

    Example:
        >>> compiled = compile_for(lambda x: 2 * x, jax.ShapeDtypeStruct((3,), "float32"))
        >>> compiled.call(jax.numpy.ones(3)).tolist(), compiled.compile_seconds > 0
        ([2.0, 2.0, 2.0], True)
    """
    start = time.perf_counter()
    compiled = jax.jit(fn, donate_argnums=donate_argnums).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    return Compiled(compiled, seconds, memory.temp_size_in_bytes)


def interleaved(
    calls: Mapping[str, Callable[..., Any]],
    arguments: Sequence[Any],
    repetitions: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time interleaved calls of functions, so that other load affects all of them equally.

    The order is drawn at random in every repetition: a call that frees gigabytes slows the next
    call, and must not always slow the same function.

    Args:
        calls: compiled functions by name.
        arguments: the arguments of every function.
        repetitions: number of timed calls of each function, after one call that is not timed.
        clock: returns seconds. Default `time.perf_counter`: wall-clock time. `time.process_time` is
            the CPU time of this process, which other load affects less.

    Returns:
        Seconds of each call, by name.

    Example:
        >>> seconds = interleaved({"a": abs, "b": abs}, (1.0,), repetitions=3)
        >>> {name: len(values) for name, values in seconds.items()}
        {'a': 3, 'b': 3}
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    orders = random.Random(0)
    for repetition in range(repetitions + 1):
        for name in orders.sample(list(calls), len(calls)):
            start = clock()
            jax.block_until_ready(calls[name](*arguments))
            if repetition:
                seconds[name].append(clock() - start)
    return seconds


def paired_ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over repetitions of the ratio of two functions' seconds.

    Args:
        seconds: seconds of the first function, by repetition.
        others: seconds of the second function, by repetition.

    Example:
        >>> paired_ratio([1.0, 2.0, 30.0], [2.0, 4.0, 10.0])
        0.5
    """
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


def on_devices(
    devices: int, fn: Callable[..., Any], *arguments: Any, subgroups: bool = False
) -> Any:
    """Call a function in a new process, in which a CPU simulates several devices.

    A process can set the number of CPU devices only once. Other kinds of devices are unaffected.

    Args:
        devices: number of devices that a CPU simulates.
        fn: a function at the top level of a module; the new process imports it.
        *arguments: the function's arguments.
        subgroups: as in `simulate_devices`: collectives run over subgroups of the devices.

    Returns:
        The function's result.
    """
    context = multiprocessing.get_context("spawn")
    start = functools.partial(simulate_devices, devices, subgroups=subgroups)
    with ProcessPoolExecutor(1, context, start) as process:
        return process.submit(fn, *arguments).result()


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def write(path: str | None, rows: Sequence[NamedTuple], **settings: Any) -> None:
    """Write measurements as JSON, with the settings, the versions of packages and the machine.

    Args:
        path: the file; None: print the JSON.
        rows: the measurements.
        **settings: the options of the command.
    """
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if is_installed(name)}
    machine = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "workers": os.environ.get("PJRT_NPROC"),  # None: one per simulated device or core
    }
    content = {
        "settings": settings,
        "versions": versions,
        "machine": machine,
        "rows": [row._asdict() for row in rows],
    }
    if path is None:
        print(json.dumps(content))
    else:
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

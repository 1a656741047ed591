"""Fair timing: calls in turn, their ratios paired; compilation and memory apart."""

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

PACKAGES = ("fedpax", "jax", "jaxlib", "drjax", "flax", "numpy")


class Compiled(NamedTuple):
    """A compiled function.

    Attributes:
        call: runs it.
        compile_seconds: what tracing and compiling took.
        temporary_bytes: its temporaries on one device.
    """

    call: Callable[..., Any]
    compile_seconds: float
    temporary_bytes: int


def compile_for(fn: Callable[..., Any], *arguments: Any) -> Compiled:
    """Compiles a function for arguments or their types.

    Args:
        fn: a function of arrays.
        *arguments: pytrees of arrays, or of `jax.ShapeDtypeStruct`s, which need no memory.

    Returns:
        The compiled function.

    Example:
        >>> compiled = compile_for(lambda x: 2 * x, jax.ShapeDtypeStruct((3,), "float32"))
        >>> compiled.call(jax.numpy.ones(3)).tolist(), compiled.compile_seconds > 0
        ([2.0, 2.0, 2.0], True)
    """
    start = time.perf_counter()
    compiled = jax.jit(fn).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    return Compiled(compiled, seconds, memory.temp_size_in_bytes)


def interleaved(
    calls: Mapping[str, Callable[..., Any]], arguments: Sequence[Any], repetitions: int
) -> dict[str, list[float]]:
    """Times functions in turn, so that what else the machine does meets all of them alike.

    Every repetition has an order of its own, drawn at random: a call that leaves gigabytes to be
    given back slows whichever comes next, and must not always slow the same one.

    Args:
        calls: compiled functions by name.
        arguments: what all are called with.
        repetitions: how often each is called and timed, after a call that is not.

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
            start = time.perf_counter()
            jax.block_until_ready(calls[name](*arguments))
            if repetition:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def paired_ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios of calls that were timed in the same repetitions.

    Example:
        >>> paired_ratio([1.0, 2.0, 30.0], [2.0, 4.0, 10.0])
        0.5
    """
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


def on_devices(devices: int, fn: Callable[..., Any], *arguments: Any, groups: bool = False) -> Any:
    """Calls a function in a process of its own, where a CPU shows this many devices.

    How many devices a CPU shows can be set only once in a process. Other devices stay as they are.

    Args:
        devices: how many devices a CPU simulates.
        fn: a function at the top of its module; the process imports it anew.
        *arguments: what to call it with.
        groups: `subgroups` of `simulate_devices`.

    Returns:
        What it returns.
    """
    context = multiprocessing.get_context("spawn")
    start = functools.partial(simulate_devices, devices, subgroups=groups)
    with ProcessPoolExecutor(1, context, start) as process:
        return process.submit(fn, *arguments).result()


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def write(path: str | None, rows: Sequence[NamedTuple], **settings: Any) -> None:
    """Writes figures with what they were measured on, as JSON.

    Args:
        path: the file; None prints them.
        rows: the figures.
        **settings: what was asked for.
    """
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if is_installed(name)}
    machine = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "workers": os.environ.get("PJRT_NPROC"),  # None: one for each simulated device, or core
    }
    figures = {
        "settings": settings,
        "versions": versions,
        "machine": machine,
        "rows": [row._asdict() for row in rows],
    }
    if path is None:
        print(json.dumps(figures))
    else:
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")

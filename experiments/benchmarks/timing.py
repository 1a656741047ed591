"""Timing of interleaved calls of functions, with paired ratios, and of their compilation."""

import functools
import importlib.util
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax

from fedpax.parallel.simulated_devices import simulate_devices

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Compiled(NamedTuple):
    """A compiled function."""

    call: Callable[..., Any]
    compile_seconds: float
    temporary_bytes: int


def compile_for(
    fn: Callable[..., Any], *arguments: Any, donate_argnums: int | Sequence[int] = ()
) -> Compiled:
    """Compile a function for arguments of the given shapes.

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
    clock: str = "wall",
) -> dict[str, list[float]]:
    """Time interleaved calls of functions, so that other load affects all of them equally.

    The order is drawn at random in every repetition: a call that frees gigabytes slows the next
    call, and must not always slow the same function.

    Example:
        >>> seconds = interleaved({"a": abs, "b": abs}, (1.0,), repetitions=3)
        >>> {name: len(values) for name, values in seconds.items()}
        {'a': 3, 'b': 3}
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    if not repetitions:
        return seconds
    read_clock = CLOCKS[clock]
    orders = random.Random(0)
    for repetition in range(repetitions + 1):
        for name in orders.sample(list(calls), len(calls)):
            start = read_clock()
            jax.block_until_ready(calls[name](*arguments))
            if repetition:
                seconds[name].append(read_clock() - start)
    return seconds


def paired_ratio(seconds: Sequence[float], others: Sequence[float]) -> float | None:
    """Return the median over repetitions of the ratio of two functions' seconds, or None if none.

    Example:
        >>> paired_ratio([1.0, 2.0, 30.0], [2.0, 4.0, 10.0])
        0.5
    """
    if not seconds:
        return None
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


def on_devices(
    devices: int, fn: Callable[..., Any], *arguments: Any, subgroups: bool = False
) -> Any:
    """Call a function in a new process, in which a CPU simulates several devices.

    A process can set the number of CPU devices only once. Other kinds of devices are unaffected.
    """
    context = multiprocessing.get_context("spawn")
    start = functools.partial(simulate_devices, devices, subgroups=subgroups)
    with ProcessPoolExecutor(1, context, start) as process:
        return process.submit(fn, *arguments).result()


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None

"""A FedAvg round with fedpax, DrJAX, `jax.vmap` and a hand-written loop: time and memory.

    python -m fedpax.experiments.benchmarks.fedavg_round --model=mlp --clients=64,1024

All implementations run the same round on the same random data and must give the same result. They
are timed in interleaved calls, and a ratio is the median over repetitions. DrJAX is part of the
extra `bench` and is left out if it is not installed.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import fedpax
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, Timed, option
from fedpax.experiments.benchmarks.rounds import drjax_round, fedpax_round, scan_round, vmap_round
from fedpax.experiments.benchmarks.workloads import WORKLOADS, Sizes
from fedpax.primitives.placement import ChunkSize

BASELINES = {"scan": scan_round, "drjax": drjax_round, "vmap": vmap_round}


def _chunk_sizes(text: str) -> list[ChunkSize]:
    return harness.several(
        text, harness.chunk_size, '"auto" or integers of at least 1', example="auto,8"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Sizes, Timed):
    """The options."""

    chunk_size: list[ChunkSize] = option(
        "auto,1", "values to run fedpax with, separated by commas", _chunk_sizes
    )
    baselines: list[str] = option(
        ",".join(BASELINES), "implementations to compare fedpax with", harness.names
    )


def measure(settings: Settings, devices: int, clients: int) -> list[Row]:
    """Compile the rounds, check that they agree, and time interleaved calls."""
    workload = WORKLOADS[settings.model]()
    mesh = fedpax.make_mesh(devices=jax.devices()[:devices], clients=devices)
    train = workload.local_train
    rounds = {f"fedpax {k}": fedpax_round(train, clients, k) for k in settings.chunk_size}
    first = next(iter(rounds))
    rounds |= {name: BASELINES[name](train, clients) for name in settings.baselines}
    with jax.set_mesh(mesh):
        types = workload.argument_types(clients, mesh)
        compiled = {name: timing.compile_for(fn, *types) for name, fn in rounds.items()}
        calls = {name: c.call for name, c in compiled.items()}
        arguments: Any = ()
        if settings.repetitions:
            arguments = workload.random_arguments(clients, mesh)
            check_equal({name: call(*arguments) for name, call in calls.items()})
        seconds = timing.interleaved(calls, arguments, settings.repetitions, settings.clock)
    return [
        Row(
            model=settings.model,
            device=jax.devices()[0].device_kind,
            devices=devices,
            clients=clients,
            implementation=name,
            compile_seconds=program.compile_seconds,
            temporary_bytes=program.temporary_bytes,
            seconds=seconds[name],
            fedpax_ratio=timing.paired_ratio(seconds[first], seconds[name]),
        )
        for name, program in compiled.items()
    ]


def check_equal(results: dict[str, Any]) -> None:
    """Raise an AssertionError if a result differs from the first by more than rounding."""
    (first, expected), *rest = results.items()
    for name, result in rest:
        close = functools.partial(
            np.testing.assert_allclose, rtol=1e-3, atol=1e-4, err_msg=f"{name} differs from {first}"
        )
        jax.tree.map(close, result, expected)


def measure_sizes(settings: Settings) -> Iterator[Row]:
    """Measure each size, without DrJAX if it is not installed."""
    if "drjax" in settings.baselines and not timing.is_installed("drjax"):
        print(
            "drjax is not installed and is left out. Install it with `pip install 'fedpax[bench]'`."
        )
        installed = [name for name in settings.baselines if name != "drjax"]
        settings = dataclasses.replace(settings, baselines=installed)
    return settings.measure_each(measure)


main = Benchmark(
    __doc__,
    Settings,
    measure_sizes,
    {
        "devices": "{devices}",
        "clients": "{clients:9,}",
        "round": "{implementation:16}",
        "compile s": "{compile_seconds:.1f}",
        "temporaries": "{temporary_bytes:14,}",
        "median s": "{seconds:.4f}",
        "fedpax/this": "{fedpax_ratio:.3f}",
    },
)


if __name__ == "__main__":
    raise SystemExit(main())

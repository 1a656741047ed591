"""A FedAvg round with fedpax, DrJAX, `jax.vmap` and a hand-written loop: time and memory.

    python -m fedpax.experiments.benchmarks.fedavg_round --model=mlp --clients=64,1024

All implementations run the same round on the same random data and must give the same result. They
are timed in interleaved calls, and a ratio is the median over repetitions. DrJAX is part of the
extra `bench` and is left out if it is not installed.
"""

import argparse
import functools
import statistics
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

import fedpax
from fedpax.experiments.benchmarks.arguments import chunk_size, integers, several
from fedpax.experiments.benchmarks.rounds import (
    Round,
    drjax_round,
    fedpax_round,
    scan_round,
    vmap_round,
)
from fedpax.experiments.benchmarks.timing import (
    compile_for,
    interleaved,
    is_installed,
    on_devices,
    paired_ratio,
    write,
)
from fedpax.experiments.benchmarks.workloads import WORKLOADS, Workload

BASELINES = {"scan": scan_round, "drjax": drjax_round, "vmap": vmap_round}


class Row(NamedTuple):
    """One implementation of the round, at one size.

    Attributes:
        model: the clients' model.
        device: kind of the devices.
        devices: number of devices.
        clients: number of clients.
        implementation: its name; "fedpax" is followed by its `chunk_size`.
        compile_seconds: seconds of tracing and compiling.
        temporary_bytes: bytes of temporaries on one device.
        seconds: seconds of each call; empty without repetitions.
        fedpax_ratio: seconds of the first fedpax round divided by the seconds of this one (paired);
            None without repetitions.
    """

    model: str
    device: str
    devices: int
    clients: int
    implementation: str
    compile_seconds: float
    temporary_bytes: int
    seconds: list[float]
    fedpax_ratio: float | None


def make_rounds(
    workload: Workload,
    clients: int,
    chunk_sizes: Sequence[int | Literal["auto"]],
    baselines: Sequence[str],
) -> dict[str, Round]:
    """Make the rounds to compare, fedpax's first."""
    train = workload.local_train
    own = {f"fedpax {k}": fedpax_round(train, clients, k) for k in chunk_sizes}
    return own | {name: BASELINES[name](train, clients) for name in baselines}


def measure(
    model: str,
    devices: int,
    clients: int,
    chunk_sizes: Sequence[int | Literal["auto"]] = ("auto", 1),
    baselines: Sequence[str] = tuple(BASELINES),
    repetitions: int = 5,
) -> list[Row]:
    """Compile the rounds, check that they agree, and time interleaved calls.

    Args:
        model: a name in `WORKLOADS`.
        devices: number of `jax.devices()` to use.
        clients: number of clients.
        chunk_sizes: the values of `chunk_size` to run fedpax with; ratios are to the first.
        baselines: names in `BASELINES`.
        repetitions: number of timed calls of each round. 0: compile only, without data.

    Returns:
        One row per round.

    Raises:
        AssertionError: two rounds give different results.
    """
    workload = WORKLOADS[model]()
    mesh = fedpax.make_mesh(devices=jax.devices()[:devices], clients=devices)
    with jax.set_mesh(mesh):
        types = workload.argument_types(clients, mesh)
        rounds = make_rounds(workload, clients, chunk_sizes, baselines)
        compiled = {name: compile_for(round, *types) for name, round in rounds.items()}
        seconds: dict[str, list[float]] = {name: [] for name in rounds}
        if repetitions:
            arguments = workload.random_arguments(clients, mesh)
            calls = {name: c.call for name, c in compiled.items()}
            check_equal({name: call(*arguments) for name, call in calls.items()})
            seconds = interleaved(calls, arguments, repetitions)
    first = next(iter(rounds))
    return [
        Row(
            model,
            jax.devices()[0].device_kind,
            devices,
            clients,
            name,
            compiled[name].compile_seconds,
            compiled[name].temporary_bytes,
            seconds[name],
            paired_ratio(seconds[first], seconds[name]) if repetitions else None,
        )
        for name in rounds
    ]


def check_equal(results: dict[str, Any]) -> None:
    """Check that all results are equal to the first up to rounding.

    Args:
        results: pytrees of arrays by name.

    Raises:
        AssertionError: two results differ.
    """
    (first, expected), *rest = results.items()
    for name, result in rest:
        close = functools.partial(
            np.testing.assert_allclose, rtol=1e-3, atol=1e-4, err_msg=f"{name} differs from {first}"
        )
        jax.tree.map(close, result, expected)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=WORKLOADS, default="mlp", help="the clients' model")
    parser.add_argument(
        "--clients",
        type=integers,
        default="64,1024",
        help="numbers of clients in the round, separated by commas",
    )
    parser.add_argument(
        "--devices",
        type=integers,
        default="1,2",
        help="numbers of devices, separated by commas; simulated on a CPU",
    )
    parser.add_argument(
        "--chunk_size",
        type=lambda text: several(text, chunk_size, '"auto" or integers of at least 1', "auto,8"),
        default="auto,1",
        help="values to run fedpax with, separated by commas",
    )
    parser.add_argument(
        "--baselines", default=",".join(BASELINES), help="implementations to compare fedpax with"
    )
    parser.add_argument(
        "--repetitions", type=int, default=5, help="timed calls of each; 0: compile only"
    )
    parser.add_argument(
        "--json", help="JSON file for the measurements; without it they are printed"
    )
    options = parser.parse_args(argv)
    baselines = [name for name in options.baselines.split(",") if name]
    if "drjax" in baselines and not is_installed("drjax"):
        print(
            "drjax is not installed and is left out. Install it with `pip install 'fedpax[bench]'`."
        )
        baselines.remove("drjax")
    print("devices   clients  round             compile s   temporaries   median s  fedpax/this")
    rows: list[Row] = []
    for devices in options.devices:
        for clients in options.clients:
            sizes = (options.model, devices, clients)
            found = on_devices(
                devices, measure, *sizes, options.chunk_size, baselines, options.repetitions
            )
            for row in found:
                print(describe(row), flush=True)
            rows += found
    write(options.json, rows, **vars(options))
    return 0


def describe(row: Row) -> str:
    """Format a row as a line of the table."""
    timed = ""
    if row.fedpax_ratio is not None:
        timed = f"{statistics.median(row.seconds):10.4f} {row.fedpax_ratio:12.3f}"
    return (
        f"{row.devices:7} {row.clients:9,}  {row.implementation:16}  {row.compile_seconds:9.1f} "
        f"{row.temporary_bytes:13,} {timed}"
    )


if __name__ == "__main__":
    raise SystemExit(main())

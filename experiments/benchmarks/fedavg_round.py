"""A FedAvg round with fedpax, with DrJAX, with vmap and by hand: time, compilation and memory.

    python -m fedpax.experiments.benchmarks.fedavg_round --model=mlp --clients=64,1024

times the same round on the same random data, after all have given the same result. They are
called in turn, and a ratio is the median of the ratios of calls that stand next to each other.
DrJAX comes with the `bench` extra and is left out where it is not installed.
"""

import argparse
import functools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import fedpax
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

OTHERS = {"scan": scan_round, "drjax": drjax_round, "vmap": vmap_round}


class Row(NamedTuple):
    """One way to write the round, at one size.

    Attributes:
        model: what the clients train.
        device: the devices' kind.
        devices: how many there are.
        clients: how many clients train.
        round: how the round is written; fedpax's with its `chunk_size`.
        compile_seconds: what tracing and compiling took.
        temporary_bytes: temporaries on one device.
        seconds: of each call; empty where only memory was asked for.
        fedpax_ratio: seconds of the first of fedpax's rounds over this one's, paired.
    """

    model: str
    device: str
    devices: int
    clients: int
    round: str
    compile_seconds: float
    temporary_bytes: int
    seconds: list[float]
    fedpax_ratio: float | None


def make_rounds(
    workload: Workload, clients: int, chunk_size: Sequence[Any], others: Sequence[str]
) -> dict[str, Round]:
    """Makes the rounds to compare, fedpax's first."""
    train = workload.local_train
    own = {f"fedpax {k}": fedpax_round(train, clients, k) for k in chunk_size}
    return own | {name: OTHERS[name](train, clients) for name in others}


def measure(
    model: str,
    devices: int,
    clients: int,
    chunk_size: Sequence[Any] = ("auto", 1),
    others: Sequence[str] = tuple(OTHERS),
    repetitions: int = 5,
) -> list[Row]:
    """Compiles the rounds, checks that they agree, and times them in turn.

    Args:
        model: a name in `WORKLOADS`.
        devices: how many of `jax.devices()` to use.
        clients: how many clients train.
        chunk_size: fedpax's settings; ratios are of the first.
        others: names in `OTHERS`.
        repetitions: how often each round is timed. 0 only compiles, and makes no data.

    Returns:
        A row for each round.

    Raises:
        AssertionError: two rounds differ in their results.
    """
    workload = WORKLOADS[model]()
    mesh = fedpax.make_mesh(devices=jax.devices()[:devices], clients=devices)
    with jax.set_mesh(mesh):
        types = workload.arguments(clients, mesh)
        rounds = make_rounds(workload, clients, chunk_size, others)
        compiled = {name: compile_for(round, *types) for name, round in rounds.items()}
        seconds: dict[str, list[float]] = {name: [] for name in rounds}
        if repetitions:
            arguments = workload.draw(clients, mesh)
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
    """Raises an AssertionError unless all results are the first one's, up to rounding."""
    (first, expected), *others = results.items()
    for name, result in others:
        close = functools.partial(
            np.testing.assert_allclose, rtol=1e-3, atol=1e-4, err_msg=f"{name} against {first}"
        )
        jax.tree.map(close, result, expected)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures as the arguments say, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=WORKLOADS, default="mlp")
    parser.add_argument("--clients", default="64,1024", help="sizes of the cohort")
    parser.add_argument("--devices", default="1,2", help="how many; a CPU simulates them")
    parser.add_argument("--chunk_size", default="auto,1", help="of fedpax's rounds")
    parser.add_argument("--others", default=",".join(OTHERS), help="what to compare with")
    parser.add_argument("--repetitions", type=int, default=5, help="0 compiles, and runs nothing")
    parser.add_argument("--json", help="a file for the figures, else printed")
    options = parser.parse_args(argv)
    others = [name for name in options.others.split(",") if name]
    if "drjax" in others and not is_installed("drjax"):
        print("drjax is not installed and is left out; `pip install 'fedpax[bench]'` brings it.")
        others.remove("drjax")
    chunks = [k if k == "auto" else int(k) for k in options.chunk_size.split(",")]
    print("devices   clients  round             compile s   temporaries   median s  fedpax/this")
    rows: list[Row] = []
    for devices in map(int, options.devices.split(",")):
        for clients in map(int, options.clients.split(",")):
            sizes = (options.model, devices, clients)
            found = on_devices(devices, measure, *sizes, chunks, others, options.repetitions)
            for row in found:
                print(describe(row), flush=True)
            rows += found
    write(options.json, rows, **vars(options))
    return 0


def describe(row: Row) -> str:
    """A line of the table."""
    timed = ""
    if row.fedpax_ratio is not None:
        timed = f"{statistics.median(row.seconds):10.4f} {row.fedpax_ratio:12.3f}"
    return (
        f"{row.devices:7} {row.clients:9,}  {row.round:16}  {row.compile_seconds:9.1f} "
        f"{row.temporary_bytes:13,} {timed}"
    )


if __name__ == "__main__":
    raise SystemExit(main())

"""A FedAvg round of clients of unequal size: what their inequality costs.

    python -m fedpax.experiments.benchmarks.ragged_clients --clients=256 --devices=1,2

Clients have log-normal numbers of steps. The same round is timed in turn in four ways: each client
takes its own steps, in the order of `balanced_order`; the same as the clients come; every client
goes through as many steps as the longest, masked behind its own; and, as the limit, all clients
take equally many, as many as the others take together. The first three give one result.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.algorithms import fedavg
from fedpax.data import balanced_order, idle_fraction
from fedpax.experiments.benchmarks.fedavg_round import check_equal
from fedpax.experiments.benchmarks.timing import (
    compile_for,
    interleaved,
    on_devices,
    paired_ratio,
    write,
)
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.losses import classification_loss


class Row(NamedTuple):
    """One way to run the round.

    Attributes:
        devices: how many there are.
        clients: how many clients train.
        way: how it is run.
        steps: what all clients take together, masked ones too.
        wasted: share of the devices' steps that nobody needs, counted.
        seconds: of each call.
        limit_ratio: seconds a step that is needed, over those of equal clients; paired.
    """

    devices: int
    clients: int
    way: str
    steps: int
    wasted: float
    seconds: list[float]
    limit_ratio: float


def measure(devices: int, clients: int, sigma: float, batch: int, repetitions: int) -> list[Row]:
    """Checks that the ways agree and times them in turn.

    Args:
        devices: how many of `jax.devices()` to use.
        clients: how many clients train.
        sigma: of the logarithm of a client's number of steps; the median is 4.
        batch: examples in a step.
        repetitions: how often each way is timed.

    Returns:
        A row for each way.
    """
    random = np.random.default_rng(0)
    steps = np.ceil(random.lognormal(np.log(4), sigma, clients)).astype(np.int32)
    longest = int(steps.max())
    order = balanced_order(steps, devices)
    mesh = fedpax.make_mesh(devices=jax.devices()[:devices], clients=devices)
    over_clients = NamedSharding(mesh, P("clients"))
    image = random.random((clients, longest, batch, 784), np.float32)
    label = random.integers(0, 10, (clients, longest, batch), np.int32)
    own = np.arange(longest) < steps[:, None]
    mask = np.broadcast_to(own[..., None], label.shape)
    model = mlp(MLPConfig())
    method = fedavg(
        classification_loss(model.apply),
        clients=clients,
        client_optimizer=optax.sgd(0.1),
        chunk_size=1,
    )

    def put(rows: Any) -> Any:
        batches = {"image": image[rows], "label": label[rows], "mask": mask[rows]}
        return jax.device_put((batches, np.float32(steps[rows])), over_clients)

    def round_(state: Any, data: Any, steps: Any) -> Any:
        # The mean of the clients' losses counts masked steps too, so only parameters are compared.
        return method.round(state, *data, steps)[0].params

    with jax.set_mesh(mesh):
        state = method.init(jax.jit(model.init)(jax.random.key(0)))
        each = max(1, round(steps.sum() / clients))
        balanced, as_they_come = put(order), put(slice(None))
        ways = {
            "balanced": (balanced, steps[order]),
            "as they come": (as_they_come, steps),
            "all as the longest": (as_they_come, np.full(clients, longest, np.int32)),
            "equal clients": (balanced, np.full(clients, each, np.int32)),
        }
        placed = {w: (d, jax.device_put(s, over_clients)) for w, (d, s) in ways.items()}
        call = compile_for(round_, state, *placed["balanced"]).call
        results = {way: call(state, *arguments) for way, arguments in placed.items()}
        del results["equal clients"]
        check_equal(results)
        calls = {w: lambda a=arguments: call(state, *a) for w, arguments in placed.items()}
        seconds = interleaved(calls, (), repetitions)
    needed = {way: int(steps.sum()) for way in ways} | {"equal clients": each * clients}
    limit = [s / needed["equal clients"] for s in seconds["equal clients"]]
    rows = []
    for way, (_, taken) in ways.items():
        idle = idle_fraction(taken, devices)
        wasted = 1 - (1 - idle) * needed[way] / int(taken.sum())
        per_step = [s / needed[way] for s in seconds[way]]
        ratio = paired_ratio(per_step, limit)
        rows.append(Row(devices, clients, way, int(taken.sum()), wasted, seconds[way], ratio))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measures as the arguments say, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=256, help="size of the cohort")
    parser.add_argument("--devices", default="1,2", help="how many; a CPU simulates them")
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of the clients' sizes")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="a file for the figures, else printed")
    options = parser.parse_args(argv)
    print("devices  clients  way                   steps  wasted steps   median s  to the limit")
    rows: list[Row] = []
    for devices in map(int, options.devices.split(",")):
        settings = (options.clients, options.sigma, options.batch, options.repetitions)
        for row in on_devices(devices, measure, devices, *settings):
            seconds = statistics.median(row.seconds)
            print(
                f"{row.devices:7}  {row.clients:7,}  {row.way:18}  {row.steps:8,}  "
                f"{row.wasted:12.2%}  {seconds:9.3f}  {row.limit_ratio:12.3f}",
                flush=True,
            )
            rows.append(row)
    write(options.json, rows, **vars(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

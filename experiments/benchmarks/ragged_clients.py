"""A FedAvg round of clients with different numbers of steps: what the differences cost.

    python -m fedpax.experiments.benchmarks.ragged_clients --clients=256 --devices=1,2

The clients' numbers of steps are log-normal. Four variants of the round are timed, in interleaved
calls:

- balanced: each client runs its own steps, and `balanced_order` distributes the clients;
- as drawn: each client runs its own steps, in the order of sampling;
- padded: each client runs as many steps as the longest client, and padded steps change nothing;
- equal clients: all clients have the same number of steps, the mean. This is the limit.

The first three give the same result.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.algorithm import Metrics, Params, State
from fedpax.algorithms import fedavg
from fedpax.data import balanced_order, idle_fraction
from fedpax.experiments.benchmarks.arguments import integers
from fedpax.experiments.benchmarks.fedavg_round import check_equal
from fedpax.experiments.benchmarks.timing import interleaved, on_devices, paired_ratio, write
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.losses import classification_loss


class Row(NamedTuple):
    """One variant of the round.

    Attributes:
        devices: number of devices.
        clients: number of clients.
        variant: how the clients run: "balanced", "as drawn", "padded" or "equal clients".
        steps: steps that all clients run together, padded ones included.
        padded_or_idle_fraction: fraction of the devices' steps that are padded or idle, computed
            from the numbers of steps.
        seconds: seconds of each call.
        slowdown: seconds per valid step, divided by those of "equal clients" (paired).
    """

    devices: int
    clients: int
    variant: str
    steps: int
    padded_or_idle_fraction: float
    seconds: list[float]
    slowdown: float


def measure(
    devices: int, clients: int, sigma: float, batch_size: int, repetitions: int
) -> list[Row]:
    """Check that the variants agree, and time interleaved calls.

    Args:
        devices: number of `jax.devices()` to use.
        clients: number of clients.
        sigma: standard deviation of the logarithm of a client's number of steps; the median is 4.
        batch_size: examples in a step.
        repetitions: number of timed calls of each variant.

    Returns:
        One row per variant.

    Raises:
        AssertionError: two variants give different results.
    """
    random = np.random.default_rng(0)
    num_steps = np.ceil(random.lognormal(np.log(4), sigma, clients)).astype(np.int32)
    longest = int(num_steps.max())
    order = balanced_order(num_steps, devices)
    mesh = fedpax.make_mesh(devices=jax.devices()[:devices], clients=devices)
    over_clients = NamedSharding(mesh, P("clients"))
    images = random.random((clients, longest, batch_size, 784), np.float32)
    labels = random.integers(0, 10, (clients, longest, batch_size), np.int32)
    valid = np.arange(longest) < num_steps[:, None]
    mask = np.broadcast_to(valid[..., None], labels.shape)
    model = mlp(MLPConfig())
    algorithm = fedavg(
        classification_loss(model.apply),
        cohort_size=clients,
        client_optimizer=optax.sgd(0.1),
        chunk_size=1,
    )
    mean_steps = max(1, round(num_steps.sum() / clients))
    batches = {"image": images, "label": labels}
    num_examples = num_steps.astype(np.float32)
    as_drawn = fedpax.Cohort(batches, num_examples, num_steps)
    balanced = jax.tree.map(lambda x: x[order], as_drawn)
    # Without num_steps, a method computes every step and discards those that are padding.
    cohorts = {
        "balanced": balanced,
        "as drawn": as_drawn,
        "padded": fedpax.Cohort({**batches, "mask": mask}, num_examples),
        "equal clients": balanced._replace(num_steps=np.full_like(num_steps, mean_steps)),
    }
    steps_run = {
        "balanced": num_steps[order],
        "as drawn": num_steps,
        "padded": np.full_like(num_steps, longest),
        "equal clients": np.full_like(num_steps, mean_steps),
    }

    @jax.jit
    def run_round(state: State, cohort: fedpax.Cohort) -> tuple[Params, Metrics]:
        state, metrics = algorithm.round(state, cohort)
        return state.params, metrics

    with jax.set_mesh(mesh):
        state = algorithm.init(jax.jit(model.init)(jax.random.key(0)))
        placed = {
            variant: jax.device_put(cohort, over_clients) for variant, cohort in cohorts.items()
        }
        check_equal(
            {
                variant: run_round(state, placed[variant])
                for variant in ("balanced", "as drawn", "padded")
            }
        )
        calls = {
            variant: lambda c=cohort: run_round(state, c) for variant, cohort in placed.items()
        }
        seconds = interleaved(calls, (), repetitions)
    valid_steps = dict.fromkeys(cohorts, int(num_steps.sum())) | {
        "equal clients": mean_steps * clients
    }
    limit = [s / valid_steps["equal clients"] for s in seconds["equal clients"]]
    rows = []
    for variant, run in steps_run.items():
        busy = 1 - idle_fraction(run, devices)
        padded_or_idle_fraction = 1 - busy * valid_steps[variant] / int(run.sum())
        per_step = [s / valid_steps[variant] for s in seconds[variant]]
        ratio = paired_ratio(per_step, limit)
        rows.append(
            Row(
                devices,
                clients,
                variant,
                int(run.sum()),
                padded_or_idle_fraction,
                seconds[variant],
                ratio,
            )
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=256, help="number of clients in the round")
    parser.add_argument(
        "--devices",
        type=integers,
        default="1,2",
        help="numbers of devices, separated by commas; simulated on a CPU",
    )
    parser.add_argument(
        "--sigma", type=float, default=1.0, help="spread of the clients' numbers of steps"
    )
    parser.add_argument("--batch_size", type=int, default=20, help="examples in a step")
    parser.add_argument("--repetitions", type=int, default=5, help="timed calls of each variant")
    parser.add_argument(
        "--json", help="JSON file for the measurements; without it they are printed"
    )
    options = parser.parse_args(argv)
    print("devices  clients  variant           steps  padded, idle   median s        slowdown")
    rows: list[Row] = []
    for devices in options.devices:
        settings = (options.clients, options.sigma, options.batch_size, options.repetitions)
        for row in on_devices(devices, measure, devices, *settings):
            seconds = statistics.median(row.seconds)
            print(
                f"{row.devices:7}  {row.clients:7,}  {row.variant:13}  {row.steps:8,}  "
                f"{row.padded_or_idle_fraction:12.2%}  {seconds:9.3f}  {row.slowdown:14.3f}",
                flush=True,
            )
            rows.append(row)
    write(options.json, rows, **vars(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

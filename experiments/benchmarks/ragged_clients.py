"""A FedAvg round of clients with different numbers of steps: what the differences cost.

    python -m fedpax.experiments.benchmarks.ragged_clients --clients=256 --devices=1,2

The clients' numbers of steps are log-normal. Four variants of the round are timed, in interleaved
calls:

- balanced: each client runs its own steps, and `balanced_order` distributes the clients;
- as drawn: each client runs its own steps, in the order of sampling;
- padded: each client runs as many steps as the longest client, and padded steps change nothing;
- equal clients: all clients have the same number of steps, the mean. This is the limit.

The first three give the same result. `slowdown` is the time per valid step, divided by the time
with equal clients.
"""

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.algorithm import Metrics, Params, State
from fedpax.algorithms import fedavg
from fedpax.data import balanced_order, idle_fraction
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.fedavg_round import check_equal
from fedpax.experiments.benchmarks.harness import Row, Timed, command, option
from fedpax.experiments.benchmarks.workloads import LEARNING_RATE, WORKLOADS, Sizes


class RaggedClients(Sizes, Timed):
    clients: list[int] = option("256", "numbers of clients in the round", harness.integers)
    sigma: float = option(1.0, "spread of the logarithm of a client's steps; their median is 4")
    batch_size: int = option(20, "examples in a step")
    columns = (
        "devices {devices} | clients {clients:,} | variant {variant:13} | steps {steps:9,} "
        "| padded, idle {padded_or_idle_fraction:.2%} | median s {seconds:.3f} "
        "| slowdown {slowdown:.3f}"
    )

    def measure_size(self, devices: int, clients: int) -> list[Row]:
        random = np.random.default_rng(0)
        num_steps = np.ceil(random.lognormal(np.log(4), self.sigma, clients)).astype(np.int32)
        mean_steps = max(1, round(num_steps.sum() / clients))
        cohorts = self.variants(num_steps, mean_steps, devices)
        workload = WORKLOADS[self.model]()
        algorithm = fedavg(
            workload.loss_fn,
            cohort_size=clients,
            client_optimizer=optax.sgd(LEARNING_RATE),
            chunk_size=1,
        )

        @jax.jit
        def run_round(state: State, cohort: fedpax.Cohort) -> tuple[Params, Metrics]:
            state, metrics = algorithm.round(state, cohort)
            return state.params, metrics

        mesh = fedpax.make_mesh(devices=jax.devices()[:devices], clients=devices)
        with jax.set_mesh(mesh):
            state = algorithm.init(jax.jit(workload.model.init)(jax.random.key(0)))
            over_clients = NamedSharding(mesh, P("clients"))
            placed = {name: jax.device_put(c, over_clients) for name, (c, _) in cohorts.items()}
            calls = {name: lambda c=cohort: run_round(state, c) for name, cohort in placed.items()}
            check_equal({name: call() for name, call in calls.items() if name != "equal clients"})
            seconds = self.time(calls)
        limit = [s / (mean_steps * clients) for s in seconds["equal clients"]]
        rows = []
        for name, (_, run) in cohorts.items():
            valid = mean_steps * clients if name == "equal clients" else int(num_steps.sum())
            busy = 1 - idle_fraction(run, devices)
            rows.append(
                Row(
                    variant=name,
                    steps=int(run.sum()),
                    padded_or_idle_fraction=1 - busy * valid / int(run.sum()),
                    seconds=seconds[name],
                    slowdown=timing.paired_ratio([s / valid for s in seconds[name]], limit),
                )
            )
        return rows

    def variants(
        self, num_steps: np.ndarray, mean_steps: int, devices: int
    ) -> dict[str, tuple[fedpax.Cohort, np.ndarray]]:
        """Return the cohort of each variant, and the steps that its clients run."""
        workload, random = WORKLOADS[self.model](), np.random.default_rng(1)
        longest = int(num_steps.max())
        shape = len(num_steps), longest, self.batch_size
        mask = np.broadcast_to((np.arange(longest) < num_steps[:, None])[..., None], shape)
        batches = {
            "image": random.random((*shape, *workload.image_shape), np.float32),
            "label": random.integers(0, workload.num_classes, shape, np.int32),
        }
        num_examples = num_steps.astype(np.float32)
        as_drawn = fedpax.Cohort(batches, num_examples, num_steps)
        order = balanced_order(num_steps, devices)
        balanced = jax.tree.map(lambda x: x[order], as_drawn)
        equal_steps = np.full_like(num_steps, mean_steps)
        # Without num_steps, a method computes every step and discards those that are padding.
        padded = fedpax.Cohort({**batches, "mask": mask}, num_examples)
        return {
            "balanced": (balanced, num_steps[order]),
            "as drawn": (as_drawn, num_steps),
            "padded": (padded, np.full_like(num_steps, longest)),
            "equal clients": (balanced._replace(num_steps=equal_steps), equal_steps),
        }


main = command(RaggedClients)

"""Compare federated methods over virtual seconds and bytes, on the embedded digits.

    python -m fedpax.experiments.benchmarks.virtual_time --out=virtual_time.png

FedAvg, FedBuff and FedAsync keep the same number of clients busy, on the same trace, with the same
local training. FedBuff and FedAsync have the same virtual time, FedAvg as many bytes. Server
learning rates are 1; FedAsync mixes with 0.4.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from fedpax import Cohort, algorithms, simulation
from fedpax.algorithm import FederatedAlgorithm
from fedpax.clients import Arrivals
from fedpax.data import load, read_examples
from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.losses import classification_loss
from fedpax.populations.label_skew import partition_dirichlet
from fedpax.simulation import exponential, lognormal, transfer_seconds, uniform

STEPS, BATCH = 5, 8


class VirtualTime(Benchmark):
    clients: int = option(100, "size of the population")
    busy: int = option(30, "number of clients that train at the same time")
    buffer: int = option(10, "number of arrivals per server update of FedBuff")
    sigma: float = option(1.0, "spread of the speeds, lognormal with a median of 1 step per second")
    seconds: float = option(600.0, "virtual seconds of the asynchronous runs")
    seed: int = option(0, "random seed")
    target: float = option(0.4, "held-out loss to reach")
    columns = (
        "method {method:8} | updates {updates:,} | staleness {mean_staleness:.1f} "
        "| last loss {last_loss:.3f} | seconds to the target {seconds_to_target:,.0f} "
        "| megabytes {megabytes_to_target:,.1f}"
    )

    def measure(self) -> Iterator[Row]:
        train = read_examples(load("digits", "train"))
        heldout = jax.tree.map(jnp.asarray, read_examples(load("digits", "test")))
        parts = partition_dirichlet(
            train["label"], self.clients, alpha=0.3, min_examples=4, seed=self.seed
        )
        # Each client repeats its examples to fill its batches.
        rows = np.stack([np.resize(part, STEPS * BATCH) for part in parts])
        shape = self.clients, STEPS, BATCH
        data = {name: jnp.array(a[rows].reshape(*shape, *a.shape[1:])) for name, a in train.items()}
        model = mlp(MLPConfig((heldout["image"][0].size, 32, 10)))
        params, loss_fn = model.init(jax.random.key(self.seed)), classification_loss(model.apply)
        megabytes = 2 * sum(x.nbytes for x in jax.tree.leaves(params)) / 1e6  # there and back
        trace = simulation.draw_trace(
            self.clients,
            seed=self.seed,
            seconds_per_step=lognormal(1.0, self.sigma),
            seconds_to_receive=transfer_seconds(1e6, uniform(1e6, 8e6)),
            seconds_to_send=transfer_seconds(1e6, uniform(0.5e6, 2e6)),
            time_to_failure=exponential(600.0),
            time_to_return=exponential(60.0),
            horizon=4 * self.seconds,
        )

        def curve(
            method: str,
            algorithm: FederatedAlgorithm,
            ids: Any,
            seconds: Any,
            staleness: Any = None,
        ) -> Row:
            def one_round(state: Any, now: tuple[Any, Any]) -> tuple[Any, Any]:
                batches = jax.tree.map(lambda leaf: leaf[now[0]], data)
                state, _ = algorithm.round(state, Cohort(batches, schedule=now[1]))
                return state, loss_fn(state.params, heldout)[0]

            now = ids, None if staleness is None else Arrivals(staleness)
            run = jax.jit(lambda state, now: jax.lax.scan(one_round, state, now))
            losses = np.asarray(run(algorithm.init(params), now)[1])
            sent = megabytes * ids.shape[1] * np.arange(1, len(seconds) + 1)
            reached = next(iter(np.flatnonzero(losses <= self.target).tolist()), None)
            return Row(
                method=method,
                seconds=seconds.tolist(),
                megabytes=sent.tolist(),
                loss=losses.tolist(),
                updates=len(losses),
                last_loss=float(losses[-1]),
                mean_staleness=0.0 if staleness is None else float(staleness.mean()),
                seconds_to_target=None if reached is None else float(seconds[reached]),
                megabytes_to_target=None if reached is None else float(sent[reached]),
            )

        local, curves = optax.sgd(0.1), []
        for method, buffer in (("FedBuff", self.buffer), ("FedAsync", 1)):
            order = self._arrivals(trace, buffer)
            common: Any = {"client_optimizer": local, "max_staleness": order.max_staleness}
            algorithm: FederatedAlgorithm = (
                algorithms.fedbuff(loss_fn, buffer_size=buffer, **common)
                if method == "FedBuff"
                else algorithms.fedasync(loss_fn, mixing=0.4, **common)
            )
            seconds = order.seconds[:, -1]
            curves.append(curve(method, algorithm, order.client_ids, seconds, order.staleness))
        num_rounds = max(len(curves[0].loss) * self.buffer // self.busy, 1)
        algorithm = algorithms.fedavg(loss_fn, cohort_size=self.busy, client_optimizer=local)
        yield curve("FedAvg", algorithm, *self._synchronous_rounds(trace, num_rounds))
        yield from curves

    def _synchronous_rounds(self, trace: simulation.Trace, num_rounds: int) -> tuple[Any, Any]:
        """Draw FedAvg's cohorts of clients that are up, and when each round ends.

        Failures within a round are left out, in favor of FedAvg: only who is down at its begin is
        not drawn.
        """
        generator = np.random.default_rng(self.seed)
        needed = trace.seconds_to_receive + STEPS * trace.seconds_per_step + trace.seconds_to_send
        cohorts, ends = [], [0.0]
        for _ in range(num_rounds):
            up = np.flatnonzero(trace.is_up(ends[-1]))
            cohorts.append(generator.choice(up, self.busy, replace=False))
            ends.append(ends[-1] + needed[cohorts[-1]].max())
        return np.array(cohorts, np.int32), np.array(ends[1:])

    def _arrivals(self, trace: simulation.Trace, buffer: int) -> Any:
        sizes: Any = {"concurrency": self.busy, "buffer_size": buffer, "num_steps": STEPS}
        rounds = within = 64
        while within == rounds:
            rounds *= 2
            order = simulation.buffered_arrivals(trace, num_rounds=rounds, seed=self.seed, **sizes)
            within = int(np.sum(order.seconds[:, -1] < self.seconds))
        return simulation.buffered_arrivals(
            trace, num_rounds=max(within, 1), seed=self.seed, **sizes
        )

    def draw(self, rows: list[Row]) -> Figure:
        """Draw held-out loss over virtual seconds and over megabytes."""
        log, label = {"xscale": "log", "yscale": "log"}, "held-out loss"
        axes = harness.panels(
            {"xlabel": "virtual seconds", "ylabel": label, **log},
            {"xlabel": "megabytes to and from clients", **log},
            size=(9, 3.4),
            sharey=True,
        )
        for row in rows:
            axes[0].plot(row.seconds, row.loss, label=row.method)
            axes[1].plot(row.megabytes, row.loss, label=row.method)
        return harness.figure_of(axes)


main = command(VirtualTime)

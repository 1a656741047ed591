"""Compare federated methods over virtual seconds and bytes, on the embedded digits.

    python -m fedpax.experiments.benchmarks.virtual_time --out=virtual_time.png

FedAvg waits for the slowest client of each round. FedBuff and FedAsync do not. All three keep the
same number of clients busy, on the same trace, with the same local training. FedBuff and FedAsync
run for the same virtual time, and FedAvg until it has sent as many bytes. Server learning rates are
1; FedAsync mixes with 0.4.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float64
from matplotlib.figure import Figure

from fedpax import Cohort
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import fedasync, fedavg, fedbuff
from fedpax.clients import Arrivals
from fedpax.data import load, read_examples
from fedpax.experiments.benchmarks.harness import Benchmark, Row, option
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.losses import classification_loss
from fedpax.populations.label_skew import partition_dirichlet
from fedpax.simulation import (
    Trace,
    buffered_arrivals,
    draw_trace,
    exponential,
    lognormal,
    transfer_seconds,
    uniform,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options."""

    clients: int = option(100, "size of the population")
    busy: int = option(30, "number of clients that train at the same time")
    buffer: int = option(10, "number of arrivals per server update of FedBuff")
    sigma: float = option(1.0, "spread of the speeds, lognormal with a median of 1 step per second")
    seconds: float = option(600.0, "virtual seconds of the asynchronous runs")
    seed: int = option(0, "random seed")
    target: float = option(0.4, "held-out loss to reach")


STEPS, BATCH = 5, 8


def compare(settings: Settings) -> list[Row]:
    """Train with all methods on the same data and trace; return a curve per method."""
    train = read_examples(load("digits", "train"))
    heldout = jax.tree.map(jnp.asarray, read_examples(load("digits", "test")))
    parts = partition_dirichlet(
        train["label"], settings.clients, alpha=0.3, min_examples=4, seed=settings.seed
    )
    # Each client repeats its examples to fill its batches.
    rows = np.stack([np.resize(part, STEPS * BATCH) for part in parts])
    shape = settings.clients, STEPS, BATCH
    data = {name: jnp.array(a[rows].reshape(*shape, *a.shape[1:])) for name, a in train.items()}
    model = mlp(MLPConfig((heldout["image"][0].size, 32, 10)))
    params = model.init(jax.random.key(settings.seed))
    loss_fn = classification_loss(model.apply)
    megabytes = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6  # there and back
    trace = draw_trace(
        settings.clients,
        seed=settings.seed,
        seconds_per_step=lognormal(1.0, settings.sigma),
        seconds_to_receive=transfer_seconds(1e6, uniform(1e6, 8e6)),
        seconds_to_send=transfer_seconds(1e6, uniform(0.5e6, 2e6)),
        time_to_failure=exponential(600.0),
        time_to_return=exponential(60.0),
        horizon=4 * settings.seconds,
    )

    def curve(
        method: str,
        algorithm: FederatedAlgorithm,
        client_ids: Any,
        staleness: Any,
        seconds: Float64[np.ndarray, " rounds"],
    ) -> Row:
        """Run a method as one program."""

        def one_round(state: Any, now: tuple[Any, Any]) -> tuple[Any, Any]:
            ids, schedule = now
            batches = jax.tree.map(lambda leaf: leaf[ids], data)
            state, _ = algorithm.round(state, Cohort(batches, schedule=schedule))
            return state, loss_fn(state.params, heldout)[0]

        schedule = None if staleness is None else Arrivals(staleness)
        start = algorithm.init(params)
        _, loss = jax.jit(lambda s, now: jax.lax.scan(one_round, s, now))(
            start, (client_ids, schedule)
        )
        sent = megabytes * client_ids.shape[1] * np.arange(1, len(seconds) + 1)
        losses = np.asarray(loss)
        return Row(
            method=method,
            seconds=seconds.tolist(),
            megabytes=sent.tolist(),
            loss=losses.tolist(),
            mean_staleness=0.0 if staleness is None else float(staleness.mean()),
            reached=next(iter(np.flatnonzero(losses <= settings.target).tolist()), None),
        )

    local = {"client_optimizer": optax.sgd(0.1)}
    curves = []
    for method, buffer in (("FedBuff", settings.buffer), ("FedAsync", 1)):
        order = buffered_arrivals(
            trace,
            num_rounds=_updates_until(trace, settings, buffer),
            concurrency=settings.busy,
            buffer_size=buffer,
            num_steps=STEPS,
            seed=settings.seed,
        )
        most = order.max_staleness
        algorithm: FederatedAlgorithm = (
            fedbuff(loss_fn, buffer_size=buffer, max_staleness=most, **local)
            if method == "FedBuff"
            else fedasync(loss_fn, max_staleness=most, mixing=0.4, **local)
        )
        curves.append(
            curve(method, algorithm, order.client_ids, order.staleness, order.seconds[:, -1])
        )
    num_rounds = max(len(curves[0].loss) * settings.buffer // settings.busy, 1)
    ids, seconds = synchronous_rounds(trace, settings, num_rounds)
    algorithm = fedavg(loss_fn, cohort_size=settings.busy, **local)
    return [curve("FedAvg", algorithm, ids, None, seconds), *curves]


def synchronous_rounds(
    trace: Trace, settings: Settings, num_rounds: int
) -> tuple[np.ndarray, Float64[np.ndarray, " rounds"]]:
    """Draw FedAvg's cohorts of clients that are up, and when each round ends.

    Failures within a round are left out, in favor of FedAvg: only who is down at its begin is not
    drawn.
    """
    generator = np.random.default_rng(settings.seed)
    needed = trace.seconds_to_receive + STEPS * trace.seconds_per_step + trace.seconds_to_send
    cohorts, ends, now = [], [], 0.0
    for _ in range(num_rounds):
        up = np.flatnonzero(trace.is_up(now))
        cohort = generator.choice(up, settings.busy, replace=False)
        now += needed[cohort].max()
        cohorts.append(cohort)
        ends.append(now)
    return np.array(cohorts, np.int32), np.array(ends)


def _updates_until(trace: Trace, settings: Settings, buffer: int) -> int:
    """Return the number of server updates in the virtual time of a run."""
    rounds = 64
    while True:
        order = buffered_arrivals(
            trace,
            num_rounds=rounds,
            concurrency=settings.busy,
            buffer_size=buffer,
            num_steps=STEPS,
            seed=settings.seed,
        )
        within = int(np.sum(order.seconds[:, -1] < settings.seconds))
        if within < rounds:
            return max(within, 1)
        rounds *= 2


def draw(settings: Settings, curves: Sequence[Row]) -> Figure:
    """Draw held-out loss over virtual seconds and over megabytes."""
    figure = Figure(figsize=(9, 3.4), layout="constrained", dpi=110)
    over_seconds, over_bytes = figure.subplots(1, 2, sharey=True)
    for curve in curves:
        over_seconds.plot(curve.seconds, curve.loss, label=curve.method)
        over_bytes.plot(curve.megabytes, curve.loss, label=curve.method)
    over_seconds.set(xlabel="virtual seconds", ylabel="held-out loss", xscale="log", yscale="log")
    over_bytes.set(xlabel="megabytes to and from clients", xscale="log")
    for axes in (over_seconds, over_bytes):
        axes.grid(alpha=0.3)
    over_seconds.legend(frameon=False)
    return figure


def _when_reached(row: Row, measurement: str, digits: int) -> str:
    if row.reached is None:
        return "-"
    return f"{vars(row)[measurement][row.reached]:,.{digits}f}"


main = Benchmark(
    __doc__,
    Settings,
    compare,
    {
        "method": "{method:8}",
        "updates": lambda row: f"{len(row.loss):,}",
        "staleness": "{mean_staleness:.1f}",
        "last loss": lambda row: f"{row.loss[-1]:.3f}",
        "seconds to the target": lambda row: _when_reached(row, "seconds", 0),
        "megabytes": lambda row: _when_reached(row, "megabytes", 1),
    },
    draw=draw,
    aliases={"--plot": "--out"},
)


if __name__ == "__main__":
    raise SystemExit(main())

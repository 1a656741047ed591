"""Compare federated methods over virtual seconds and bytes, on the embedded digits.

    python -m fedpax.experiments.benchmarks.virtual_time --out=virtual_time.png

FedAvg waits for the slowest client of each round. FedBuff and FedAsync do not. All three keep the
same number of clients busy, on the same trace, with the same local training. FedBuff and FedAsync
run for the same virtual time, and FedAvg until it has sent as many bytes. Server learning rates are
1; FedAsync mixes with 0.4.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from fedpax.data.populations.label_skew import partition_dirichlet
from fedpax.experiments.benchmarks.timing import write
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.losses import classification_loss
from fedpax.simulation import (
    Trace,
    buffered_arrivals,
    draw_trace,
    exponential,
    lognormal,
    transfer_seconds,
    uniform,
)


class Settings(NamedTuple):
    """The population, its trace, and the local training.

    Attributes:
        clients: size of the population.
        busy: number of clients that train at the same time.
        buffer: number of arrivals per server update of FedBuff.
        sigma: spread of the clients' speeds, lognormal with a median of 1 step per second.
        seconds: virtual seconds of the asynchronous runs.
        seed: the random seed.
    """

    clients: int = 100
    busy: int = 30
    buffer: int = 10
    sigma: float = 1.0
    seconds: float = 600.0
    seed: int = 0


class Curve(NamedTuple):
    """The held-out loss of a method after each server update.

    Attributes:
        method: its name.
        seconds: virtual second of each update.
        megabytes: megabytes to and from clients by then.
        loss: held-out loss.
        mean_staleness: the mean over all updates.
    """

    method: str
    seconds: list[float]
    megabytes: list[float]
    loss: list[float]
    mean_staleness: float


STEPS, BATCH = 5, 8


def compare(settings: Settings) -> list[Curve]:
    """Train with all methods on the same data and trace.

    Args:
        settings: the population and the trace.

    Returns:
        A curve per method.
    """
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
    ) -> Curve:
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
        mean = 0.0 if staleness is None else float(staleness.mean())
        return Curve(method, seconds.tolist(), sent.tolist(), np.asarray(loss).tolist(), mean)

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

    Args:
        trace: speeds and failures of the clients.
        settings: the population.
        num_rounds: number of rounds.

    Returns:
        int32 `[rounds, busy]`, and the seconds.
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


def draw(curves: Sequence[Curve]) -> Figure:
    """Draw held-out loss over virtual seconds and over megabytes.

    Args:
        curves: the results of `compare`.

    Returns:
        A figure with two plots.
    """
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


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as the arguments say, print a table, and draw the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in Settings()._asdict().items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--target", type=float, default=0.4, help="held-out loss to reach")
    parser.add_argument("--out", type=Path, help="file of the picture; without it none is drawn")
    parser.add_argument("--json", help="JSON file for the curves; without it none is written")
    options = parser.parse_args(argv)
    start = time.perf_counter()
    curves = compare(Settings(*(getattr(options, name) for name in Settings._fields)))
    print(f"held-out loss of {options.target:g} after")
    print("method    updates  staleness  last loss   seconds  megabytes")
    for curve in curves:
        reached = np.flatnonzero(np.array(curve.loss) <= options.target)
        when = (
            f"{curve.seconds[reached[0]]:8,.0f}  {curve.megabytes[reached[0]]:9.1f}"
            if len(reached)
            else f"{'-':>8}  {'-':>9}"
        )
        print(
            f"{curve.method:8}  {len(curve.loss):7,}  {curve.mean_staleness:9.1f}  "
            f"{curve.loss[-1]:9.3f}  {when}"
        )
    print(f"{time.perf_counter() - start:.1f} s")
    if options.out:
        draw(curves).savefig(options.out)
        print(options.out)
    if options.json:
        write(options.json, curves, **vars(options) | {"out": str(options.out)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Federated methods on one problem: rounds, bytes and client FLOPs to a target accuracy.

    python -m fedpax.experiments.benchmarks.methods --problem=digits --plot=digits.png
    python -m fedpax.experiments.benchmarks.methods --problem=synthetic --rounds=200

All methods train the same model on the same cohorts. The client learning rate of each method is the
one of a grid with which it reaches the target first (or ends with the highest accuracy). Accuracy
is that of the server's model on held-out examples of all clients. Bytes are those that the clients
of a round receive and send, and FLOPs those of their valid steps, by `fedpax.cost`.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

import fedpax
from fedpax.algorithms import (
    fedavg,
    feddyn,
    fednova,
    fedprox,
    mime,
    mime_lite,
    scaffold,
    self_tuning,
    server_adam,
)
from fedpax.data import (
    ClientSampler,
    CohortRounds,
    cohort_rounds,
    load,
    partition_dirichlet,
    read_examples,
)
from fedpax.data.populations.logistic_clients import logistic_clients
from fedpax.experiments.benchmarks.arguments import numbers
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.losses import classification_loss
from fedpax.training.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.training.table import format_bytes, markdown_table


@dataclasses.dataclass(frozen=True)
class Problem:
    """Clients, a model and a target.

    Attributes:
        num_clients: size of the population.
        cohort_size: number of clients in a round.
        target: accuracy to reach.
        params: the initial model.
        loss_fn: the loss of a batch.
        heldout: one batch of held-out examples.
        make_rounds: makes the stream of cohorts from the beginning.
    """

    num_clients: int
    cohort_size: int
    target: float
    params: Any
    loss_fn: LossFn
    heldout: Mapping[str, np.ndarray]
    make_rounds: Callable[[], CohortRounds]


def digits(seed: int = 0) -> Problem:
    """Make scikit-learn's digits: 100 clients, Dirichlet(0.1) over labels, an MLP with 64 units."""
    train, test = (read_examples(load("digits", split)) for split in ("train", "test"))
    population = partition_dirichlet(train["label"], 100, alpha=0.1, seed=seed)
    return _problem(train, test, population, (64, 64, 10), 10, target=0.85, seed=seed)


def synthetic(seed: int = 0) -> Problem:
    """Make the clients of FedProx with alpha = beta = 1: 30 clients, logistic regression."""
    examples, population = logistic_clients(30, alpha=1.0, beta=1.0, seed=seed)
    heldout = np.concatenate([part[::10] for part in population])
    population = [np.delete(part, np.s_[::10]) for part in population]
    test = {name: values[heldout] for name, values in examples.items()}
    return _problem(examples, test, population, (60, 10), 10, target=0.7, seed=seed)


def _problem(
    examples: dict[str, np.ndarray],
    heldout: dict[str, np.ndarray],
    population: Sequence[np.ndarray],
    layer_sizes: tuple[int, ...],
    cohort_size: int,
    *,
    target: float,
    seed: int,
) -> Problem:
    model = mlp(MLPConfig(layer_sizes=layer_sizes))
    sampler = ClientSampler(len(population), cohort_size, seed=seed)

    def make_rounds() -> CohortRounds:
        return cohort_rounds(
            examples,
            population,
            sampler,
            batch_size=10,
            max_steps=20,
            seed=seed,
            preprocess=lambda fields: dict(fields),
        )

    return Problem(
        num_clients=len(population),
        cohort_size=cohort_size,
        target=target,
        params=jax.jit(model.init)(jax.random.key(seed)),
        loss_fn=classification_loss(model.apply),
        heldout=heldout,
        make_rounds=make_rounds,
    )


PROBLEMS = {"digits": digits, "synthetic": synthetic}


def methods(problem: Problem) -> dict[str, Callable[[float], FederatedAlgorithm]]:
    """Return the methods by name, as functions of the client learning rate."""
    loss_fn = problem.loss_fn
    cohort: dict[str, Any] = {"cohort_size": problem.cohort_size, "chunk_size": 1}
    clients = {**cohort, "num_clients": problem.num_clients}

    def tuned(rate: float) -> FederatedAlgorithm:
        def of(h: Mapping[str, Any]) -> FederatedAlgorithm:
            server = optax.sgd(h["learning_rate"], momentum=1 - h["damping"])
            return fedavg(
                loss_fn, client_optimizer=optax.sgd(rate), server_optimizer=server, **cohort
            )

        start = {"learning_rate": 0.5, "damping": 0.5}
        return self_tuning(of, start, loss_fn, chunk_size=1)

    def sgd(make: Callable[..., FederatedAlgorithm], **settings: Any) -> Callable:
        return lambda rate: make(loss_fn, client_optimizer=optax.sgd(rate), **settings)

    return {
        "FedAvg": sgd(fedavg, **cohort),
        "FedAvgM": sgd(fedavg, server_optimizer=optax.sgd(0.3, momentum=0.9), **cohort),
        "FedAdam": sgd(fedavg, server_optimizer=server_adam(0.03, b1=0.9), **cohort),
        "FedAvg, self-tuning": tuned,
        "FedProx": sgd(fedprox, mu=0.1, **cohort),
        "FedNova": sgd(fednova, **cohort),
        "SCAFFOLD": sgd(scaffold, **clients),
        "FedDyn": sgd(feddyn, alpha=0.1, **clients),
        "Mime": lambda rate: mime(
            loss_fn, client_optimizer=optax.sgd(rate, momentum=0.9), **cohort
        ),
        "MimeLite": lambda rate: mime_lite(
            loss_fn, client_optimizer=optax.sgd(rate, momentum=0.9), **cohort
        ),
    }


class Row(NamedTuple):
    """A method at its best client learning rate.

    Attributes:
        method: its name.
        learning_rate: the client learning rate.
        rounds: rounds until the target; None if it was not reached.
        best_accuracy: the highest accuracy of all rounds.
        bytes_per_round: bytes that the clients of a round receive and send.
        flops_per_round: FLOPs of the clients of an average round.
        accuracies: the accuracy after each round.
    """

    method: str
    learning_rate: float
    rounds: int | None
    best_accuracy: float
    bytes_per_round: float
    flops_per_round: float
    accuracies: list[float]

    def to_target(self, per_round: float) -> float | None:
        """Return a cost until the target."""
        return None if self.rounds is None else self.rounds * per_round


def measure(
    problem: Problem,
    name: str,
    make: Callable[[float], FederatedAlgorithm],
    rates: Sequence[float],
    num_rounds: int,
) -> Row:
    """Train a method with each learning rate, and keep the best one.

    Args:
        problem: the problem.
        name: the method's name.
        make: makes the method from a client learning rate.
        rates: the grid of client learning rates.
        num_rounds: number of rounds to train.
    """
    rows = [_train(problem, name, make(rate), rate, num_rounds) for rate in rates]

    def quality(row: Row) -> tuple[float, float]:
        return (-np.inf if row.rounds is None else -row.rounds, row.best_accuracy)

    return max(rows, key=quality)


def _train(
    problem: Problem, name: str, algorithm: FederatedAlgorithm, rate: float, num_rounds: int
) -> Row:
    step = jax.jit(algorithm.round, donate_argnums=0)

    @jax.jit
    def accuracy_of(params: Params) -> jax.Array:
        metrics = problem.loss_fn(params, problem.heldout)[1]
        assert metrics is not None  # `classification_loss` returns the accuracy
        return metrics["accuracy"]

    state = jax.jit(algorithm.init)(problem.params)
    rounds, accuracies, steps = problem.make_rounds(), [], []
    for _ in range(num_rounds):
        cohort = next(rounds)
        steps.append(np.asarray(cohort.num_steps).sum())
        state, _ = step(state, cohort)
        accuracies.append(float(accuracy_of(state.params)))
    cost = fedpax.cost(algorithm.round, state, cohort._replace(num_steps=None))
    clients = cost.placements["clients"]
    reached = np.flatnonzero(np.asarray(accuracies) >= problem.target)
    return Row(
        method=name,
        learning_rate=rate,
        rounds=int(reached[0]) + 1 if len(reached) else None,
        best_accuracy=max(accuracies),
        bytes_per_round=problem.cohort_size * (clients.broadcast_bytes + clients.sent_bytes),
        flops_per_round=clients.flops * float(np.mean(steps)) / rounds.max_steps,
        accuracies=accuracies,
    )


def draw(rows: Sequence[Row], target: float) -> Figure:
    """Draw the accuracy of each method over rounds and over bytes."""
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=110)
    for axes, label in zip(figure.subplots(1, 2, sharey=True), ("round", "bytes"), strict=True):
        for row in rows:
            scale = 1 if label == "round" else row.bytes_per_round
            places = scale * np.arange(1, len(row.accuracies) + 1)
            axes.plot(places, row.accuracies, label=row.method, linewidth=1)
        axes.axhline(target, color="gray", linewidth=0.5)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("held-out accuracy")
    figure.axes[1].legend(frameon=False, fontsize="small")
    return figure


def table(rows: Sequence[Row], target: float) -> str:
    """Format the rows as a Markdown table, the fastest method first."""
    head = ["method", "client rate", f"rounds to {target:.0%}", "bytes", "client FLOPs", "best"]
    cells = []
    for row in sorted(rows, key=lambda row: (row.rounds or np.inf, -row.best_accuracy)):
        sent, flops = row.to_target(row.bytes_per_round), row.to_target(row.flops_per_round)
        cells.append(
            [
                row.method,
                f"{row.learning_rate:g}",
                "not reached" if row.rounds is None else str(row.rounds),
                "" if sent is None else format_bytes(sent),
                "" if flops is None else f"{flops:.3g}",
                f"{row.best_accuracy:.1%}",
            ]
        )
    return markdown_table(head, cells)


def main() -> None:
    """Train the methods, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", choices=PROBLEMS, default="digits")
    parser.add_argument("--rounds", type=int, default=100, help="rounds to train")
    parser.add_argument(
        "--rates", type=numbers, default="0.03,0.1,0.3", help="client learning rates"
    )
    parser.add_argument("--methods", help="names separated by semicolons; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, model and cohorts")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--plot", help="file for the figure, such as methods.png")
    options = parser.parse_args()
    problem = PROBLEMS[options.problem](options.seed)
    known = methods(problem)
    chosen = list(known) if options.methods is None else options.methods.split(";")
    if unknown := set(chosen) - set(known):
        parser.error(f"unknown methods {sorted(unknown)}; choose from {'; '.join(known)}")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, expected at least 1")
    rows = []
    for name in chosen:
        rows.append(measure(problem, name, known[name], options.rates, options.rounds))
        print(f"{name}: best accuracy {rows[-1].best_accuracy:.1%}", flush=True)
    print(table(rows, problem.target))
    if options.json:
        settings = {"problem": options.problem, "target": problem.target}
        content = {"settings": settings, "rows": [row._asdict() for row in rows]}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")
    if options.plot:
        draw(rows, problem.target).savefig(options.plot)


if __name__ == "__main__":
    main()

"""Every method and aggregator on the same two problems: the figures of the gallery of methods.

    python -m fedpax.experiments.benchmarks.gallery --json=docs/gallery/results.json

Ten participants take ten steps of ten examples in each round. `digits` is scikit-learn's digits
with labels from Dirichlet(0.3), and an MLP with 32 hidden units. `synthetic` is FedProx's
synthetic(1, 1), and logistic regression. All methods have the same batches and first model, and
nothing is tuned. Accuracy is the mean over participants, each on its own held-out examples with its
own model. Aggregators run in FedAvg, and once more with two participants whose updates are
multiplied by -4. In asynchronous methods, speeds differ by up to three times.
"""

import functools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from fedpax import Cohort, cost
from fedpax.algorithm import LossFn
from fedpax.data import partition_dirichlet
from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.gallery_methods import (
    AGGREGATORS,
    NAMES,
    PARTICIPANTS,
    STEPS,
    Method,
    Rates,
    make_method,
)
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.losses import classification_loss
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.populations.synthetic_clients import logistic_clients

BATCH, SMALLEST = 10, 20
Arrays = dict[str, NDArray[Any]]


class Problem(NamedTuple):
    """A problem: the model, each participant's training and held-out examples, learning rates."""

    model: FunctionalModel
    training: list[Arrays]
    heldout: Arrays  # [participants, examples, ...], with a mask
    rates: Rates

    @property
    def loss_fn(self) -> LossFn:
        """The cross-entropy."""
        return classification_loss(self.model.apply)

    def batches(self, rounds: int) -> Arrays:
        """Draw `[rounds, participants, steps, batch, ...]`: each participant's examples in turn."""
        drawn = []
        for seed, examples in enumerate(self.training):
            random, size = np.random.default_rng(seed), rounds * STEPS * BATCH
            count = len(examples["label"])
            order = np.concatenate([random.permutation(count) for _ in range(-(-size // count))])
            chosen = order[:size].reshape(rounds, STEPS, BATCH)
            drawn.append({name: leaf[chosen] for name, leaf in examples.items()})
        return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *drawn)


def _problem(examples: Arrays, parts: Any, hidden: tuple[int, ...], rates: Rates) -> Problem:
    """Hold out a fifth of each participant's examples."""
    training, heldout = [], []
    for part in parts:
        part = np.random.default_rng(0).permutation(part)
        kept = np.delete(part, np.s_[::5])
        training.append({k: v[kept] for k, v in examples.items()})
        held = {k: v[part[::5]] for k, v in examples.items()}
        heldout.append(held | {"mask": np.ones(len(held["label"]), np.float32)})
    largest = max(len(arrays["mask"]) for arrays in heldout)
    padded = [
        {k: np.pad(v, [(0, largest - len(v))] + [(0, 0)] * (v.ndim - 1)) for k, v in arrays.items()}
        for arrays in heldout
    ]
    model = mlp(MLPConfig(layer_sizes=(examples["image"].shape[1], *hidden, 10)))
    return Problem(model, training, jax.tree.map(lambda *x: np.stack(x), *padded), rates)


def digits() -> Problem:
    """Make the problem of unlike labels."""
    data = load_digits()
    image, label = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    parts = partition_dirichlet(label, PARTICIPANTS, alpha=0.3, min_examples=SMALLEST, seed=0)
    rates = Rates(client=0.1, island=0.003)
    return _problem({"image": image, "label": label}, parts, (32,), rates)


def synthetic() -> Problem:
    """Make the problem of unlike inputs and unlike models."""
    examples, parts = logistic_clients(PARTICIPANTS, alpha=1.0, beta=1.0, seed=0)
    return _problem(examples, parts, (), Rates(client=0.03, island=0.01))


PROBLEMS = {"digits": digits, "synthetic": synthetic}


def start(problem: Problem, method: Method) -> Any:
    """Make the state of the first round."""
    params = problem.model.init(jax.random.key(0))
    if method.stack:
        keys = jax.random.split(jax.random.key(0), method.stack)
        params = jax.vmap(problem.model.init)(keys)
    return jax.jit(method.algorithm.init)(params)


def train(problem: Problem, method: Method, batches: Arrays, rounds: int) -> list[float]:
    """Train a method; return the accuracy of the first model and after each round."""
    state, step = start(problem, method), jax.jit(method.algorithm.round)
    evaluate = jax.jit(functools.partial(_accuracy, problem.model, method.models))
    whole = cohort_of(method, batches, 0)
    accuracies = [evaluate(state, whole, problem.heldout)]
    for r in range(rounds if method.events is None else 0):
        cohort = cohort_of(method, batches, r)
        state, _ = step(state, cohort)
        accuracies.append(evaluate(state, cohort, problem.heldout))
    work, turns = 0, np.zeros(PARTICIPANTS, int)
    for event in method.events or ():
        clients = event.get("clients", np.arange(PARTICIPANTS))
        # A participant takes its batches in its own turn, whoever arrives in between.
        turn = turns[clients] % rounds
        taken = jax.tree.map(operator.itemgetter((turn, clients)), batches)
        state, _ = step(state, Cohort(taken, None, event.get("num_steps"), None, event["schedule"]))
        turns[clients] += 1
        work += int(np.sum(event.get("taken", STEPS * len(clients))))
        while len(accuracies) <= min(rounds, work // (PARTICIPANTS * STEPS)):
            accuracies.append(evaluate(state, whole, problem.heldout))
    return [round(float(accuracy), 4) for accuracy in accuracies]


def cohort_of(method: Method, batches: Arrays, number: int) -> Cohort:
    """Make the cohort of a round in which all participants take part."""
    taken = jax.tree.map(lambda leaf: leaf[number], batches)
    # Islands are all of them in place: without ids, the length of their loops is known.
    ids = np.arange(PARTICIPANTS) if method.placement == "clients" else None
    return Cohort(taken, client_ids=ids)


def _accuracy(
    model: FunctionalModel, models: Any, state: Any, cohort: Cohort, heldout: Any
) -> jax.Array:
    def repeat(p: jax.Array) -> jax.Array:
        return jnp.broadcast_to(p, (PARTICIPANTS, *p.shape))

    params = jax.tree.map(repeat, state.params) if models is None else models(state, cohort)
    logits = jax.vmap(model.apply)(params, heldout["image"])
    correct = (logits.argmax(-1) == heldout["label"]) * heldout["mask"]
    return jnp.mean(correct.sum(1) / heldout["mask"].sum(1))


class Gallery(Benchmark):
    rounds: int = option(30, "rounds to train", harness.integer)
    methods: list[str] | None = harness.some(",", lambda _: NAMES)
    columns = (
        "method {method:20} | digits {digits:.3f} | synthetic {synthetic:.3f} "
        "| received {received_bytes:8,} | sent {sent_bytes:8,} | FLOPs {flops:9.3g}"
    )

    def measure(self) -> Iterator[Row]:
        problems = {name: make() for name, make in PROBLEMS.items()}
        batches = {name: problem.batches(self.rounds) for name, problem in problems.items()}
        for name in self.methods or NAMES:
            trained: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}
            for is_attacked in (False, True) if name in AGGREGATORS else (False,):
                for at, problem in problems.items():
                    method = make_method(
                        name, problem.loss_fn, problem.rates, self.rounds, is_attacked
                    )
                    trained[is_attacked][at] = train(problem, method, batches[at], self.rounds)
            problem = problems["digits"]
            method = make_method(name, problem.loss_fn, problem.rates, self.rounds, False)
            state, cohort = start(problem, method), _costed(method, batches["digits"])
            participant = cost(method.algorithm.round, state, cohort).placements[method.placement]
            yield Row(
                method=name,
                placement=method.placement,
                accuracy=trained[False],
                attacked=trained[True] or None,
                received_bytes=participant.broadcast_bytes,
                sent_bytes=participant.sent_bytes,
                flops=participant.flops,
                digits=trained[False]["digits"][-1],
                synthetic=trained[False]["synthetic"][-1],
            )


def _costed(method: Method, batches: Arrays) -> Cohort:
    if method.events is None:
        return cohort_of(method, batches, 0)
    clients = method.events[0].get("clients", np.arange(PARTICIPANTS))
    return Cohort(jax.tree.map(lambda leaf: leaf[0, clients], batches))


main = command(Gallery)

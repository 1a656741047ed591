"""References of the methods, from the papers' equations: NumPy in float64, manual gradients.

Nothing here is shared with what is tested: no JAX, no optax, no automatic derivative. Parameters
and batches are flat dicts of arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Tree = Mapping[str, np.ndarray]
Metrics = dict[str, np.ndarray]
Round = tuple[Tree, Metrics]


def each(fn: Callable[..., Any], *trees: Tree) -> dict[str, np.ndarray]:
    """Apply a function leaf by leaf."""
    return {name: fn(*[tree[name] for tree in trees]) for name in trees[0]}


def weighted_mean(trees: Sequence[Tree], weights: Sequence[float]) -> dict[str, np.ndarray]:
    """Return sum_i (n_i / n) tree_i; 0 if all weights are 0."""
    total = sum(weights)
    shares = [w / total if total else 0.0 for w in weights]
    return each(lambda *xs: sum(s * x for s, x in zip(shares, xs, strict=True)), *trees)


def mean(trees: Sequence[Tree]) -> dict[str, np.ndarray]:
    return weighted_mean(trees, [1.0] * len(trees))


# ---- the model: a classifier with one hidden layer and a scalar in front of its logits


def gradient_and_metrics(params: Tree, batch: Tree) -> tuple[dict[str, np.ndarray], Metrics]:
    """Differentiate the mean cross-entropy of softmax(scale * (tanh(x W + b) V)) by hand."""
    x, labels = np.asarray(batch["x"], np.float64), batch["label"]
    hidden = np.tanh(x @ params["kernel"] + params["bias"])
    unscaled = hidden @ params["out"]
    logits = params["scale"] * unscaled
    odds = np.exp(logits - logits.max(1, keepdims=True))
    probability = odds / odds.sum(1, keepdims=True)
    rows = np.arange(len(labels))

    to_logits = probability.copy()
    to_logits[rows, labels] -= 1
    to_logits /= len(labels)
    to_unscaled = params["scale"] * to_logits
    to_preactivation = (to_unscaled @ params["out"].T) * (1 - hidden**2)
    gradient = {
        "kernel": x.T @ to_preactivation,
        "bias": to_preactivation.sum(0),
        "out": hidden.T @ to_unscaled,
        "scale": np.sum(to_logits * unscaled),
    }
    metrics = {
        "loss": -np.log(probability[rows, labels]).mean(),
        "confidence": probability.max(1).mean(),
        "correct": np.sum(logits.argmax(1) == labels),
    }
    return gradient, metrics


# ---- optimizers: `init(params)` and `step(params, gradient, state) -> (params, state)`


class Optimizer(NamedTuple):
    init: Callable[[Tree], Any]
    step: Callable[[Tree, Tree, Any], tuple[dict[str, np.ndarray], Any]]


def sgd(rate: float) -> Optimizer:
    return Optimizer(
        init=lambda x: None,
        step=lambda x, g, state: (each(lambda x, g: x - rate * g, x, g), None),
    )


def momentum(rate: float, beta: float, *, nesterov: bool = False) -> Optimizer:
    """v <- beta v + g; x <- x - rate v, or with Nesterov x <- x - rate (g + beta v)."""

    def step(x, g, v):
        v = each(lambda v, g: beta * v + g, v, g)
        way = each(lambda g, v: g + beta * v, g, v) if nesterov else v
        return each(lambda x, w: x - rate * w, x, way), v

    return Optimizer(lambda x: each(np.zeros_like, x), step)


class Moments(NamedTuple):
    count: int
    first: Tree
    second: Tree


def adam(
    rate: float | Callable[[int], float],
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float = 0.0,
    clip: float | None = None,
) -> Optimizer:
    """Adam with bias correction; with `decay`, AdamW. `rate` may be a schedule from 0."""

    def step(x, g, state):
        if clip is not None:
            norm = np.sqrt(sum(np.sum(leaf**2) for leaf in g.values()))
            g = each(lambda g: g * min(1.0, clip / norm), g)
        now = rate(state.count) if callable(rate) else rate
        t = state.count + 1
        m = each(lambda m, g: beta1 * m + (1 - beta1) * g, state.first, g)
        v = each(lambda v, g: beta2 * v + (1 - beta2) * g**2, state.second, g)

        def move(x, m, v):
            corrected = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + epsilon)
            return x - now * (corrected + decay * x)

        return each(move, x, m, v), Moments(t, m, v)

    return Optimizer(lambda x: Moments(0, each(np.zeros_like, x), each(np.zeros_like, x)), step)


def yogi(rate: float, beta1: float, beta2: float, epsilon: float, start: float = 1e-6) -> Optimizer:
    """Yogi as in optax: both moments start at `start` and are corrected for bias."""

    def step(x, g, state):
        t = state.count + 1
        m = each(lambda m, g: beta1 * m + (1 - beta1) * g, state.first, g)
        v = each(lambda v, g: v - (1 - beta2) * np.sign(v - g**2) * g**2, state.second, g)

        def move(x, m, v):
            return x - rate * m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + epsilon)

        return each(move, x, m, v), Moments(t, m, v)

    def full(x):
        return each(lambda x: np.full_like(x, start), x)

    return Optimizer(lambda x: Moments(0, full(x), full(x)), step)


def server_optimizer(rule: str, rate: float, beta1: float, beta2: float, tau: float) -> Optimizer:
    """FedOpt's server optimizers, arXiv:2003.00295, algorithm 2: no bias is corrected."""
    second_moment = {
        "adagrad": lambda v, g: v + g**2,
        "yogi": lambda v, g: v - (1 - beta2) * g**2 * np.sign(v - g**2),
        "adam": lambda v, g: beta2 * v + (1 - beta2) * g**2,
    }[rule]

    def step(x, g, state):
        m = each(lambda m, g: beta1 * m + (1 - beta1) * g, state[0], g)
        v = each(second_moment, state[1], g)
        return each(lambda x, m, v: x - rate * m / (np.sqrt(v) + tau), x, m, v), (m, v)

    return Optimizer(
        lambda x: (each(np.zeros_like, x), each(lambda x: np.full_like(x, tau**2), x)), step
    )


def adagrad(rate: float, start: float = 0.1, epsilon: float = 1e-7) -> Optimizer:
    def step(x, g, v):
        v = each(lambda v, g: v + g**2, v, g)
        return each(lambda x, g, v: x - rate * g / np.sqrt(v + epsilon), x, g, v), v

    return Optimizer(lambda x: each(lambda x: np.full_like(x, start), x), step)


# ---- methods: parameters and metrics after each round; batches are [participants, steps, ...]


def participant(batches: Tree, i: int) -> list[dict[str, np.ndarray]]:
    """Return one participant's batches, a list over the steps, without what a mask excludes."""
    steps = []
    for t in range(batches["label"].shape[1]):
        step = each(lambda b, t=t: b[i, t], batches)
        valid = np.asarray(step.pop("mask", np.ones(len(step["label"]))), bool)
        if valid.any():
            steps.append(each(lambda b, valid=valid: b[valid], step))
    return steps


def train(
    x: Tree, optimizer: Optimizer, state: Any, batches: Sequence[Tree]
) -> tuple[Tree, Any, Metrics]:
    """Take the local steps of one participant, and average its metrics."""
    reports = []
    for batch in batches:
        gradient, metrics = gradient_and_metrics(x, batch)
        x, state = optimizer.step(x, gradient, state)
        reports.append(metrics)
    return x, state, mean(reports)


def fedavg(
    x: Tree,
    rounds: Sequence[Tree],
    weights: Sequence[Sequence[float]],
    client: Optimizer,
    server: Optimizer | None = None,
) -> list[Round]:
    """FedAvg: x <- x + sum_i (n_i / n) (y_i - x). FedOpt: minus that sum to a server optimizer."""
    state, history = (server.init(x) if server else None), []
    for batches, n in zip(rounds, weights, strict=True):
        trained = [train(x, client, client.init(x), participant(batches, i)) for i in range(len(n))]
        delta = weighted_mean([each(np.subtract, y, x) for y, _, _ in trained], n)
        if server is None:
            x = each(np.add, x, delta)
        elif np.sum(n):  # otherwise nobody took part: the server makes no step
            x, state = server.step(x, each(np.negative, delta), state)
        history.append((x, weighted_mean([metrics for *_, metrics in trained], n)))
    return history


def diloco(
    x: Tree,
    rounds: Sequence[Tree],
    inner: Optimizer,
    eta: float = 0.7,
    beta: float = 0.9,
) -> list[Round]:
    """delta = mean_i (x - y_i); v <- beta v + delta; x <- x - eta (delta + beta v)."""
    islands = rounds[0]["label"].shape[0]
    states = [inner.init(x) for _ in range(islands)]
    v, history = each(np.zeros_like, x), []
    for batches in rounds:
        ends, reports = [], []
        for i in range(islands):
            y, states[i], metrics = train(x, inner, states[i], participant(batches, i))
            ends.append(each(np.subtract, x, y))
            reports.append(metrics)
        delta = mean(ends)
        v = each(lambda v, d: beta * v + d, v, delta)
        x = each(lambda x, d, v: x - eta * (d + beta * v), x, delta, v)
        history.append((x, mean(reports)))
    return history


def data_parallel(x: Tree, rounds: Sequence[Tree], optimizer: Optimizer) -> list[Round]:
    """Follow the mean of the islands' gradients at every step."""
    state, history = optimizer.init(x), []
    for batches in rounds:
        reports = []
        for together in zip(
            *[participant(batches, i) for i in range(batches["label"].shape[0])], strict=True
        ):
            gradients = [gradient_and_metrics(x, batch) for batch in together]
            x, state = optimizer.step(x, mean([gradient for gradient, _ in gradients]), state)
            reports.append(mean([metrics for _, metrics in gradients]))
        history.append((x, mean(reports)))
    return history

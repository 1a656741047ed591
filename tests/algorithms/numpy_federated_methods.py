"""References of the federated methods, from the papers' pseudo-code: NumPy in float64, for-loops.

Clients' numbers of examples are distinct, and client k of the population has k + 1 of them: n - 1
are the client ids, -1 for an absent client. Means are uniform over the clients that take a step,
but for the methods that say otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy_methods import (
    Metrics,
    Optimizer,
    Round,
    Tree,
    each,
    gradient_and_metrics,
    mean,
    participant,
    train,
    weighted_mean,
)

POPULATION = 49


def zeros(x: Tree) -> dict[str, np.ndarray]:
    return each(np.zeros_like, x)


def add(x: Tree, y: Tree, factor: float = 1.0) -> dict[str, np.ndarray]:
    """Return x + factor y."""
    return each(lambda x, y: x + factor * y, x, y)


def descend(
    y: Tree, batches: Sequence[Tree], rate: float, way: Callable[..., Tree] = lambda g, *_: g
) -> tuple[Tree, Metrics, Tree]:
    """Take steps y <- y - rate way(g, y, batch); return y, the mean metrics and the mean g."""
    reports, gradients = [], []
    for batch in batches:
        g, metrics = gradient_and_metrics(y, batch)
        y = add(y, way(g, y, batch), -rate)
        reports.append(metrics)
        gradients.append(g)
    return y, mean(reports), mean(gradients)


def present(batches: Tree, n: Sequence[int]) -> list[tuple[int, int, list[Tree]]]:
    """Return (client id, examples, batches) of the clients with a step."""
    cohort = [(int(n[i]) - 1, n[i], participant(batches, i)) for i in range(len(n))]
    return [client for client in cohort if client[2]]


def at(x: Tree, batches: Sequence[Tree]) -> tuple[Tree, Metrics]:
    """Return the mean gradient and metrics of some batches at x."""
    gradient = [gradient_and_metrics(x, batch) for batch in batches]
    return mean([g for g, _ in gradient]), mean([metrics for _, metrics in gradient])


def full_gradient(x: Tree, batches: Sequence[Tree]) -> Tree:
    """Return the gradient at x of all examples of some batches, as of one batch."""
    return gradient_and_metrics(x, each(lambda *b: np.concatenate(b), *batches))[0]


def fedprox(
    x: Tree, rounds: Any, weights: Any, rate: float, mu: float, server_rate: float = 1.0
) -> list[Round]:
    """FedProx; with mu = 0 and a server rate, Reptile."""
    history = []
    for batches, n in zip(rounds, weights, strict=True):
        ends, reports, shares = [], [], []
        for _, examples, own in present(batches, n):
            y, metrics, _ = descend(x, own, rate, lambda g, y, _, x=x: add(g, add(y, x, -1), mu))
            ends.append(y)
            reports.append(metrics)
            shares.append(examples)
        x = add(x, add(weighted_mean(ends, shares), x, -1), server_rate)
        history.append((x, weighted_mean(reports, shares)))
    return history


def scaffold(
    x: Tree, rounds: Any, weights: Any, rate: float, server_rate: float, option: str
) -> list[Round]:
    c, controls, history = zeros(x), [zeros(x) for _ in range(POPULATION)], []
    for batches, n in zip(rounds, weights, strict=True):
        ends, changes, reports = [], [], []
        for i, _, own in present(batches, n):
            c_i = controls[i]
            y, metrics, _ = descend(
                x, own, rate, lambda g, _y, _b, c=c, c_i=c_i: add(add(g, c_i, -1), c)
            )
            if option == "I":
                new = full_gradient(x, own)
            else:
                new = add(add(c_i, c, -1), add(x, y, -1), 1 / (len(own) * rate))
            ends.append(add(y, x, -1))
            changes.append(add(new, c_i, -1))
            reports.append(metrics)
            controls[i] = new
        x = add(x, mean(ends), server_rate)
        c = add(c, mean(changes), len(ends) / POPULATION)
        history.append((x, mean(reports)))
    return history


def fednova(
    x: Tree, rounds: Any, weights: Any, client: Optimizer, length: Callable[[int], float]
) -> list[Round]:
    """x <- x - tau_eff sum_i p_i d_i; `length` is |a_i|_1 of the paper, times the rate."""
    history = []
    for batches, n in zip(rounds, weights, strict=True):
        normalized, lengths, reports, shares = [], [], [], []
        for _, examples, own in present(batches, n):
            y, _, metrics = train(x, client, client.init(x), own)
            lengths.append(length(len(own)))
            normalized.append(each(lambda x, y, a=lengths[-1]: (x - y) / a, x, y))
            reports.append(metrics)
            shares.append(examples)
        effective = np.average(lengths, weights=shares)
        x = add(x, weighted_mean(normalized, shares), -effective)
        history.append((x, weighted_mean(reports, shares)))
    return history


def momentum_length(rate: float, rho: float) -> Callable[[int], float]:
    """|a_i|_1 of SGD with momentum, arXiv:2007.07481, section 4."""
    return lambda tau: rate * (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)


def feddyn(x: Tree, rounds: Any, weights: Any, rate: float, alpha: float) -> list[Round]:
    h, gradients, history = zeros(x), [zeros(x) for _ in range(POPULATION)], []
    for batches, n in zip(rounds, weights, strict=True):
        ends, reports = [], []
        for i, _, own in present(batches, n):

            def way(g: Tree, y: Tree, _: Tree, x: Tree = x, g_i: Tree = gradients[i]) -> Tree:
                return add(add(g, g_i, -1), add(y, x, -1), alpha)

            y, metrics, _ = descend(x, own, rate, way)
            gradients[i] = add(gradients[i], add(y, x, -1), -alpha)
            ends.append(y)
            reports.append(metrics)
        moved = [add(y, x, -1) for y in ends]
        h = add(h, mean(moved), -alpha * len(ends) / POPULATION)
        x = add(mean(ends), h, -1 / alpha)
        history.append((x, mean(reports)))
    return history


class BaseOptimizer(NamedTuple):
    """A base algorithm of Mime, for one array: U and V, and the first state."""

    start: Callable[[np.ndarray], Any]
    direction: Callable[[np.ndarray, Any], np.ndarray]
    next_state: Callable[[np.ndarray, Any], Any]


def base_momentum(beta: float) -> BaseOptimizer:
    return BaseOptimizer(np.zeros_like, lambda g, m: g + beta * m, lambda g, m: g + beta * m)


def base_adam(b1: float, b2: float, eps: float, start: float) -> BaseOptimizer:
    return BaseOptimizer(
        lambda p: (0 * p, 0 * p + start),
        lambda g, s: (b1 * s[0] + (1 - b1) * g) / (s[1] ** 0.5 + eps),
        lambda g, s: (b1 * s[0] + (1 - b1) * g, b2 * s[1] + (1 - b2) * g * g),
    )


def mime(
    x: Tree, rounds: Any, weights: Any, rate: float, base: BaseOptimizer, is_corrected: bool
) -> list[Round]:
    state, history = {name: base.start(p) for name, p in x.items()}, []
    for batches, n in zip(rounds, weights, strict=True):
        cohort = present(batches, n)
        c = weighted_mean(
            [full_gradient(x, own) for _, _, own in cohort], [n for _, n, _ in cohort]
        )
        ends, reports = [], []
        for _, _, own in cohort:

            def way(
                g: Tree, _: Tree, batch: Tree, x: Tree = x, c: Tree = c, s: Any = state
            ) -> Tree:
                if is_corrected:
                    g = add(add(g, gradient_and_metrics(x, batch)[0], -1), c)
                return {name: base.direction(g[name], s[name]) for name in g}

            y, metrics, _ = descend(x, own, rate, way)
            ends.append(y)
            reports.append(metrics)
        state = {name: base.next_state(c[name], s) for name, s in state.items()}
        shares = [n for _, n, _ in cohort]
        x = weighted_mean(ends, shares)
        history.append((x, weighted_mean(reports, shares)))
    return history


def fedac(
    x: Tree, rounds: Any, weights: Any, eta: float, gamma: float, alpha: float, beta: float
) -> list[Round]:
    w, w_ag, history = x, x, []
    for batches, n in zip(rounds, weights, strict=True):
        ends, aggregated, reports, shares = [], [], [], []
        for _, examples, own in present(batches, n):
            v, v_ag, metrics = w, w_ag, []
            for batch in own:
                v_md = each(lambda v, a: v / beta + (1 - 1 / beta) * a, v, v_ag)
                g, report = gradient_and_metrics(v_md, batch)
                v_ag = add(v_md, g, -eta)
                coupled = each(lambda v, m: (1 - 1 / alpha) * v + m / alpha, v, v_md)
                v = add(coupled, g, -gamma)
                metrics.append(report)
            ends.append(v)
            aggregated.append(v_ag)
            reports.append(mean(metrics))
            shares.append(examples)
        w, w_ag = weighted_mean(ends, shares), weighted_mean(aggregated, shares)
        history.append((w_ag, weighted_mean(reports, shares)))
    return history


def agnostic(x: Tree, rounds: Any, weights: Any, rate: float, gamma: float) -> list[Round]:
    mixture, history = np.full(POPULATION, 1 / POPULATION), []
    for batches, n in zip(rounds, weights, strict=True):
        ends, reports, shares, ascent = [], [], [], np.zeros(POPULATION)
        cohort = present(batches, n)
        for i, _, own in cohort:
            y, metrics, _ = descend(x, own, rate)
            ends.append(y)
            reports.append(metrics)
            shares.append(mixture[i])
            ascent[i] = POPULATION / len(cohort) * at(x, own)[1]["loss"]
        x = weighted_mean(ends, shares)
        mixture = nearest_on_simplex(mixture + gamma * ascent)
        history.append((x, weighted_mean(reports, shares)))
    return history


def nearest_on_simplex(v: np.ndarray) -> np.ndarray:
    """Find the threshold t with sum max(v - t, 0) = 1 by bisection."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if np.maximum(v - t, 0).sum() > 1 else (low, t)
    return np.maximum(v - t, 0)


def ditto(
    x: Tree, rounds: Any, weights: Any, rate: float, lam: float, personal: list[Tree] | None = None
) -> list[Round]:
    personal = [x] * POPULATION if personal is None else personal
    history = []
    for batches, n in zip(rounds, weights, strict=True):
        ends, reports = [], []
        for i, _, own in present(batches, n):
            y, metrics, _ = descend(x, own, rate)
            personal[i], report, _ = descend(
                personal[i], own, rate, lambda g, v, _, x=x: add(g, add(v, x, -1), lam)
            )
            ends.append(y)
            reports.append({**metrics, "personal_loss": report["loss"]})
        x = mean(ends)
        history.append((x, mean(reports)))
    return history


def mix(v: Tree, w: Tree, alpha: float) -> Mapping[str, np.ndarray]:
    return each(lambda v, w: alpha * v + (1 - alpha) * w, v, w)


def apfl(
    x: Tree, rounds: Any, weights: Any, rate: float, alpha: float, alpha_rate: float
) -> list[Round]:
    local, mixing, history = [x] * POPULATION, np.full(POPULATION, alpha), []
    for batches, n in zip(rounds, weights, strict=True):
        ends, reports = [], []
        for i, _, own in present(batches, n):
            w, v, alpha, metrics = x, local[i], mixing[i], []
            for t, batch in enumerate(own):
                g, report = gradient_and_metrics(w, batch)
                at_mixture, personal = gradient_and_metrics(mix(v, w, alpha), batch)
                slope = sum(np.sum((v[k] - w[k]) * at_mixture[k]) for k in x)
                w, v = add(w, g, -rate), add(v, at_mixture, -rate * alpha)
                if t == 0:
                    alpha = np.clip(alpha - alpha_rate * slope, 0, 1)
                metrics.append({**report, "personal_loss": personal["loss"]})
            local[i], mixing[i] = v, alpha
            ends.append(w)
            reports.append(mean(metrics))
        x = mean(ends)
        history.append((x, mean(reports)))
    return history


def hypcluster(models: Sequence[Tree], rounds: Any, weights: Any, rate: float) -> list[Round]:
    """Return stacked models."""
    history = []
    for batches, n in zip(rounds, weights, strict=True):
        chosen: list[list] = [[] for _ in models]
        reports, shares = [], []
        for _, examples, own in present(batches, n):
            j = int(np.argmin([at(x, own)[1]["loss"] for x in models]))
            y, metrics, _ = descend(models[j], own, rate)
            chosen[j].append((y, examples))
            reports.append(metrics)
            shares.append(examples)
        models = [
            weighted_mean(*zip(*members, strict=True)) if members else x
            for x, members in zip(models, chosen, strict=True)
        ]
        history.append((each(lambda *p: np.stack(p), *models), weighted_mean(reports, shares)))
    return history


def per_fedavg(
    x: Tree, rounds: Any, weights: Any, rate: float, alpha: float, *, first_order: bool
) -> list[Round]:
    """The Hessian's product with a vector is a central difference of gradients."""
    history = []
    for batches, n in zip(rounds, weights, strict=True):
        ends, reports, shares = [], [], []
        for _, examples, own in present(batches, n):
            y, metrics = x, []
            for batch in own:
                support, query = (each(lambda b, s=s: b[s::2], batch) for s in (0, 1))
                adapted = add(y, gradient_and_metrics(y, support)[0], -alpha)
                g, report = gradient_and_metrics(adapted, query)
                if not first_order:
                    step = 1e-5
                    ahead, behind = (
                        gradient_and_metrics(add(y, g, sign * step), support)[0] for sign in (1, -1)
                    )
                    g = add(g, add(ahead, behind, -1), -alpha / (2 * step))
                y = add(y, g, -rate)
                metrics.append(report)
            ends.append(y)
            reports.append(mean(metrics))
            shares.append(examples)
        x = weighted_mean(ends, shares)
        history.append((x, weighted_mean(reports, shares)))
    return history

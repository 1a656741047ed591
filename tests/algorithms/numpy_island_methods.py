"""References of the multi-island methods, from the papers' equations: NumPy in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy_methods import Metrics, Optimizer, Round, Tree, each, mean, participant, train


class Population:
    """Models that train apart, each with its own optimizer state."""

    def __init__(self, x: Tree, islands: int, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.models: list[Tree] = [x] * islands
        self.states = [optimizer.init(x)] * islands

    def train(self, batches: Tree) -> tuple[list[Tree], Metrics]:
        """Return what each model becomes on its batches, and the mean of the metrics."""
        trained, reports = [], []
        for i, model in enumerate(self.models):
            y, self.states[i], report = train(
                model, self.optimizer, self.states[i], participant(batches, i)
            )
            trained.append(y)
            reports.append(report)
        return trained, mean(reports)


def papa(
    x: Tree, rounds: Sequence[Tree], optimizer: Optimizer, alpha: Callable[[int], float]
) -> list[Round]:
    """Push each model toward the average: w_i <- alpha w_i + (1 - alpha) mean w."""
    population, history = Population(x, len(rounds[0]["label"]), optimizer), []
    for r, batches in enumerate(rounds):
        models, metrics = population.train(batches)
        x, share = mean(models), alpha(r)
        population.models = [
            each(lambda w, m, a=share: a * w + (1 - a) * m, model, x) for model in models
        ]
        history.append((x, metrics))
    return history


def papa_2(
    x: Tree, rounds: Sequence[Tree], optimizer: Optimizer, pairs: Sequence[Sequence[Sequence[int]]]
) -> list[Round]:
    """Replace model i by the average of pair i, of the pairs of each round."""
    population, history = Population(x, len(rounds[0]["label"]), optimizer), []
    for drawn, batches in zip(pairs, rounds, strict=True):
        models, metrics = population.train(batches)
        population.models = [mean([models[a], models[b]]) for a, b in drawn]
        history.append((mean(population.models), metrics))
    return history


def easgd(x: Tree, rounds: Sequence[Tree], optimizer: Optimizer, beta: float) -> list[Round]:
    """Move islands by alpha, and the center by alpha times the sum, along their differences."""
    n = len(rounds[0]["label"])
    population, alpha, history = Population(x, n, optimizer), beta / n, []
    for batches in rounds:
        models, metrics = population.train(batches)
        forces = [each(lambda w, c: alpha * (w - c), model, x) for model in models]
        population.models = [each(np.subtract, m, f) for m, f in zip(models, forces, strict=True)]
        x = each(lambda c, *fs: c + sum(fs), x, *forces)
        history.append((x, metrics))
    return history


def branch_train_merge(x: Tree, rounds: Sequence[Tree], optimizer: Optimizer) -> list[Round]:
    """Train apart; the model is the average."""
    population, history = Population(x, len(rounds[0]["label"]), optimizer), []
    for batches in rounds:
        population.models, metrics = population.train(batches)
        history.append((mean(population.models), metrics))
    return history


def eager_diloco(
    x: Tree, rounds: Sequence[Tree], inner: Optimizer, outer: Optimizer
) -> list[Round]:
    """Step along one's own new outer gradient and the others' last ones, each divided by M."""
    n = len(rounds[0]["label"])
    population, history = Population(x, n, inner), []
    last: list[Any] = [each(np.zeros_like, x)] * n
    states = [outer.init(x)] * n
    for batches in rounds:
        models = population.models
        trained, metrics = population.train(batches)
        fresh = [each(np.subtract, m, y) for m, y in zip(models, trained, strict=True)]
        moved = []
        for i in range(n):
            used = [fresh[j] if j == i else last[j] for j in range(n)]
            model, states[i] = outer.step(models[i], mean(used), states[i])
            moved.append(model)
        population.models, last = moved, fresh
        history.append((mean(moved), metrics))
    return history


def noloco(
    x: Tree,
    rounds: Sequence[Tree],
    optimizer: Optimizer,
    partners: Sequence[Sequence[int]],
    eta: float,
    beta: float,
    gamma: float,
) -> list[Round]:
    """Step along the momentum of the pair's progress, pulled toward the pair's mean."""
    n = len(rounds[0]["label"])
    population, history = Population(x, n, optimizer), []
    momentum: list[Any] = [each(np.zeros_like, x)] * n
    for partner, batches in zip(partners, rounds, strict=True):
        phi = population.models
        trained, metrics = population.train(batches)
        progress = [each(np.subtract, y, p) for y, p in zip(trained, phi, strict=True)]
        for i, j in enumerate(partner):
            together, middle = mean([progress[i], progress[j]]), mean([phi[i], phi[j]])
            momentum[i] = each(
                lambda m, d, p, c: beta * m + eta * d - gamma * (p - c),
                momentum[i],
                together,
                phi[i],
                middle,
            )
        population.models = [each(np.add, p, m) for p, m in zip(phi, momentum, strict=True)]
        history.append((mean(population.models), metrics))
    return history


def muon(rate: float, beta: float = 0.95, epsilon: float = 1e-8) -> Optimizer:
    """Muon of matrices: five Newton-Schulz steps on the momentum. Adam of all other parameters.

    Both with Nesterov's form of the bias-corrected momentum, as in optax.
    """
    a, b, c = 3.4445, -4.775, 2.0315

    def orthogonal(m: np.ndarray) -> np.ndarray:
        tall = m.shape[0] > m.shape[1]
        x = m.T if tall else m
        x = x / (np.linalg.norm(x) + epsilon)
        for _ in range(5):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        return (x.T if tall else x) * np.sqrt(max(1, m.shape[1] / m.shape[0]))

    def step(x: Tree, g: Tree, state: tuple[int, Tree, Tree]) -> tuple[Tree, Any]:
        t = state[0] + 1
        decays = {name: beta if leaf.ndim == 2 else 0.9 for name, leaf in x.items()}
        first = {k: d * state[1][k] + (1 - d) * g[k] for k, d in decays.items()}
        second = each(lambda v, g: 0.999 * v + 0.001 * g**2, state[2], g)

        def moved(k: str) -> np.ndarray:
            d = decays[k]
            m = d * first[k] / (1 - d ** (t + 1)) + (1 - d) * g[k] / (1 - d**t)
            if x[k].ndim == 2:
                return orthogonal(m)
            return m / (np.sqrt(second[k] / (1 - 0.999**t)) + epsilon)

        return {k: x[k] - rate * moved(k) for k in x}, (t, first, second)

    return Optimizer(lambda x: (0, each(np.zeros_like, x), each(np.zeros_like, x)), step)


def top_k(x: np.ndarray, fraction: float) -> np.ndarray:
    """Keep the largest magnitudes of a small array; the others are 0."""
    flat = np.asarray(x).ravel()
    kept = np.zeros_like(flat)
    largest = np.argsort(-np.abs(flat))[: int(np.ceil(fraction * flat.size))]
    kept[largest] = flat[largest]
    return kept.reshape(np.shape(x))


def sparseloco(
    x: Tree, rounds: Sequence[Tree], optimizer: Optimizer, fraction: float, eta: float, beta: float
) -> list[Round]:
    """m_i = beta e_i + x - y_i; q_i = TopK(m_i); e_i <- m_i - q_i; x <- x - eta mean q_i."""
    n = len(rounds[0]["label"])
    states = [optimizer.init(x)] * n
    residuals: list[Any] = [each(np.zeros_like, x)] * n
    history = []
    for batches in rounds:
        sent, reports = [], []
        for i in range(n):
            y, states[i], report = train(x, optimizer, states[i], participant(batches, i))
            unsent = each(lambda e, x, y: beta * e + x - y, residuals[i], x, y)
            sent.append(each(lambda m: top_k(m, fraction), unsent))
            residuals[i] = each(np.subtract, unsent, sent[-1])
            reports.append(report)
        x = each(lambda x, q: x - eta * q, x, mean(sent))
        history.append((x, mean(reports)))
    return history

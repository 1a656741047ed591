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
    x: Tree, rounds: Sequence[Tree], optimizer: Optimizer, shifts: Sequence[int]
) -> list[Round]:
    """Replace each model by its average with the one `shift` places further."""
    n = len(rounds[0]["label"])
    population, history = Population(x, n, optimizer), []
    for shift, batches in zip(shifts, rounds, strict=True):
        models, metrics = population.train(batches)
        population.models = [mean([models[i], models[(i + shift) % n]]) for i in range(n)]
        history.append((mean(models), metrics))
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

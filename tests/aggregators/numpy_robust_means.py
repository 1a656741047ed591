"""Robust means in NumPy."""

import numpy as np

SHAPES = {"w": (6, 4), "b": (5,), "s": ()}


def flat(updates):
    return np.concatenate([np.float64(updates[k]).reshape(len(updates[k]), -1) for k in SHAPES], 1)


def unflat(vector):
    parts = np.split(vector, np.cumsum([np.prod(s, dtype=int) for s in SHAPES.values()])[:-1])
    return {
        name: part.reshape(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)
    }


# ---- references in NumPy, on the present rows of a matrix


def order_of(x, f):
    nearest = np.sort(np.sum((x[:, None] - x[None]) ** 2, -1), 1)[:, 1:]
    count = max(len(x) - f - 2, 1)
    return np.lexsort((nearest[:, : count + 1].sum(1), nearest[:, :count].sum(1)))


def krum_of(x, f, selected):
    return x[order_of(x, f)[:selected]].mean(0)


def bulyan_of(x, f):
    rest, chosen = x, []
    for _ in range(len(x) - 2 * f):
        best = order_of(rest, f)[0]
        chosen.append(rest[best])
        rest = np.delete(rest, best, 0)
    x = np.sort(chosen, 0)  # of two values that are equally close, the lower one comes first
    order = np.argsort(np.abs(x - np.median(x, 0)), 0, kind="stable")
    return np.take_along_axis(x, order, 0)[: len(x) - 2 * f].mean(0)


def trimmed_of(x, fraction):
    k = int(fraction * len(x) + 1e-9)
    return np.sort(x, 0)[k : len(x) - k].mean(0)


def geometric_of(x, weights):
    v = np.median(x, 0)
    for _ in range(1000):
        distances = np.maximum(np.linalg.norm(x - v, axis=1), 1e-9)
        last, v = v, np.average(x, axis=0, weights=weights / distances)
        if np.linalg.norm(v - last) < 1e-9:
            break
    return v


REFERENCES = {
    "coordinate_median": lambda x, w: np.median(x, 0),
    "trimmed_mean": lambda x, w: trimmed_of(x, 0.25),
    "krum": lambda x, w: krum_of(x, 2, 1),
    "multi_krum": lambda x, w: krum_of(x, 1, 4),
    "bulyan": lambda x, w: bulyan_of(x, 1),
    "geometric_median": geometric_of,
}


def draw(seed=0, participants=8):
    rng = np.random.default_rng(seed)
    return {
        name: np.float32(rng.standard_normal((participants, *shape)))
        for name, shape in SHAPES.items()
    }

"""A model of several leaves for tests of Streaming DiLoCo, and the method as a loop in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy_methods import each, mean

ISLANDS, BATCH, LAYERS = 3, 2, 4
SHAPES = {"embedding": (3,), "layers/kernel": (LAYERS, 2), "layers/scale": (LAYERS,), "norm": ()}
SIZES = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}


def unflatten(params):
    """Make the model's pytree of a flat dict."""
    layers = {name: params[f"layers/{name}"] for name in ("kernel", "scale")}
    return {"embedding": params["embedding"], "layers": layers, "norm": params["norm"]}


def flatten(params):
    return {"embedding": params["embedding"], "norm": params["norm"]} | {
        f"layers/{name}": leaf for name, leaf in params["layers"].items()
    }


def loss_fn(params, batch):
    """Linear regression on all parameters at once, so that every fragment moves the others."""
    flat = flatten(params)
    predicted = sum(batch["x"][name].reshape(BATCH, -1) @ flat[name].reshape(-1) for name in SHAPES)
    error = predicted - batch["y"]
    return 0.5 * jnp.mean(error**2), {"error": jnp.mean(error)}


def numpy_gradient(flat, batch):
    error = sum(batch["x"][k].reshape(BATCH, -1) @ flat[k].reshape(-1) for k in SHAPES) - batch["y"]
    gradient = {k: np.tensordot(error, batch["x"][k], axes=1) / BATCH for k in SHAPES}
    return gradient, {"loss": 0.5 * np.mean(error**2), "error": np.mean(error)}


def random_params(seed=0):
    rng = np.random.default_rng((seed, 0))
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def random_rounds(rounds, steps, seed=0):
    rng = np.random.default_rng((seed, 1))
    front = (ISLANDS, steps, BATCH)
    center = rng.normal(size=(ISLANDS, 1, 1))
    return [
        {
            "x": {k: rng.normal(size=front + s).astype(np.float32) for k, s in SHAPES.items()},
            "y": (rng.normal(size=front) + center).astype(np.float32),
        }
        for _ in range(rounds)
    ]


def batch_of(batches, island, step):
    return {
        "x": {name: x[island, step] for name, x in batches["x"].items()},
        "y": batches["y"][island, step],
    }


def step_by_step(flat, rounds, inner, outer, fragment_of, num_fragments, delay, mixing):
    """Run algorithm 2 with the outer model as the anchor: a clock, masks, and transfers in flight.

    `fragment_of[name]` holds the fragment of each entry of a parameter.
    """
    steps = rounds[0]["y"].shape[1]  # H
    gap = max(steps // num_fragments, 1)
    together = num_fragments // min(steps, num_fragments)
    offset = {p: (p // together + 1) * gap - delay for p in range(num_fragments)}

    inside = [each(lambda of, p=p: of == p, fragment_of) for p in range(num_fragments)]

    def part(tree, p):
        return each(lambda a, z: np.where(a, z, 0), inside[p], tree)

    def insert(tree, p, new):
        return each(np.where, inside[p], new, tree)

    x = {name: np.float64(leaf) for name, leaf in flat.items()}
    y, states = [x] * ISLANDS, [inner.init(x)] * ISLANDS
    outer_states = [outer.init(x) for _ in range(num_fragments)]
    in_flight, history, clock = {}, [], 0
    for batches in rounds:
        reports = []
        for step in range(steps):
            clock += 1
            for i in range(ISLANDS):
                gradient, report = numpy_gradient(y[i], batch_of(batches, i, step))
                y[i], states[i] = inner.step(y[i], gradient, states[i])
                reports.append(report)
            for p in range(num_fragments):
                if (clock - offset[p]) % steps == 0:
                    in_flight[p] = mean([each(np.subtract, part(x, p), part(z, p)) for z in y])
            for p in range(num_fragments):
                if (clock - offset[p] - delay) % steps == 0:
                    moved, outer_states[p] = outer.step(
                        part(x, p), in_flight.pop(p), outer_states[p]
                    )
                    x = insert(x, p, moved)
                    y = [
                        insert(z, p, each(lambda a, b: mixing * a + (1 - mixing) * b, z, x))
                        for z in y
                    ]
        assert not in_flight  # nothing crosses the end of a round
        history.append((x, list(y), mean(reports)))
    return history


def assigned(num_fragments, fragment_of):
    """Return the fragment of each entry of each parameter."""
    collected = {}
    for name, shape in SHAPES.items():
        rows = np.asarray(fragment_of(name, jax.ShapeDtypeStruct(shape, np.float32)))
        collected[name] = np.broadcast_to(
            rows.reshape(rows.shape + (1,) * (len(shape) - rows.ndim)), shape
        )
    assert set(np.concatenate([f.ravel() for f in collected.values()])) == set(range(num_fragments))
    return collected


def own_fragments(path, leaf):
    """Assign the second half of the layers and the norm to the fragment that goes first."""
    return [1, 1, 0, 0] if "layers" in path else int(path == "embedding")

"""A method with its settings and its reference, and the small random problem that it trains on."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy_methods as reference
from jax.sharding import PartitionSpec as P

from fedpax import Cohort
from fedpax.algorithm import FederatedAlgorithm

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def assert_close(got: Any, want: Any) -> None:
    """Compare trees to the tolerance."""
    chex.assert_trees_all_close(got, want, **TOLERANCE)


POPULATION = 49
PARTICIPANTS, STEPS, BATCH, FEATURES, HIDDEN, CLASSES = 8, 3, 4, 6, 10, 5


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the cross-entropy of softmax(scale * (tanh(x W + b) V)), and two metrics."""
    params = jax.tree.map(gather, params)
    hidden = jnp.tanh(batch["x"] @ params["kernel"] + params["bias"])
    logits = params["scale"] * (hidden @ params["out"])
    log_odds = jax.nn.log_softmax(logits)
    label = jax.nn.one_hot(batch["label"], CLASSES, dtype=logits.dtype)
    chosen, largest = jnp.sum(label * log_odds, axis=-1), jnp.max(log_odds, axis=-1)
    return -jnp.mean(chosen), {
        "confidence": jnp.mean(jnp.exp(largest)),
        "correct": jnp.sum(chosen == largest),
    }


def gather(leaf: jax.Array) -> jax.Array:
    """Replicate a parameter whose type says that it is sharded (explicit axes)."""
    if all(axis is None for axis in jax.typeof(leaf).sharding.spec):
        return leaf
    return jax.sharding.reshard(leaf, P(*[None] * leaf.ndim))


# Hidden units and features are sharded over fsdp.
PARAMS = {"kernel": ("fsdp", None), "bias": ("fsdp",), "out": (None, None), "scale": ()}


def random_params(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((seed, 0))
    shapes = {
        "kernel": (FEATURES, HIDDEN),
        "bias": (HIDDEN,),
        "out": (HIDDEN, CLASSES),
        "scale": (),
    }
    params = {name: 0.5 * rng.normal(size=shape) for name, shape in shapes.items()}
    return {name: np.float32(p) for name, p in (params | {"scale": 1 + params["scale"]}).items()}


def random_rounds(
    rounds: int, participants: int = PARTICIPANTS, steps: int = STEPS, seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """Draw batches of several rounds, `[participants, steps, batch, ...]`; participants differ."""
    rng = np.random.default_rng((seed, 1))
    shape = (rounds, participants, steps, BATCH)
    center = rng.normal(size=(1, participants, 1, 1, FEATURES))
    x = np.float32(rng.normal(size=(*shape, FEATURES)) + center)
    label = np.int32(rng.integers(CLASSES, size=shape))
    return [{"x": x[r], "label": label[r]} for r in range(rounds)]


def random_weights(rounds: int, participants: int = PARTICIPANTS, seed: int = 0) -> np.ndarray:
    """Draw numbers of examples, `[rounds, participants]`: client k has k + 1 of them."""
    rng = np.random.default_rng((seed, 2))
    sizes = [1 + rng.permutation(POPULATION)[:participants] for _ in range(rounds)]
    return np.array(sizes, np.int32)


class Rates(NamedTuple):
    """The learning rates of a method: of its participants, and of its server if it has one."""

    local: Any
    server: Any


class Method(NamedTuple):
    """A method with settings, and the reference of the same settings."""

    placement: str
    rates: Rates
    build: Callable[[int, Rates], FederatedAlgorithm]
    refer: Callable[..., list[reference.Round]]  # (params, rounds, weights, rates)
    weighted: bool = False
    keeps_client_state: bool = False

    def algorithm(self, participants: int = PARTICIPANTS, rates: Rates | None = None):
        return (
            default_algorithm(self, participants)
            if rates is None
            else self.build(participants, rates)
        )

    def cohort(self, batches: Any, weights: Any) -> Cohort:
        """Make the cohort of a round; weights count where the method's test weighs participants."""
        return Cohort(
            batches,
            np.int32(weights) if self.weighted else None,
            client_ids=np.int32(weights) - 1 if self.keeps_client_state else None,
        )

    def reference(self, params: Any, rounds: Any, weights: Any, rates: Rates | None = None):
        rates = rates or self.rates
        params = {name: np.asarray(p, np.float64) for name, p in params.items()}
        return self.refer(params, rounds, weights, rates)


@functools.cache  # an algorithm that is built once is compiled once for all tests of its shapes
def default_algorithm(method: Method, participants: int) -> FederatedAlgorithm:
    """Build a method with its own rates."""
    return method.build(participants, method.rates)

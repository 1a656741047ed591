"""The multi-island methods beside DiLoCo, with settings and references."""

from collections.abc import Callable
from typing import Any

import jax
import numpy_island_methods as reference
import numpy_methods
import optax
from method_problem import Method, Rates, loss_fn

from fedpax.aggregators import codecs
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import (
    branch_train_merge,
    eager_diloco,
    easgd,
    muloco,
    noloco,
    papa,
    papa_2,
    papa_all,
    sparseloco,
    streaming_diloco,
)
from fedpax.algorithms.papa import random_pairs
from fedpax.algorithms.parts.model_averaging import perfect_matchings

SEED = 3
compiled_pairs = jax.jit(random_pairs, static_argnums=1)


def drawn(seed: int, rounds: int, below: int) -> list[int]:
    """Draw the number of each round that NoLoCo and the rotations of PAPA-2 draw."""
    return [int(jax.random.randint(key, (), 0, below, "int32")) for key in round_keys(seed, rounds)]


def round_keys(seed: int, rounds: int) -> list[jax.Array]:
    """Return the random key of each round."""
    return [jax.random.fold_in(jax.random.key(seed), r) for r in range(rounds)]


def _adam(rate: Any) -> tuple[optax.GradientTransformation, numpy_methods.Optimizer]:
    return (
        optax.adamw(rate, b1=0.9, b2=0.99, eps=1e-6, weight_decay=0.1),
        numpy_methods.adam(rate, 0.9, 0.99, 1e-6, decay=0.1),
    )


def _method(
    algorithm: Callable[..., FederatedAlgorithm], refer: Callable[..., Any], **settings: Any
) -> Method:
    """Make a method of islands with AdamW; `refer` takes parameters, rounds and the optimizer."""
    return Method(
        "islands",
        Rates(0.01, None),
        lambda islands, r: algorithm(
            loss_fn, islands=islands, optimizer=_adam(r.local)[0], **settings
        ),
        lambda x, rounds, _, r: refer(x, rounds, _adam(r.local)[1]),
    )


def _papa_2(x: Any, rounds: Any, optimizer: Any) -> Any:
    n = len(rounds[0]["label"])
    pairs = [compiled_pairs(key, n).tolist() for key in round_keys(SEED, len(rounds))]
    return reference.papa_2(x, rounds, optimizer, pairs)


def _papa_2_rotated(x: Any, rounds: Any, optimizer: Any) -> Any:
    n = len(rounds[0]["label"])
    shifts = [1 + c for c in drawn(SEED, len(rounds), n - 1)]
    pairs = [[(i, (i + shift) % n) for i in range(n)] for shift in shifts]
    return reference.papa_2(x, rounds, optimizer, pairs)


def _noloco(x: Any, rounds: Any, rate: Any, eta: Any) -> Any:
    matchings = perfect_matchings(len(rounds[0]["label"]))
    partners = [matchings[i] for i in drawn(SEED, len(rounds), len(matchings))]
    return reference.noloco(x, rounds, _adam(rate)[1], partners, eta, 0.6, 0.8)


ISLAND_METHODS = {
    "Streaming DiLoCo": Method(
        "islands",
        Rates(0.01, 0.5),
        lambda islands, r: streaming_diloco(
            loss_fn,
            islands=islands,
            inner_optimizer=_adam(r.local)[0],
            outer_optimizer=optax.sgd(r.server, momentum=0.8, nesterov=True),
            fragments=1,
            delay=0,
            mixing=0.0,
        ),
        lambda x, rounds, _, r: numpy_methods.diloco(x, rounds, _adam(r.local)[1], r.server, 0.8),
    ),
    "Eager DiLoCo": Method(
        "islands",
        Rates(0.01, 0.5),
        lambda islands, r: eager_diloco(
            loss_fn,
            islands=islands,
            inner_optimizer=_adam(r.local)[0],
            outer_optimizer=optax.sgd(r.server, momentum=0.8, nesterov=True),
        ),
        lambda x, rounds, _, r: reference.eager_diloco(
            x,
            rounds,
            _adam(r.local)[1],
            numpy_methods.momentum(r.server, 0.8, nesterov=True),
        ),
    ),
    "MuLoCo": Method(
        "islands",
        Rates(0.01, 0.5),
        lambda islands, r: muloco(
            loss_fn,
            islands=islands,
            learning_rate=r.local,
            outer_optimizer=optax.sgd(r.server, momentum=0.8, nesterov=True),
        ),
        lambda x, rounds, _, r: numpy_methods.diloco(
            x, rounds, reference.muon(r.local), r.server, 0.8
        ),
    ),
    "SparseLoCo": Method(
        "islands",
        Rates(0.01, 0.5),
        lambda islands, r: sparseloco(
            loss_fn,
            islands=islands,
            inner_optimizer=_adam(r.local)[0],
            outer_learning_rate=r.server,
            codec=codecs.top_k(0.25),
            decay=0.9,
        ),
        lambda x, rounds, _, r: reference.sparseloco(
            x, rounds, _adam(r.local)[1], 0.25, r.server, 0.9
        ),
    ),
    "PAPA": _method(
        papa,
        lambda x, rounds, optimizer: reference.papa(x, rounds, optimizer, lambda r: 0.5 + 0.1 * r),
        alpha=lambda r: 0.5 + 0.1 * r,
    ),
    "PAPA-all": _method(
        papa_all,
        lambda x, rounds, optimizer: reference.papa(x, rounds, optimizer, lambda r: 0.0),
    ),
    "PAPA-2": _method(papa_2, _papa_2, seed=SEED),
    "PAPA-2, rotation": _method(papa_2, _papa_2_rotated, pairs="rotation", seed=SEED),
    "EASGD": _method(
        easgd, lambda x, rounds, optimizer: reference.easgd(x, rounds, optimizer, 0.7), beta=0.7
    ),
    "Branch-Train-Merge": _method(branch_train_merge, reference.branch_train_merge),
    "NoLoCo": Method(
        "islands",
        Rates(0.01, 0.5),
        lambda islands, r: noloco(
            loss_fn,
            islands=islands,
            inner_optimizer=_adam(r.local)[0],
            learning_rate=r.server,
            momentum=0.6,
            pull=0.8,
            seed=SEED,
        ),
        lambda x, rounds, _, r: _noloco(x, rounds, r.local, r.server),
    ),
}

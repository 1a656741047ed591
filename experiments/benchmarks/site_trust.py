"""Measure what one site that cheats does to a model, with and without guards of the merge.

    python -m fedpax.experiments.benchmarks.site_trust --seeds=0,1,2

Sites train a network with one hidden layer on digits by FedAvg, with equal weights. The last site
cheats in each round. The coordinator has 200 examples for the guard `accept_if`; the accuracy is on
336 others after the last round, the mean over seeds. "honest sites dropped" are updates of other
sites that a guard drops.
"""

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

import fedpax
from fedpax.aggregators import Aggregator, coordinate_median, krum, mean
from fedpax.data import load
from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.populations.label_skew import partition_dirichlet
from fedpax.populations.partition import partition_iid
from fedpax.sites.update_filters import NO_NORMS, drop_harmful, drop_large, parse_accept_if

HELD_OUT, HIDDEN, BATCH, STEPS, RATE = 200, 64, 32, 20, 0.1

Update = Any


class Examples(NamedTuple):
    """Pixels `[n, 64]` and labels `[n]`."""

    x: np.ndarray
    y: np.ndarray


def _scaled(factor: float) -> Callable[[Update, jax.Array], Update]:
    return lambda update, key: jax.tree.map(lambda u: factor * u, update)


def _noise(update: Update, key: jax.Array) -> Update:
    flat, unflatten = jax.flatten_util.ravel_pytree(update)
    noise = jax.random.normal(key, flat.shape)
    return unflatten(noise * (10.0 * jnp.linalg.norm(flat) / jnp.linalg.norm(noise)))


ATTACKS: dict[str, Callable[[Update, jax.Array], Update]] = {
    "none": _scaled(1.0),
    "flipped labels": _scaled(1.0),  # its data are changed
    "scaled by -10": _scaled(-10.0),
    "scaled by -2": _scaled(-2.0),
    "random, 10 times its norm": _noise,
}
GUARDS: dict[str, tuple[bool, str | None, Callable[[], Aggregator]]] = {
    "none": (False, None, mean),
    "norm": (True, None, mean),
    "accept_if=loss+0.01": (False, "loss+0.01", mean),
    "norm, accept_if": (True, "loss+0.01", mean),
    "median": (False, None, coordinate_median),
    "Krum": (False, None, lambda: krum(1)),
}


@functools.cache
def digits(split: str) -> Examples:
    """Return the digits of a split as arrays."""
    source = load("digits", split)
    images = np.stack(list(source.column("image"))).reshape(len(source), -1)
    return Examples(images.astype(np.float32) / 255, np.array(list(source.column("label"))))


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss, and the accuracy."""
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
    return losses.mean(), (logits.argmax(-1) == y).mean()


def init(seed: int) -> Any:
    """Return random parameters."""
    one, two = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(one, (64, HIDDEN)) / 8,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(two, (HIDDEN, 10)) / 8,
        "b2": jnp.zeros(10),
    }


def local_steps(params: Any, x: jax.Array, y: jax.Array) -> Update:
    """Train a site for `STEPS` steps, and return the change of its parameters."""

    def step(p: Any, batch: Any) -> tuple[Any, None]:
        grads = jax.grad(lambda p: loss_fn(p, *batch)[0])(p)
        return jax.tree.map(lambda p, g: p - RATE * g, p, grads), None

    trained, _ = jax.lax.scan(step, params, (x, y))
    return jax.tree.map(jnp.subtract, trained, params)


class Federation:
    """The compiled parts of a round, for one number of sites."""

    def __init__(self, sites: int) -> None:
        self.sites = [f"site-{i}" for i in range(sites)]
        program = fedpax.program(sites=sites)

        def train(params: Any, x: jax.Array, y: jax.Array) -> Update:
            return fedpax.federated_map(local_steps, fedpax.federated_broadcast(params), x, y)

        def merge(aggregator: Aggregator, params: Any, updates: Update, weights: jax.Array) -> Any:
            change, *_ = aggregator.aggregate(aggregator.init(params), updates, weights)
            return jax.tree.map(jnp.add, params, change)

        self.train = jax.jit(program(train))
        # Krum tolerates one site that cheats among at least five.
        self.merges = {
            name: jax.jit(program(functools.partial(merge, make())))
            for name, (*_, make) in GUARDS.items()
            if name != "Krum" or sites > 4
        }
        self.attack = {name: jax.jit(attack) for name, attack in ATTACKS.items()}
        self.norms = jax.jit(jax.vmap(optax.tree.norm))
        self.evaluate = jax.jit(loss_fn)

    def run(self, guard: str, attack: str, settings: "SiteTrust", seed: int) -> Row:
        """Train with one guard against one attack."""
        by_norm, rule, _ = GUARDS[guard]
        rng, key = np.random.default_rng(seed), jax.random.key(seed)
        known, test = digits("train"), digits("test")
        order = rng.permutation(len(known.y))
        heldout = Examples(known.x[order[:HELD_OUT]], known.y[order[:HELD_OUT]])
        rest = Examples(known.x[order[HELD_OUT:]], known.y[order[HELD_OUT:]])
        n, cheater = len(self.sites), self.sites[-1]
        parts = (
            partition_dirichlet(rest.y, n, alpha=settings.alpha, min_examples=BATCH, seed=seed)
            if settings.alpha
            else partition_iid(len(rest.y), n, seed=seed)
        )
        params, history, caught, wrong = init(seed), NO_NORMS, 0, 0
        for number in range(settings.rounds):
            rows = np.stack([rng.choice(part, (STEPS, BATCH)) for part in parts])
            y = rest.y[rows]
            if attack == "flipped labels":
                y[-1] = 9 - y[-1]
            updates = self.train(params, rest.x[rows], y)
            last = jax.tree.map(lambda u: u[-1], updates)
            last = self.attack[attack](last, jax.random.fold_in(key, number))
            updates = jax.tree.map(lambda u, x: u.at[-1].set(x), updates, last)
            dropped: dict[str, str] = {}
            if by_norm:
                norms = dict(zip(self.sites, self.norms(updates).tolist(), strict=True))
                dropped, history = drop_large(norms, history)
            if rule:
                dropped |= drop_harmful(
                    [site for site in self.sites if site not in dropped],
                    functools.partial(self._metrics, guard, params, updates, heldout),
                    parse_accept_if(rule),
                )
            caught += cheater in dropped
            wrong += len(dropped.keys() - {cheater})
            kept = frozenset(self.sites) - dropped.keys()
            params = self._merge(guard, params, updates, kept)
        accuracy = float(self.evaluate(params, test.x, test.y)[1])
        return Row(accuracy=accuracy, caught=caught, wrong=wrong)

    def _merge(self, guard: str, params: Any, updates: Update, sites: frozenset[str]) -> Any:
        weights = jnp.array([site in sites for site in self.sites], jnp.float32)
        return self.merges[guard](params, updates, weights)

    def _metrics(
        self, guard: str, params: Any, updates: Update, own: Examples, sites: frozenset[str]
    ) -> dict[str, float]:
        loss, _ = self.evaluate(self._merge(guard, params, updates, sites), *own)
        return {"loss": float(loss)}


class SiteTrust(Benchmark):
    sites: int = option(4, "sites, of which the last one cheats")
    alpha: float = option(0.0, "labels differ by Dirichlet(alpha); 0: they do not differ")
    rounds: int = option(20, "rounds")
    seeds: list[int] = option("0,1,2", "seeds, such as 0,1,2", harness.seeds)
    attacks: list[str] | None = harness.some(";", lambda _: ATTACKS)
    columns = (
        "attack {attack} | guard {guard} | accuracy {accuracy:.1%} "
        "| rounds in which it was dropped {caught:.0%} | honest sites dropped {wrong:.1%}"
    )

    def measure(self) -> Iterator[Row]:
        federation = Federation(self.sites)
        for attack, guard in itertools.product(self.attacks or ATTACKS, federation.merges):
            rows = [federation.run(guard, attack, self, seed) for seed in self.seeds]
            accuracies, rounds = [row.accuracy for row in rows], self.rounds * len(rows)
            yield Row(
                attack=attack,
                guard=guard,
                accuracies=accuracies,
                accuracy=statistics.mean(accuracies),
                caught=sum(row.caught for row in rows) / rounds,
                wrong=sum(row.wrong for row in rows) / (rounds * (self.sites - 1)),
            )

    def summary(self, rows: list[Row]) -> str:
        """Format the accuracies by attack and guard."""
        cell = "{accuracy:.1%}"
        return "\n" + harness.pivot(rows, "attack", "guard", cell, "the site that cheats")


main = command(SiteTrust)

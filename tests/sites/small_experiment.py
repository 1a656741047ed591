"""A linear regression over sites: data in memory, and any method for clients."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedpax
from fedpax.aggregators import codecs, compressed_mean, coordinate_median, krum, private_mean
from fedpax.algorithms import fedavg, scaffold
from fedpax.data import ClientSampler
from fedpax.sites.site_experiment import CoordinatorRun, SiteRun
from fedpax.training.experiment import Experiment
from fedpax.training.training_config import TrainingConfig

FEATURES = 3


def loss_fn(params, batch):
    """Return the squared error of a linear model."""
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2), {}


def make_data(clients: int, seed: int, features: int = FEATURES) -> dict[str, np.ndarray]:
    """Make the batches of clients, `[clients, steps, batch, ...]`, which differ between clients."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(clients, 2, 4, features)) * (FEATURES / features) ** 0.5
    y = x @ random.normal(size=features) + random.normal(size=(clients, 1, 1))
    return {"x": np.float32(x), "y": np.float32(y)}


METHODS: dict[str, Callable[..., Any]] = {
    "fedavg": lambda size, total: fedavg(
        loss_fn, cohort_size=size, client_optimizer=optax.sgd(0.1)
    ),
    "median": lambda size, total: fedavg(
        loss_fn,
        cohort_size=size,
        client_optimizer=optax.sgd(0.1),
        aggregator=coordinate_median(),
    ),
    "krum": lambda size, total: fedavg(
        loss_fn,
        cohort_size=size,
        client_optimizer=optax.sgd(0.1),
        aggregator=krum(1),
    ),
    **{
        name: lambda size, total, codec=codec, feedback=feedback: fedavg(
            loss_fn,
            cohort_size=size,
            client_optimizer=optax.sgd(0.1),
            aggregator=compressed_mean(codec, error_feedback=feedback),
        )
        for name, codec, feedback in (
            ("compressed", codecs.uniform(4), False),  # which draws random numbers
            ("feedback", codecs.e3m0(), True),
        )
    },
    **{
        name: lambda size, total, noise=noise: fedavg(
            loss_fn,
            cohort_size=size,
            client_optimizer=optax.sgd(0.1),
            aggregator=private_mean(max_norm=1.0, noise_multiplier=noise, seed=0),
        )
        for name, noise in (("private", 2.0), ("clipped", 0.0))
    },
    "scaffold": lambda size, total: scaffold(
        loss_fn, cohort_size=size, num_clients=total, client_optimizer=optax.sgd(0.1)
    ),
}


@functools.cache  # sites of one process compile what is the same function
def make_algorithm(method: Callable[..., Any], size: int, total: int) -> Any:
    """Make the algorithm of a cohort's size and a number of clients."""
    return method(size, total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallExperiment(Experiment):
    """A linear regression; `clients`, `data_seed` and `order` are a site's own."""

    method: str = "fedavg"
    cohort_size: int = 100
    clients: int = 1
    data_seed: int = 0
    features: int = FEATURES
    order: tuple[int, ...] = ()
    own_fields: ClassVar[tuple[str, ...]] = ("clients", "data_seed", "order")

    def build(self):
        raise NotImplementedError

    def shared_content(self):
        return {}

    def describe_site(self):
        return {"clients": self.clients}

    def shared_properties(self, description):
        return {}

    def stated_properties(self):
        return {}

    def agree(self, descriptions):
        return {"number": len(descriptions)}
        yield

    def answer(self, settings, clients):
        raise NotImplementedError

    def with_inputs(self, inputs):
        return self

    def _algorithm(self, total):
        size = min(self.cohort_size, total)
        return make_algorithm(METHODS[self.method], size, total), size

    def init(self, key):
        return {"w": jnp.zeros(self.features), "b": jnp.float32(0)}

    def coordinate(self, num_clients):
        algorithm, size = self._algorithm(num_clients)

        def sample(round_number, present):
            available = None if present.all() else lambda _: present
            sampler = ClientSampler(num_clients, size, available=available)
            return sorted(sampler.sample(round_number))  # places as in `train_together`

        return CoordinatorRun(algorithm, self.init, size, sample)

    def at_site(self, clients):
        algorithm, size = self._algorithm(clients.total)
        data = make_data(self.clients, self.data_seed, self.features)
        order = self.order or range(self.clients)  # of the clients in the site's list
        data, names = jax.tree.map(lambda x: x[list(order)], data), [f"ward {k}" for k in order]

        def draw(round_number, chosen):
            places = [client - clients.first for client in chosen]
            ids = np.full(size, -1, np.int32)
            ids[: len(chosen)] = chosen
            rows = np.resize(places, size) if places else np.zeros(size, int)
            return fedpax.Cohort(
                jax.tree.map(lambda x: x[rows], data),
                np.where(ids < 0, 0, 8 + ids).astype(np.int32),
                np.where(ids < 0, 0, 2).astype(np.int32),
                ids,
            )

        def evaluate(params):
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), data)
            return {"loss": float(loss_fn(params, batch)[0])}

        return SiteRun(algorithm, self.init, size, draw, evaluate, 8 * self.clients, names)


def small(name: str = "fedavg", rounds: int = 4, **fields: Any) -> SmallExperiment:
    """Make an experiment of a number of rounds."""
    training = TrainingConfig(rounds=rounds, evaluate_every=2, checkpoint_every=0)
    return SmallExperiment(method=name, training=training, **fields)


def train_together(
    sites: dict[str, SmallExperiment], rounds: int, present: Callable[[int], list[str]]
) -> Any:
    """Run the rounds with all clients in one cohort, without the clients of absent sites.

    Args:
        sites: the sites by name.
        rounds: number of rounds.
        present: `round -> names of the sites that answer`, counted from 0.
    """
    parts = {
        name: make_data(site.clients, site.data_seed, site.features) for name, site in sites.items()
    }
    batches = jax.tree.map(lambda *x: np.concatenate(x), *parts.values())
    owner = np.repeat(list(parts), [site.clients for site in sites.values()])
    total = len(owner)
    algorithm, _ = next(iter(sites.values()))._algorithm(total)
    state = algorithm.init(next(iter(sites.values())).init(None))
    step = jax.jit(algorithm.round)
    for r in range(rounds):
        here = np.isin(owner, present(r))
        ids = np.where(here, np.arange(total), -1).astype(np.int32)
        weights = np.where(here, 8 + np.arange(total), 0).astype(np.int32)
        steps = np.where(here, 2, 0).astype(np.int32)
        state, _ = step(state, fedpax.Cohort(batches, weights, steps, ids))
    return jax.device_get(state)


def assert_made_by(
    params: Any, sites: dict[str, SmallExperiment], rounds: int, names: Sequence[str]
) -> None:
    """Compare parameters with those of rounds in which some of the sites take part."""
    expected = train_together(sites, rounds, lambda _: list(names)).params
    for leaf, other in zip(params, jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 0.01
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)

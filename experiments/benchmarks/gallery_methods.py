"""The methods of the gallery, with the settings and the order of events that its figures have."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fedpax import Cohort, aggregators, algorithms, simulation
from fedpax.aggregators import Aggregator, chain, codecs, mean
from fedpax.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.algorithms import fedavg
from fedpax.experiments.benchmarks import workloads
from fedpax.settings.client_aggregators import AggregatorConfig, aggregator
from fedpax.settings.client_methods import ClientTraining, MethodConfig, method

PARTICIPANTS, STEPS = 10, 10
REGIONS = tuple(i % 2 for i in range(PARTICIPANTS))
# The fastest participant is three times as fast as the slowest.
TRACE = simulation.Trace(np.linspace(1.0, 3.0, PARTICIPANTS))


class Rates(NamedTuple):
    """Learning rates: of the clients' SGD, and of the islands' AdamW."""

    client: float
    island: float


class Method(NamedTuple):
    """A method on a problem.

    Attributes:
        placement: its participants, "clients" or "islands".
        events: the rounds of an asynchronous method. Default None: all participants in each round.
        models: `(state, cohort) -> models [clients, ...]`. Default None: the shared model.
        stack: number of models that `init` takes. Default 0: one, without an axis.
    """

    algorithm: FederatedAlgorithm
    placement: str
    events: list[dict[str, Any]] | None = None
    models: Callable[[Any, Cohort], Params] | None = None
    stack: int = 0


_SGD = optax.sgd(1.0)
_TUNED: Mapping[str, Mapping[str, Any]] = {
    "apfl": {"mixing": 0.25},
    "ditto": {"lam": 0.3},
    "per_fedavg": {"adaptation_learning_rate": 0.3},
    "reptile": {"meta_learning_rate": 1.0},
}
CLIENTS = {
    name: (method(name, **_TUNED.get(name, {})), _SGD)
    for name in MethodConfig.functions()
    if name in algorithms.__all__
} | {
    "self_tuning": (method("self_tuning_fedavg"), _SGD),
    "server_adagrad": (method("fedavg"), algorithms.server_adagrad(0.1)),
    "server_adam": (method("fedavg"), algorithms.server_adam(0.03)),
    "server_yogi": (method("fedavg"), algorithms.server_yogi(0.03)),
}
"""The methods for clients, and their server optimizers."""

ASYNCHRONOUS = ("async_diloco", "decoupled_diloco", "fedasync", "fedbuff", "halos")

ISLANDS: Mapping[str, Mapping[str, Any]] = {
    name: {}
    for name in algorithms.__all__
    if "FederatedAlgorithm"
    in getattr(getattr(algorithms, name), "__annotations__", {}).get("return", "")
    and name not in (*CLIENTS, *ASYNCHRONOUS)
} | {
    "sparseloco": {"codec": codecs.top_k(1 / 16)},
    # The weights are a fragment, and so are the biases.
    "streaming_diloco": {"fragments": lambda path, leaf: int(leaf.ndim == 1), "delay": 1},
}
"""The methods for islands: the settings that are not their defaults."""

_NOISE: Any = {"max_norm": 1.0, "noise_multiplier": 0.1, "seed": 0}
AGGREGATORS: Mapping[str, Callable[[], Aggregator]] = {
    name: lambda name=name: aggregator(name).make(0, PARTICIPANTS)
    for name in AggregatorConfig.functions()
    if name in aggregators.__all__
} | {
    "adaptive_clip": lambda: chain(
        aggregators.adaptive_clip(initial_norm=1.0, quantile=0.5), mean()
    ),
    "add_local_noise": lambda: chain(aggregators.add_local_noise(0.01, seed=0), mean()),
    "add_noise": lambda: chain(aggregators.add_noise(0.01, seed=0), mean()),
    "chain": lambda: chain(aggregators.clip_by_norm(1.0), aggregators.quantized_mean(16)),
    "clip_by_norm": lambda: chain(aggregators.clip_by_norm(1.0), mean()),
    "compressed_mean": lambda: aggregators.compressed_mean(
        codecs.top_k(1 / 16), error_feedback=True
    ),
    "directional_mean": algorithms.directional_mean,
    "krum": lambda: aggregators.krum(2, num_selected=4),
    "private_mean": lambda: aggregators.private_mean(**_NOISE),
    "private_secure_mean": lambda: aggregators.private_secure_mean(**_NOISE),
    "trimmed_mean": lambda: aggregators.trimmed_mean(0.2),
}

NAMES = sorted([*CLIENTS, *ISLANDS, *ASYNCHRONOUS, *AGGREGATORS])


def make_method(name: str, loss_fn: LossFn, rates: Rates, rounds: int, is_attacked: bool) -> Method:
    """Make a method of the gallery, one of `NAMES`, with the learning rates of a problem.

    An asynchronous method has the order of events of some rounds. With `is_attacked`, two
    participants send faulty updates to an aggregator.
    """
    if name in CLIENTS:
        config, server_optimizer = CLIENTS[name]
        # With momentum m, a gradient moves the model by 1 / (1 - m) learning rates in the end.
        rate = rates.client * (1 - getattr(config, "momentum", 0.0))
        settings = ClientTraining(PARTICIPANTS, PARTICIPANTS, rate, server_optimizer, chunk_size=1)
        return Method(
            config.make(loss_fn, settings),
            "clients",
            models=lambda state, cohort: config.personal_models(loss_fn, rate, state, cohort),
            stack=0 if config.has_shared_model else config.num_clusters,  # type: ignore[attr-defined]
        )
    sgd, inner = optax.sgd(rates.client), optax.adamw(rates.island)
    if name in AGGREGATORS:
        combine = AGGREGATORS[name]()
        algorithm = fedavg(
            loss_fn,
            cohort_size=PARTICIPANTS,
            client_optimizer=sgd,
            aggregator=_with_faulty_updates(combine) if is_attacked else combine,
        )
        return Method(algorithm, "clients")
    common = {"optimizer": inner, "inner_optimizer": inner, "client_optimizer": sgd}
    special, events = _order(name, rounds) if name in ASYNCHRONOUS else (ISLANDS[name], None)
    algorithm = workloads.method(name, loss_fn, islands=PARTICIPANTS, **common, **special)
    return Method(algorithm, "clients" if "max_staleness" in special else "islands", events)


def _order(name: str, rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an asynchronous method's settings, and events of participants of unlike speeds."""
    steps: Any = simulation.dynamic_local_steps(TRACE, STEPS)
    arrivals: Callable[..., Any] = simulation.island_arrivals
    if name in ("fedbuff", "fedasync"):
        buffer_size = 5 if name == "fedbuff" else 1
        order = simulation.buffered_arrivals(
            TRACE,
            num_rounds=rounds * PARTICIPANTS // buffer_size,
            concurrency=PARTICIPANTS,
            buffer_size=buffer_size,
            num_steps=STEPS,
        )
        settings = {"buffer_size": buffer_size} if name == "fedbuff" else {"mixing": 0.3}
        events = _each(order.schedule, clients=order.client_ids)
        return {"max_staleness": order.max_staleness, **settings}, events
    if name == "decoupled_diloco":
        syncs = simulation.fragment_syncs(
            TRACE,
            num_rounds=rounds * 2,
            steps_per_sync=STEPS // 2,
            quorum=PARTICIPANTS // 2,
            max_steps_per_sync=STEPS,
        )
        return {}, _each(syncs.schedule, taken=syncs.num_steps.sum(2))
    regions = {}
    if name == "halos":
        regions = {"regions": REGIONS}
        arrivals = functools.partial(
            simulation.regional_arrivals,
            regions=REGIONS,
            updates_per_exchange=5,
            seconds_to_global=5.0,
            seconds_from_global=5.0,
        )
    made = arrivals(TRACE, num_rounds=rounds * 2, num_steps=steps)
    return regions, _each(made.schedule, num_steps=made.num_steps, taken=made.num_steps)


def _each(schedule: Any, **fields: Any) -> list[dict[str, Any]]:
    everything = {"schedule": schedule, **fields}
    rounds = len(jax.tree.leaves(everything)[0])
    return [jax.tree.map(lambda leaf, r=r: leaf[r], everything) for r in range(rounds)]


def _with_faulty_updates(combine: Aggregator) -> Aggregator:
    """Reverse the updates of the first two participants, and make them four times as large."""
    factors = np.where(np.arange(PARTICIPANTS) < 2, -4.0, 1.0).astype(np.float32)

    def aggregate(state: Any, updates: Any, weights: Any) -> Any:
        faulty = jax.tree.map(
            lambda u: u * factors.reshape(-1, *[1] * (u.ndim - 1)).astype(u.dtype), updates
        )
        return combine.aggregate(state, faulty, weights)

    return Aggregator(combine.init, aggregate)

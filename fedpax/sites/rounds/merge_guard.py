"""The guard of a coordinator: which replies of sites are not merged, and why."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.algorithm import Params
from fedpax.errors import ArgumentError
from fedpax.run_files.quantiles import with_quantiles
from fedpax.sites.guards import NormHistory, drop_harmful, drop_large, parse_accept_if
from fedpax.sites.rounds.contract import ClientRange
from fedpax.sites.rounds.round_rules import RoundRules

ModelOf = Callable[[frozenset[str]], Params]
"""Returns the model that the replies of some sites alone make; without any, the present model."""


class MergeGuard:
    """Drops replies by the rules of `fedpax.sites.guards`.

    The norm of a site is that of the change of the model that its reply alone makes.

    Args:
        rules: the rules; without `norm_factor` and `accept_if` nothing is dropped.
        evaluate: `params -> metrics` on the coordinator's held-out examples, for `accept_if`.
    """

    def __init__(
        self, rules: RoundRules, evaluate: Callable[[Params], Mapping[str, float]] | None = None
    ) -> None:
        self._factor, self._evaluate = rules.norm_factor, evaluate
        self._rule = parse_accept_if(rules.accept_if) if rules.accept_if else None
        self._history = NormHistory()

    @property
    def is_active(self) -> bool:
        """Whether replies may be dropped."""
        return self._factor is not None or self._rule is not None

    def drop(self, sites: Iterable[str], model_of: ModelOf) -> dict[str, str]:
        """Return the sites whose replies are not merged, with reasons."""
        dropped: dict[str, str] = {}
        if self._factor is not None:
            present = model_of(frozenset())
            norms = {site: float(_distance(model_of(frozenset({site})), present)) for site in sites}
            dropped, self._history = drop_large(norms, self._history, factor=self._factor)
        if self._rule is not None:
            evaluate = self._evaluate
            assert evaluate is not None
            left = [site for site in sites if site not in dropped]
            dropped |= drop_harmful(left, lambda some: evaluate(model_of(some)), self._rule)
        return dropped

    def to_json(self) -> list[list[float]]:
        """Return what outlives the coordinator's process."""
        return [list(norms) for norms in self._history.rounds]

    def restore(self, saved: Iterable[Iterable[float]]) -> None:
        """Take over what an earlier process saved."""
        self._history = NormHistory(tuple(tuple(norms) for norms in saved))


def evaluation_of(experiment: Any) -> Callable[[Params], dict[str, float]]:
    """Return the metrics of a model on the held-out examples of the coordinator's own data."""
    experiment = copy.copy(experiment)  # as one of the sites; the coordinator's own stays
    number = int(experiment.describe_site()["clients"])
    run = experiment.at_site(ClientRange(0, number, number))
    if run.evaluate is None:
        raise ArgumentError(
            "accept_if needs held-out examples, and the coordinator's data have none. Give `fedpax "
            "syncer` data of its own with held-out examples, or leave --accept_if out."
        )

    def evaluate(params: Params) -> dict[str, float]:
        found = with_quantiles(run.evaluate(params))
        return {name: float(np.asarray(value)) for name, value in found.items()}

    return evaluate


@jax.jit
def _distance(one: Params, other: Params) -> jax.Array:
    squares = [
        jnp.sum(jnp.square(jnp.float32(x) - jnp.float32(y)))
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    ]
    return jnp.sqrt(sum(squares, jnp.float32(0)))

"""The guard of a coordinator: which updates of sites are not merged, and why."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp

from fedpax.algorithm import Params
from fedpax.sites.guards import NormHistory, drop_harmful, drop_large, parse_accept_if

ModelOf = Callable[[frozenset[str]], Params]
"""Returns the model that the updates of some sites alone make; without any, the present model."""

ModelsWithoutEach = Callable[[tuple[str, ...]], Iterable[tuple[str, Params]]]
"""Yields each of some sites, in their order, with the model of the other sites' updates."""


class MergeGuard:
    """Drops updates by the rules of `fedpax.sites.guards`."""

    def __init__(
        self,
        norm_factor: float | None = None,
        accept_if: str | None = None,
        evaluate: Callable[[Params], Mapping[str, float]] | None = None,
    ) -> None:
        self._factor, self._evaluate = norm_factor, evaluate
        self._rule = parse_accept_if(accept_if) if accept_if else None
        self._history = NormHistory()

    @property
    def is_active(self) -> bool:
        """Whether replies may be dropped."""
        return self._factor is not None or self._rule is not None

    def drop(
        self,
        sites: Iterable[str],
        model_of: ModelOf,
        norms: Mapping[str, float] | None = None,
        models_without_each: ModelsWithoutEach | None = None,
    ) -> dict[str, str]:
        """Return the sites whose updates are not merged, with reasons."""
        dropped: dict[str, str] = {}
        if self._factor is not None:
            if norms is None:
                now = model_of(frozenset())
                norms = {site: float(_distance(model_of(frozenset({site})), now)) for site in sites}
            dropped, self._history = drop_large(norms, self._history, factor=self._factor)
        if self._rule is not None:
            evaluate = self._evaluate
            assert evaluate is not None
            left = [site for site in sites if site not in dropped]

            def evaluate_each(some: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, float]]]:
                assert models_without_each is not None
                for site, model in models_without_each(some):
                    yield site, evaluate(model)

            dropped |= drop_harmful(
                left,
                lambda some: evaluate(model_of(some)),
                self._rule,
                evaluate_without_each=None if models_without_each is None else evaluate_each,
            )
        return dropped

    def to_json(self) -> list[list[float]]:
        """Return what outlives the coordinator's process."""
        return [list(norms) for norms in self._history.rounds]

    def restore(self, saved: Iterable[Iterable[float]]) -> None:
        """Take over what an earlier process saved."""
        self._history = NormHistory(tuple(tuple(norms) for norms in saved))


@jax.jit
def _distance(model: Params, other: Params) -> jax.Array:
    squares = [
        jnp.sum(jnp.square(jnp.float32(x) - jnp.float32(y)))
        for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True)
    ]
    return jnp.sqrt(sum(squares, jnp.float32(0)))

"""Filters of updates: by the norm of an update, or by the metrics of the merged model."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from fedpax.errors import ArgumentError

Dropped = dict[str, str]
"""The reason for each dropped site."""

EvaluateWithoutEach = Callable[[tuple[str, ...]], Iterable[tuple[str, Mapping[str, float]]]]
"""See `drop_harmful`."""

NORM_FACTOR = 3.0
"""Default limit of a norm, in medians of recent norms."""

_RULE = re.compile(r"([A-Za-z_]\w*)([+-])(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)")


class NormHistory(NamedTuple):
    """The norms of recent rounds, one of each site in a round."""

    rounds: tuple[tuple[float, ...], ...] = ()


NO_NORMS = NormHistory()


def check_guards(norm_factor: float | None, accept_if: str | None) -> None:
    """Check the rules of a run; a limit below the median would drop most updates."""
    if norm_factor is not None and not 1 <= norm_factor < math.inf:
        raise ArgumentError(
            f"norm_factor={norm_factor}, expected a number of at least 1. Set for example "
            "--norm_factor=3."
        )
    if accept_if:
        parse_accept_if(accept_if)


def drop_large(
    norms: Mapping[str, float],
    history: NormHistory = NO_NORMS,
    *,
    factor: float = NORM_FACTOR,
    window: int = 10,
) -> tuple[Dropped, NormHistory]:
    """Drop the updates of this round whose norm is above `factor` medians of recent norms.

    The median is over `window` rounds, dropped updates included: a minority of sites cannot move it
    beyond the norms of the others.

    Args:
        norms: the L2 norm of each update, by site.
        history: what the call for the round before returned.
        factor: the limit in medians, above 0.
        window: number of rounds.

    Returns:
        The dropped sites, also those with a norm that is not finite, and the history for the next
        round, without such norms.

    Example:
        >>> dropped, history = drop_large({"a": 1.0, "b": 1.2, "c": 0.9, "d": 50.0})
        >>> dropped
        {'d': 'its norm 50 is above 3.3, 3 times the median of recent norms'}
    """
    if not factor > 0 or window < 1:
        raise ArgumentError(
            f"drop_large(): factor={factor!r} and window={window!r}, expected numbers above 0. Use "
            "factor=3 and window=10."
        )
    finite = tuple(norm for norm in norms.values() if math.isfinite(norm))
    rounds = (*history.rounds, finite)[-window:] if finite else history.rounds
    recent = [norm for norms in rounds for norm in norms]
    limit = factor * statistics.median(recent) if recent else math.inf
    dropped = {}
    for site, norm in norms.items():
        if not math.isfinite(norm):
            dropped[site] = "it has values that are not finite"
        elif norm > limit:
            dropped[site] = (
                f"its norm {norm:.4g} is above {limit:.4g}, {factor:g} times the median of recent "
                "norms"
            )
    return dropped, NormHistory(rounds)


class AcceptIf(NamedTuple):
    """A rule for the metric of a model with an update, relative to the model without it.

    Attributes:
        tolerance: how much worse it may be, at least 0.
        larger_is_better: whether a smaller value is worse.
    """

    metric: str
    tolerance: float
    larger_is_better: bool = False

    def loss(self, metrics: Mapping[str, float]) -> float:
        """Return the metric with a sign such that smaller is better; inf if it is not finite."""
        if self.metric not in metrics:
            raise ArgumentError(
                f"accept_if has the metric {self.metric!r}, expected one of the evaluation: "
                f"{', '.join(sorted(metrics))}."
            )
        value = float(metrics[self.metric])
        if not math.isfinite(value):
            return math.inf
        return -value if self.larger_is_better else value


def parse_accept_if(text: str) -> AcceptIf:
    """Parse a rule: `loss+0.01` accepts a loss of at most the one without the update plus 0.01.

    `accuracy-0.02` accepts an accuracy of at least the one without the update minus 0.02.

    Example:
        >>> parse_accept_if("loss+0.01")
        AcceptIf(metric='loss', tolerance=0.01, larger_is_better=False)
    """
    match = _RULE.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ArgumentError(
            f"accept_if={text!r} is not a rule, expected METRIC+TOLERANCE for a metric that "
            "decreases and METRIC-TOLERANCE for one that increases, such as loss+0.01 or "
            "accuracy-0.02."
        )
    return AcceptIf(match[1], float(match[3]), larger_is_better=match[2] == "-")


def drop_harmful(
    sites: Iterable[str],
    evaluate: Callable[[frozenset[str]], Mapping[str, float]],
    rule: AcceptIf,
    *,
    evaluate_without_each: EvaluateWithoutEach | None = None,
) -> Dropped:
    """Drop the updates with which the merged model is worse on the coordinator's held-out data.

    While the model is better without an update by more than the tolerance, the update whose absence
    improves it most is dropped. An update is not scored alone: an honest site that lacks some
    labels would have a bad score.

    Args:
        sites: the names of the sites with updates.
        evaluate: returns the metrics of a merge of the updates of some sites; without sites, of the
            present model.
        rule: what is accepted.
        evaluate_without_each: yields each of some sites, with the metrics of a merge without its
            update. Default None: by `evaluate`.

    Returns:
        The dropped sites, in the order in which they were dropped. A metric that is not finite is
        worse than any other one.

    Example:
        >>> def evaluate(sites: frozenset[str]) -> dict[str, float]:
        ...     return {"loss": 1.0 - 0.1 * len(sites - {"c"}) + 2.5 * ("c" in sites)}
        >>> drop_harmful("abc", evaluate, parse_accept_if("loss+0.01"))
        {'c': 'loss 3.3 with its update and 0.8 without, expected at most 0.01 more'}
    """

    def by_evaluate(some: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, float]]]:
        for site in some:
            yield site, evaluate(frozenset(some) - {site})

    evaluate_each = evaluate_without_each or by_evaluate
    left = dict.fromkeys(sites)
    dropped: Dropped = {}
    loss = rule.loss(evaluate(frozenset(left))) if left else 0.0
    while left:
        without = {site: rule.loss(metrics) for site, metrics in evaluate_each(tuple(left))}
        site = min(without, key=without.__getitem__)
        if not without[site] + rule.tolerance < loss:
            break
        sign, side = (-1, "less") if rule.larger_is_better else (1, "more")
        dropped[site] = (
            f"{rule.metric} {sign * loss:.4g} with its update and {sign * without[site]:.4g} "
            f"without, expected at most {rule.tolerance:g} {side}"
        )
        del left[site]
        loss = without[site]
    return dropped

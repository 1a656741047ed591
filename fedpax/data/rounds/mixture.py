"""Mixture: several data sets, and the share of each in the rows of a round."""

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64

from fedpax.data.rounds.documents import Field
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.sources.source import Examples, as_examples

Weight = float | Sequence[tuple[int, float]]
"""A constant, or points `(round, weight)` that are interpolated linearly."""


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Data sets that are read together, each with a weight.

    Weights are shares of the tokens, and need not sum to 1. A weight is a number, or ascending
    points `(round, weight)`: linear between two points, constant outside.

    Args:
        sources: the data sets by name, each as `token_rounds` takes it.
        weights: the weight of each data set by name.
        fields: the field with the text, by name of the data set. Default: as in `token_rounds`.

    Raises:
        TypeError: a source is something else, such as a generator.
        ValueError: there is no data set, one has no examples, names differ, or weights are
            negative, not finite, not in order, or sum to 0 in some round.

    Example:
        >>> code, web = [{"text": "a = 1"}], [{"text": "It is one."}]
        >>> mixture = Mixture(
        ...     {"code": code, "web": web},
        ...     weights={"code": 1.0, "web": [(10, 4.0), (20, 0.0)]},
        ... )
        >>> mixture.shares(0), mixture.shares(15), mixture.shares(30)
        ([0.2, 0.8], [0.3333333333333333, 0.6666666666666666], [1.0, 0.0])
    """

    sources: Mapping[str, Examples]
    weights: Mapping[str, Weight]
    fields: Mapping[str, Field] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        examples = {name: as_examples(source, repr(name)) for name, source in self.sources.items()}
        object.__setattr__(self, "sources", examples)
        if not self.sources:
            raise ArgumentError(
                "The mixture names no data set, expected at least one: add a source."
            )
        for name in {*self.weights, *self.fields} - {*self.sources}:
            raise ArgumentError(
                f"The mixture has a weight or field for {name!r}, but its sources are "
                f"{', '.join(map(repr, self.sources))}: name one of these, or add the source."
            )
        for name, source in self.sources.items():
            if name not in self.weights:
                raise ArgumentError(
                    f"The mixture has no weight for {name!r}, expected one for each source: add it "
                    "to weights."
                )
            if not len(source):
                raise ArgumentError(
                    f"{name!r} in the mixture has no examples: load another split, or leave it out."
                )
        check_weights(self.weights)

    def shares(self, round_number: int) -> list[float]:
        """Return the share of each data set in a round's rows, in the order of `sources`."""
        weights = [weight_at(self.weights[name], round_number) for name in self.sources]
        return [weight / math.fsum(weights) for weight in weights]


def check_weights(weights: Mapping[str, Weight]) -> None:
    """Check that weights are finite, not negative, in order, and never all 0."""
    rounds = {0}
    for name, weight in weights.items():
        try:
            points = _points(weight)
            numbers = [operator.index(number) for number, _ in points]
            _ = [value < math.inf for _, value in points]
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                f"The weight of {name!r} is {weight!r:.80}, expected a real number, or points "
                "(round, weight) whose rounds are integers, such as [(0, 1.0), (100, 0.25)]."
            ) from None
        if not points or numbers != sorted(numbers) or numbers[0] < 0:
            raise ArgumentError(
                f"The weight of {name!r} has points at the rounds {numbers}, expected at least "
                "one, from round 0 in ascending order: sort them."
            )
        for number, value in points:
            if not 0 <= value < math.inf:
                raise ArgumentError(
                    f"The weight of {name!r} is {value} at round {number}, expected a finite "
                    "number of at least 0: correct it, or leave the data set out."
                )
        # Sums are linear between points. At a jump, both sides of it.
        rounds |= {max(0, at) for number in numbers for at in (number - 1, number)}
    for number in sorted(rounds):
        if not sum(weight_at(weight, number) for weight in weights.values()):
            raise ArgumentError(
                f"The weights of {', '.join(map(repr, weights))} sum to 0 in round {number}, "
                "expected a positive sum: raise one of them."
            )


def weight_at(weight: Weight, round_number: int) -> float:
    """Return a weight, a number or points, in a round counted from 0."""
    points = _points(weight)
    later = sum(number <= round_number for number, _ in points)
    if later == 0 or later == len(points):
        return float(points[max(0, later - 1)][1])
    (start, before), (end, after) = points[later - 1 : later + 1]
    return before + (after - before) * (round_number - start) / (end - start)


def _points(weight: Any) -> Sequence[tuple[int, float]]:
    if isinstance(weight, Sequence) or np.ndim(weight):
        return weight
    return [(0, float(weight))]  # float: also of NumPy's and JAX's numbers


def apportion(
    credits: list[float], shares: Sequence[float], count: int
) -> tuple[Int64[np.ndarray, " count"], list[float]]:
    """Choose a data set for each of the next rows, such that the counts follow the shares."""
    # After n rows, data set k was chosen c_k times and its quota q_k is the sum of its shares. If
    # shares are constant, |q_k - c_k| <= 1 - 1 / (2 K - 2) for K data sets. Data set k may be
    # chosen once its credit q_k - c_k reaches 1 / (2 K - 2); of these, the one whose credit would
    # exceed the bound first, at its current share, is chosen. A share of 0 is never chosen.
    # Tijdeman, Discrete Mathematics 32, 1980, section 2.
    credits = list(credits)
    positive = [k for k, share in enumerate(shares) if share > 0]
    least = 1 / (2 * len(positive) - 2) if len(positive) > 1 else 0.0
    chosen = np.empty(count, np.int64)
    for row in range(count):
        best, deadline = -1, math.inf
        for k in positive:
            credits[k] += shares[k]
            # Rounding must not exclude a credit that is exactly the least.
            rows_left = (1 - least - credits[k]) / shares[k]
            if credits[k] >= least - 1e-9 and rows_left < deadline:
                best, deadline = k, rows_left
        if best < 0:  # only after shares have changed
            best = max(positive, key=lambda k: credits[k])
        credits[best] -= 1
        chosen[row] = best
    return chosen, credits

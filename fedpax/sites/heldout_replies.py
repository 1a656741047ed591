"""Which means of its held-out examples a site sends."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedpax.sites.site_experiment import FINE_TUNED, Json, SiteRun
from fedpax.sites.tasks import TERM, numbered

LEAST_LABELS = 10
"""The fewest held-out examples of which a site sends means of labels and, if its values are hidden,
metrics."""

MOST_MEAN = 2.0**64
"""Stands for larger means in secure sums: to leave them out would tell their sites."""

MOST_EVALUATIONS = 20
"""Evaluations that a site answers beside one for each round."""


class Allowance:
    """Counts the evaluations that a site may still answer."""

    def __init__(
        self, rounds: Iterable[int] = (), evaluations: int = 0, *, sends: bool = True
    ) -> None:
        self._rounds, self._evaluations, self._sends = {*rounds}, evaluations, sends

    def add_round(self, number: int) -> None:
        """Note a round that the site is asked to train in; a repeated one counts once."""
        self._rounds.add(number)

    def refuse(self) -> str:
        """Count an evaluation, and return why it is not answered, or ""."""
        self._evaluations += 1
        if self._evaluations > MOST_EVALUATIONS + len(self._rounds):
            return (
                f"of more models: it answers {MOST_EVALUATIONS} evaluations, and one for each "
                "round that it trains in. Set a larger --training.evaluate_every"
            )
        return "" if self._sends else "of its held-out examples: it has --no_metrics"


class Heldout(NamedTuple):
    """The means of a site, and the numbers of examples in all and in parts."""

    examples: int
    parts: Mapping[str, int]
    means: Mapping[str, float]

    def count(self, name: str) -> int:
        """Return the number of examples of a mean."""
        name = name.removeprefix(f"{FINE_TUNED}_")
        return next((n for part, n in self.parts.items() if name.startswith(part)), self.examples)


def hash_model(arrays: Sequence[np.ndarray]) -> str:
    """Return a hash of the parameters of a model."""
    content = hashlib.sha256()
    for array in arrays:
        content.update(array.tobytes())
    return content.hexdigest()


class Measured(NamedTuple):
    """The means of the last model that a site has measured, without those that it keeps."""

    model: str  # the hash of its arrays
    heldout: Heldout
    withheld: str = ""  # why others are not sent
    session: str = ""  # the one sum in which they are sent

    def reply(self, *, is_summed: bool) -> Json:
        """Return the fields of the reply; names alone, if a sum hides the means."""
        examples, parts, means = self.heldout
        known = {n: None if is_summed or not np.isfinite(x) else x for n, x in means.items()}
        fields = {"metrics": known, "examples": examples, "parts": dict(parts)}
        return {**fields, "withheld": self.withheld} if self.withheld else fields

    def terms(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the numbers of examples, and the sums over examples, for a secure sum."""
        counts = [self.heldout.count(name) for name in names]
        means = [self.heldout.means[name] for name in names]
        means = [x if abs(x) < MOST_MEAN else MOST_MEAN for x in means]
        return numbered(TERM, [np.array([counts, np.multiply(counts, means)], np.float64)])


def measure(
    run: SiteRun, model: str, means: Mapping[str, float], *, is_summed: bool, per_example: int
) -> Measured:
    """Return the means that may leave a site; an example has `per_example` items."""
    heldout = Heldout(run.num_heldout, dict(run.heldout_parts), means)
    few = {name for name in means if heldout.count(name) < LEAST_LABELS * per_example}
    labels = {name for name in means if name.endswith(run.label_means)}
    is_hidden = is_summed or run.is_private
    kept = (few if is_hidden else few & labels) | (labels if run.is_private else set())
    sent = heldout._replace(means={n: x for n, x in means.items() if n not in kept})
    if not (is_hidden and few):
        return Measured(model, sent)
    count = min(map(heldout.count, few)) // per_example
    why = f"of {count} held-out examples, expected at least {LEAST_LABELS}: fewer tell single rows"
    return Measured(model, sent, why)

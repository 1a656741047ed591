"""Which means of its held-out examples a site sends."""

from collections.abc import Mapping

import numpy as np

from fedpax.sites.site_evaluation import Heldout
from fedpax.sites.site_experiment import Json, SiteRun

LEAST_LABELS = 10
"""The fewest held-out examples of which a site sends means of labels: two means give two labels.

A site whose values are hidden sends no metrics of fewer: models that the coordinator makes read
single examples off them."""


MOST_EVALUATIONS = 20
"""Evaluations that a site answers beside one for each round that it is asked to train in."""


class Allowance:
    """Counts the evaluations that a site may still answer."""

    def __init__(self, rounds: int = 0, evaluations: int = 0, *, sends: bool = True) -> None:
        self._sends, self._left = sends, MOST_EVALUATIONS + rounds - evaluations
        self._round = ""  # token of the last one

    def add_round(self, token: str) -> None:
        """Note a round that the site is asked to train in."""
        self._left += token != self._round
        self._round = token

    def refuse(self) -> str:
        """Count an evaluation, and return why it is not answered, or ""."""
        self._left -= 1
        if self._left < 0:
            return (
                f"of more models: it answers {MOST_EVALUATIONS} evaluations, and one for each "
                "round that it trains in. Set a larger --training.evaluate_every"
            )
        return "" if self._sends else "of its held-out examples: it has --no_metrics"


def make_reply(
    run: SiteRun, means: Mapping[str, float], *, is_hidden: bool, per_example: int
) -> Json:
    """Return the fields of the reply to an evaluation; an example counts as `per_example` items."""
    heldout = Heldout(run.num_heldout, dict(run.heldout_parts), means)
    least = LEAST_LABELS * per_example
    few = {name for name in means if heldout.count(name) < least}
    labels = {name for name in means if name.endswith(run.label_means)}
    kept = few | labels if is_hidden else few & labels
    sent = {name: x if np.isfinite(x) else None for name, x in means.items() if name not in kept}
    fields = {"metrics": sent, "examples": heldout.examples, "parts": heldout.parts}
    if not (is_hidden and few):
        return fields
    count = min(map(heldout.count, few)) // per_example
    why = f"of {count} held-out examples, expected at least {LEAST_LABELS}: fewer tell single rows"
    return {**fields, "withheld": why}

"""Which means of its held-out examples a site sends."""

from collections.abc import Mapping

import numpy as np

from fedpax.sites.site_evaluation import Heldout
from fedpax.sites.site_experiment import Json, SiteRun

LEAST_LABELS = 10
"""The fewest held-out examples of which a site sends means of labels: two means give two labels.

A site whose values are hidden sends no metrics of fewer: models that the coordinator makes read
single examples off them."""


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

"""When a round over sites ends, and what its clients weigh."""

import re
from typing import NamedTuple

import numpy as np

from fedpax.clients.cohort import Cohort
from fedpax.errors import ArgumentError


class RoundRules(NamedTuple):
    """When a round ends, and what its clients weigh.

    Attributes:
        min_sites: number of sites that the first round waits for, and that each round needs.
        round_seconds: seconds after which a stage of a round waits for no further site.
        weights: "examples", "equal" for each client, or "capped:N", at most N examples.
        silent_after: seconds without a message after which no round waits for a site.
    """

    min_sites: int = 2
    round_seconds: float = 600.0
    weights: str = "examples"
    silent_after: float = 30.0

    def check(self) -> None:
        """Check the ranges."""
        if self.min_sites < 1:
            raise ArgumentError(
                f"min_sites={self.min_sites}, expected at least 1. Set for example --min_sites=2."
            )
        if not re.fullmatch(r"examples|equal|capped:[1-9][0-9]{0,8}", self.weights):
            raise ArgumentError(
                f"weights={self.weights!r}, expected examples, equal or capped:N. Set for example "
                "--weights=capped:1000."
            )


def weigh(cohort: Cohort, weights: str) -> Cohort:
    """Set the weights of clients: "examples", "equal", or "capped:N"."""
    counts = np.asarray(cohort.num_examples)
    if weights == "equal":
        return cohort._replace(num_examples=np.minimum(counts, 1))
    if weights.startswith("capped:"):
        return cohort._replace(num_examples=np.minimum(counts, int(weights.partition(":")[2])))
    return cohort

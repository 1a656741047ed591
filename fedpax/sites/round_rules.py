"""When a round over sites ends, and what its clients weigh."""

from typing import NamedTuple

import numpy as np

from fedpax.clients.cohort import Cohort
from fedpax.console import count_of
from fedpax.errors import ArgumentError
from fedpax.sites.downlink import WHOLE, make_codec
from fedpax.sites.site_experiment import CoordinatorRun
from fedpax.sites.site_table import CLIENTS_PER_SITE, MOST_MISSED, SiteTable
from fedpax.sites.tasks import WEIGHTS
from fedpax.sites.update_filters import check_guards


class RoundRules(NamedTuple):
    """When a round ends, and what its clients weigh: flags of `fedpax syncer`."""

    min_sites: int = 2
    round_seconds: float = 600.0
    weights: str = "examples"
    silent_after: float = 30.0
    norm_factor: float | None = None
    accept_if: str | None = None
    secure_sums: bool = False
    secure_threshold: int | None = None
    down: str = WHOLE
    up: str = WHOLE
    missed_rounds: int = MOST_MISSED
    clients_per_site: int = CLIENTS_PER_SITE

    def check(self) -> None:
        """Check the ranges."""
        make_codec(self.down)
        make_codec(self.up, "up")
        examples = {"min_sites": 2, "missed_rounds": MOST_MISSED}
        for name, example in {**examples, "clients_per_site": CLIENTS_PER_SITE}.items():
            if (value := getattr(self, name)) < 1:
                raise ArgumentError(
                    f"{name}={value}, expected at least 1. Set for example --{name}={example}."
                )
        if not WEIGHTS.fullmatch(self.weights):
            raise ArgumentError(
                f"weights={self.weights!r}, expected examples, equal or capped:N. Set for example "
                "--weights=capped:1000."
            )
        check_guards(self.norm_factor, self.accept_if)
        if self.secure_sums and (self.accept_if or self.norm_factor):
            raise ArgumentError(
                "secure_sums hides the replies of sites, and norm_factor and accept_if look at "
                "each of them. Leave --secure_sums out, or the other two."
            )
        if self.secure_sums and self.up != WHOLE:
            raise ArgumentError(
                f"up={self.up!r} with secure_sums, whose terms are integers, expected "
                f"up={WHOLE!r}. Leave --up out."
            )
        if self.secure_sums and self.min_sites < 3:
            raise ArgumentError(
                f"min_sites={self.min_sites} with secure_sums, expected at least 3: from a sum of "
                "two sites each learns the other's update. Set for example --min_sites=3."
            )


def weigh(cohort: Cohort, weights: str) -> Cohort:
    """Set the weights of clients: "examples", "equal", or "capped:N"."""
    counts = np.asarray(cohort.num_examples)
    if weights == "equal":
        return cohort._replace(num_examples=np.minimum(counts, 1))
    if weights.startswith("capped:"):
        return cohort._replace(num_examples=np.minimum(counts, int(weights.partition(":")[2])))
    return cohort


def describe_sampling(rules: RoundRules, sites: SiteTable, run: CoordinatorRun) -> list[str]:
    """Tell if rounds can have one of several clients of a site, whose update is then sent."""
    size, clients = run.cohort_size, sites.num_clients
    several = any(site.count > 1 for site in sites)
    if rules.secure_sums or not several or size >= clients:
        return []
    return [
        f"rounds sample {size} of {count_of(clients, 'client')}: where it is one client of a site, "
        "the site's sum is the update of this client. --secure_sums hides it"
    ]

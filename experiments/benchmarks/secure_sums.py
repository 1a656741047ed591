"""Measure the CPU time of a secure sum at a site and at the coordinator.

    python -m fedpax.experiments.benchmarks.secure_sums --sites=4,16 --values=1000000

All sides run in one process, without a network. In each sum the last site drops out after it has
shared its secrets, so the coordinator removes its masks from each other site's values.
"""

import dataclasses
import time
from collections.abc import Iterator

import numpy as np

from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, option
from fedpax.secure_sums import CoordinatorSide, Message, SiteSide


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options."""

    sites: list[int] = option("4,16", "numbers of sites", harness.integers)
    values: int = option(1_000_000, "values of each site")


def measure(settings: Settings) -> Iterator[Row]:
    """Measure a sum for each number of sites."""
    rng = np.random.default_rng(0)
    values = {"x": rng.integers(-1000, 1000, settings.values, np.int32)}
    for number in settings.sites:
        names = [f"site-{i:03}" for i in range(number)]
        sites = {name: SiteSide(name, "sum", values) for name in names}
        coordinator = CoordinatorSide("sum", names)
        requests: dict[str, Message | None] = dict.fromkeys(names)
        at_sites = at_coordinator = 0.0
        while not coordinator.done:
            if coordinator.phase == "mask":
                requests.pop(names[-1])
            for name, request in requests.items():
                began = time.process_time()
                answer = sites[name].answer(request)
                answered = time.process_time()
                coordinator.receive(name, answer)
                at_sites += answered - began
                at_coordinator += time.process_time() - answered
            began = time.process_time()
            requests = dict(coordinator.advance())
            at_coordinator += time.process_time() - began
        right = np.array_equal(coordinator.total["x"], (number - 1) * values["x"])
        yield Row(
            sites=number,
            values=settings.values,
            site_seconds=at_sites / number,
            coordinator_seconds=at_coordinator,
            right=right,
        )


main = Benchmark(
    __doc__,
    Settings,
    measure,
    {
        "sites": "{sites}",
        "values": "{values:,}",
        "CPU s of a site": "{site_seconds:.3f}",
        "CPU s of the coordinator": "{coordinator_seconds:.3f}",
    },
    required="right",
)


if __name__ == "__main__":
    raise SystemExit(main())

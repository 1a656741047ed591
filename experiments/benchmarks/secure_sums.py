"""Measure the CPU time of a secure sum at a site and at the coordinator.

    python -m fedpax.experiments.benchmarks.secure_sums --sites=4,16 --values=1000000

All sides run in one process. In each sum the last site drops out after it has shared its secrets,
so the coordinator removes its masks from the values of all other sites.
"""

import time
from collections.abc import Iterator

import numpy as np

from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.secure_sums import CoordinatorSide, Message, SiteSide


class SecureSums(Benchmark):
    sites: list[int] = option("4,16", "numbers of sites", harness.integers)
    values: int = option(1_000_000, "values of each site")
    columns = (
        "sites {sites} | values {values:,} | CPU s of a site {site_seconds:.3f} "
        "| CPU s of the coordinator {coordinator_seconds:.3f}"
    )
    bar = "the sum is right"

    def measure(self) -> Iterator[Row]:
        rng = np.random.default_rng(0)
        values = {"x": rng.integers(-1000, 1000, self.values, np.int32)}
        for number in self.sites:
            names = [f"site-{i:03}" for i in range(number)]
            sites = {name: SiteSide(name, "sum", values) for name in names}
            coordinator = CoordinatorSide("sum", names)
            requests: dict[str, Message | None] = dict.fromkeys(names)
            at_sites, began = 0.0, time.process_time()
            while not coordinator.done:
                if coordinator.phase == "mask":
                    requests.pop(names[-1])
                for name, request in requests.items():
                    asked = time.process_time()
                    answer = sites[name].answer(request)
                    at_sites += time.process_time() - asked
                    coordinator.receive(name, answer)
                requests = dict(coordinator.advance())
            yield Row(
                sites=number,
                values=self.values,
                site_seconds=at_sites / number,
                coordinator_seconds=time.process_time() - began - at_sites,
                met=np.array_equal(coordinator.total["x"], (number - 1) * values["x"]),
            )


main = command(SecureSums)

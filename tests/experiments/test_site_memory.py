"""The benchmark of a coordinator's memory: real messages of sites that do not train."""

import pytest

pytest.importorskip("grpc")

from fedpax.experiments.benchmarks import site_memory

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("aggregator", ["median", "secure sums"])
def test_the_memory_of_a_coordinator(aggregator: str) -> None:
    arguments = ["--sites=3", "--megabytes=2", "--rounds=1", f"--aggregators={aggregator}"]
    (row,) = site_memory.main.run(arguments)
    assert (row.aggregator, row.sites) == (aggregator, 3)
    assert 50 < row.megabytes < 5000

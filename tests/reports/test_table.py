"""Numbers in tables."""

import hypothesis
import hypothesis.strategies as st
from matplotlib.ticker import EngFormatter

from fedpax.reports.metric_table import format_bytes


@hypothesis.given(st.one_of(st.integers(1, 10**18), st.floats(1, 1e18)))
def test_bytes_are_formatted_as_engineers_do(count: float) -> None:
    assert format_bytes(count) == EngFormatter(unit="B", places=1)(count)

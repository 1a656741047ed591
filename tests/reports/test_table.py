"""Numbers in tables."""

import math

import hypothesis
import hypothesis.strategies as st
from matplotlib.ticker import EngFormatter

from fedpax.console import format_bytes, format_seconds, format_value, markdown_table
from fedpax.reports.client_report import smaller_is_better
from fedpax.reports.metric_table import DEVIATION, average_lines, format_mean, format_metrics
from fedpax.reports.run_report import RunReport, format_goodput, format_reports


@hypothesis.given(st.one_of(st.integers(1, 10**18), st.floats(1, 1e18)))
def test_bytes_are_formatted_as_engineers_do(count: float) -> None:
    assert format_bytes(count) == EngFormatter(unit="B", places=1)(count)


def test_lines_of_several_runs_are_averaged() -> None:
    runs = [[{"kind": "evaluation", "round": 1, "loss": loss}] for loss in (1.0, 2.0, 3.0)]
    averaged = {"kind": "evaluation", "round": 1, "loss": 2.0, DEVIATION: {"loss": 1.0}}
    assert average_lines(runs) == [averaged]
    assert format_mean(averaged, "loss") == "2.0000 ± 1.0000"
    assert (format_mean({"loss": 2.0}, "loss"), format_mean({}, "loss")) == ("2.0000", "-")


def test_a_table_of_metrics() -> None:
    lines = [{"kind": "evaluation", "round": 4, "loss": 0.5, "accuracy": 0.875}]
    assert format_metrics({"fedavg": lines}).splitlines() == [
        "| experiment | held-out accuracy |",
        "|------------|-------------------|",
        "| fedavg     |            0.8750 |",
    ]


def test_columns_but_the_first_are_aligned_right() -> None:
    table = markdown_table(["run", "loss"], [["diloco", "2.5"], ["single", "12.5"]])
    assert table.splitlines() == [
        "| run    | loss |",
        "|--------|------|",
        "| diloco |  2.5 |",
        "| single | 12.5 |",
    ]


def test_values_and_seconds_in_words() -> None:
    assert (format_value(0.25), format_value(2.5e30)) == ("0.2500", "2.5e+30")
    assert (format_seconds(130.2), format_seconds(7500)) == ("130 s", "2 h 05 min")


def test_smaller_losses_are_better_and_larger_areas() -> None:
    assert smaller_is_better("personal_loss") and not smaller_is_better("auc")


def test_reports_of_runs_are_tables() -> None:
    run = RunReport("diloco", "running", 30, 440, 2.5, math.nan, 9e3, "tokens", 3.2e6, 60.0)
    assert [line[:55] for line in format_reports([run]).splitlines()[::2]] == [
        "| experiment | rounds | training loss | held-out loss |",
        "| diloco     | 30/440 |        2.5000 |             - |",
    ]
    known = {"input": 1.0, "compile": 4.0, "step": 90.0, "evaluate": 3.0, "save": 2.0}
    measured = run._replace(goodput={**known, "lost": 0.0})
    assert format_goodput([measured, run]).splitlines() == [
        "| experiment | step (goodput) | input | compile | evaluate | save | lost | spikes |",
        "|------------|----------------|-------|---------|----------|------|------|--------|",
        "| diloco     |          90.0% |  1.0% |    4.0% |     3.0% | 2.0% | 0.0% |      0 |",
    ]

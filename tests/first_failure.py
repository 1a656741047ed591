"""Find a broken core early, and print the first failure at once."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest


def deal_core(tests: Sequence[tuple[Path, float]], core: float, workers: int) -> list[int]:
    """Return an order in which each worker begins with a share of the files of the core.

    xdist divides the tests into as many runs of equal length as it has workers.

    Args:
        tests: the file and the height of each test.
        core: the height of the core's highest layer.
        workers: number of workers.

    Returns:
        The indices of the tests: lowest layers first within each worker's run.
    """
    order = sorted(range(len(tests)), key=lambda test: tests[test][1])
    files = dict.fromkeys(tests[test][0] for test in order if tests[test][1] <= core)
    worker_of = {file: number % workers for number, file in enumerate(files)}
    others = deque(test for test in order if tests[test][0] not in worker_of)
    dealt: list[int] = []
    for worker in range(workers):
        dealt += [test for test in order if worker_of.get(tests[test][0]) == worker]
        end = len(tests) * (worker + 1) // workers
        dealt += [others.popleft() for _ in range(min(end - len(dealt), len(others)))]
    return dealt


class FirstFailure:
    """A pytest plugin that prints the first failed test with its traceback, and no other one."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter
        self.is_printed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each phase of each test, with xdist in the process that starts the workers."""
        if report.failed and not self.is_printed:
            self.is_printed = True
            self.reporter.write_line("")  # ends the line of dots
            self.reporter.write_sep("_", f"first failure: {report.nodeid}")
            self.reporter.write_line(report.longreprtext)

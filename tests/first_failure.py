"""Print the first failure at once: pytest prints tracebacks after the last test."""

import pytest


class FirstFailure:
    """A pytest plugin that prints the first failed test with its traceback, and no other one."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter
        self.is_printed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each phase of each test, with xdist in the process that starts the workers."""
        if report.failed and not self.is_printed:
            self.is_printed = True
            self.reporter.write_sep("_", f"first failure: {report.nodeid}")
            self.reporter.write_line(report.longreprtext)

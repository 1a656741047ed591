"""The first failure is printed at once, and the others in pytest's summary alone."""

from types import SimpleNamespace

from first_failure import FirstFailure


def test_the_first_failure_is_printed_once() -> None:
    printed: list[str] = []
    reporter = SimpleNamespace(
        write_sep=lambda sep, title: printed.append(title), write_line=printed.append
    )
    plugin = FirstFailure(reporter)
    for name, failed in (("a", False), ("b", True), ("c", True)):
        text = f"traceback of {name}"
        plugin.pytest_runtest_logreport(
            SimpleNamespace(failed=failed, nodeid=name, longreprtext=text)
        )
    assert printed == ["first failure: b", "traceback of b"]


def test_the_suite_uses_it(pytestconfig) -> None:
    """In the process with a terminal: a worker of xdist has none."""
    is_worker = hasattr(pytestconfig, "workerinput")
    assert pytestconfig.pluginmanager.has_plugin("first_failure") != is_worker

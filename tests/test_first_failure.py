"""A broken core fails early, and the first failure is printed at once."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from first_failure import FirstFailure, deal_core
from hypothesis import given
from hypothesis import strategies as st


def test_each_worker_begins_with_a_share_of_the_core() -> None:
    heights = {"x": 5, "y": 9, "a": 1, "b": 2, "c": 0}
    tests = [(Path(name), heights[name]) for name in "xxxyyabbc"]
    runs = ("cxx", "axy", "bby")  # of three workers
    assert "".join(str(tests[test][0]) for test in deal_core(tests, 2, workers=3)) == "".join(runs)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=20),
    st.integers(-1, 10),
    st.integers(1, 4),
)
def test_all_tests_are_dealt_and_those_of_a_core_file_follow_each_other(
    files: list[tuple[int, int]], core: int, workers: int
) -> None:
    tests = [
        (Path(str(name)), height)
        for name, (height, count) in enumerate(files)
        for _ in range(count)
    ]
    order = deal_core(tests, core, workers)
    assert sorted(order) == [*range(len(tests))]
    dealt = [tests[test] for test in order]
    runs = [test for test, _ in itertools.groupby(dealt) if test[1] <= core]
    assert len(runs) == len(set(runs))
    others = [height for _, height in dealt if height > core]
    assert others == sorted(others)


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
    assert printed == ["", "first failure: b", "traceback of b"]


def test_the_suite_uses_it(pytestconfig: pytest.Config) -> None:
    """In the process that reports: a worker of xdist does not."""
    is_worker = hasattr(pytestconfig, "workerinput")
    assert pytestconfig.pluginmanager.has_plugin("first_failure") != is_worker

"""The tables of methods have every method, so that no method escapes the tests of the tables."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import test_algorithm_stages
import test_any_aggregator
import test_mean_metrics
from method_problem import PARTICIPANTS, Method
from method_table import METHODS

from fedpax import algorithms

FUNCTIONS = {
    name: function
    for name in algorithms.__all__
    if inspect.isfunction(function := getattr(algorithms, name))
    and "FederatedAlgorithm" in str(inspect.signature(function).return_annotation)
}


def method_of(build: Callable[[], Any]) -> str:
    """Return the method of a row of a table: the first function of `FUNCTIONS` that it calls."""
    names = {inspect.unwrap(function).__code__: name for name, function in FUNCTIONS.items()}
    called = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in names:
            called.append(names[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        build()
    finally:
        sys.setprofile(before)
    return called[0]


def referred(methods: Iterable[Method]) -> set[str]:
    """Return the methods of rows of the table with references."""
    builds = [functools.partial(m.build, PARTICIPANTS, m.rates) for m in methods]
    return {method_of(build) for build in builds}


def with_aggregator() -> set[str]:
    """Return the methods of the table of `test_any_aggregator`."""
    return {method_of(build) for build in test_any_aggregator.METHODS.values()}


def test_the_method_of_a_row_is_the_one_that_it_names() -> None:
    rows = test_any_aggregator.METHODS
    assert method_of(rows["fedprox"]) == "fedprox"  # which calls `fedavg`
    assert method_of(rows["self-tuning"]) == "self_tuning"  # also of `fedavg`


def test_the_table_with_references_has_every_method() -> None:
    exceptions = {
        "fedasync": "its server has no cohort: test_fedbuff has its reference",
        "self_tuning": "it makes another method: test_self_tuning has its reference",
    }
    assert referred(METHODS.values()) | set(exceptions) == set(FUNCTIONS)


def test_the_table_of_aggregators_has_every_method_that_takes_one() -> None:
    taking = {n for n, f in FUNCTIONS.items() if "aggregator" in inspect.signature(f).parameters}
    asynchronous = {  # their rows of `test_mean_metrics` take a loss function too
        method_of(functools.partial(build, test_mean_metrics.loss_fn))
        for build in test_mean_metrics.ASYNCHRONOUS.values()
    }
    assert with_aggregator() | asynchronous == taking | {"self_tuning"}


def test_every_method_is_compared_with_its_stages_or_refused() -> None:
    tables = (test_algorithm_stages.OTHERS, test_algorithm_stages.OTHERS_REFUSED)
    compared = {name for table in tables for name in table}
    rest = [method for name, method in METHODS.items() if name not in compared]
    assert referred(rest) <= with_aggregator()

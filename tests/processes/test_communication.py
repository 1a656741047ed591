"""The exchange of small values, between threads that stand for processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from jax.experimental import multihost_utils

from fedpax.processes.communication import all_agree, gather_json


@pytest.mark.parametrize("size", [0, 1, 4094, 4095, 5000, 100_000])
def test_a_value_of_any_size_comes_back(size: int) -> None:
    value = {"text": "ä" * (size // 2), "numbers": [1.5, None, True]}
    assert gather_json(value) == [value]
    assert gather_json("x" * size) == ["x" * size]


@pytest.mark.parametrize(
    ("sizes", "collectives"), [((3, 0, 4000), 1), ((9000, 0, 4095), 2), ((4094, 4095, 1), 2)]
)
def test_processes_get_the_values_of_all(
    sizes: tuple[int, ...], collectives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(sizes)
    barrier, own = threading.Barrier(count, timeout=20), threading.local()
    rows: list[Any] = [None] * count
    calls: list[int] = []

    def allgather(row: np.ndarray) -> np.ndarray:
        rows[own.number] = row
        calls.append(own.number)
        barrier.wait()
        gathered = np.stack(rows)  # fails if the processes' shapes differ
        barrier.wait()
        return gathered

    monkeypatch.setattr(multihost_utils, "process_allgather", allgather)

    def run(number: int) -> list[Any]:
        own.number = number
        return gather_json({str(number): "x" * sizes[number]})

    with ThreadPoolExecutor(count) as threads:
        result = list(threads.map(run, range(count)))
    assert result == [[{str(i): "x" * size} for i, size in enumerate(sizes)]] * count
    assert len(calls) == count * collectives


def test_one_process_agrees_with_itself():
    assert all_agree(True) and not all_agree(False)

import json
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from fedpax.training.metrics import FILE, MetricsWriter, read_metrics, select


def write_rounds(folder: Path, first: int, last: int, **writer: object) -> None:
    with MetricsWriter(folder, **writer) as metrics:
        if not metrics.kept:
            metrics.write("run", 0, {"parameters": 3})
        for number in range(first, last + 1):
            metrics.write("training", number, {"loss": 1 / number})
            if number % 2 == 0:
                metrics.write("evaluation", number, {"loss": 2 / number})
        metrics.sync()


def test_lines_and_kinds(tmp_path: Path) -> None:
    write_rounds(tmp_path, 1, 3)
    lines = read_metrics(tmp_path)
    assert lines == [
        {"kind": "run", "round": 0, "parameters": 3},
        {"kind": "training", "round": 1, "loss": 1.0},
        {"kind": "training", "round": 2, "loss": 0.5},
        {"kind": "evaluation", "round": 2, "loss": 1.0},
        {"kind": "training", "round": 3, "loss": 1 / 3},
    ]
    assert select(lines, "evaluation") == [lines[3]]


@pytest.mark.parametrize("after", [2, 3, 4])
def test_a_resumed_file_equals_an_unbroken_one(tmp_path: Path, after: int) -> None:
    write_rounds(tmp_path / "unbroken", 1, 6)
    write_rounds(tmp_path / "resumed", 1, 5)
    write_rounds(tmp_path / "resumed", after + 1, 6, after=after)
    unbroken, resumed = (tmp_path / name / FILE for name in ("unbroken", "resumed"))
    assert unbroken.read_bytes() == resumed.read_bytes()


def test_a_kill_at_any_byte_of_the_file_is_survived(tmp_path: Path) -> None:
    write_rounds(tmp_path / "unbroken", 1, 6)
    whole = (tmp_path / "unbroken" / FILE).read_bytes()
    kept_by_checkpoint = whole.index(b'"round": 3')  # round 2 was saved before round 3 began
    random = np.random.default_rng(0)
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        cut = int(random.integers(kept_by_checkpoint, len(whole)))
        (folder / FILE).write_bytes(whole[:cut])
        write_rounds(folder, 3, 6, after=2)
        assert (folder / FILE).read_bytes() == whole


def test_a_fresh_run_leaves_no_line_of_one_that_saved_nothing(tmp_path: Path) -> None:
    write_rounds(tmp_path, 1, 3)
    write_rounds(tmp_path, 1, 1, after=0)
    assert [line["round"] for line in read_metrics(tmp_path)] == [0, 1]


def test_numbers_that_are_not_finite_stay_json(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write("training", 1, {"loss": float("nan"), "norm": float("inf"), "ok": 1.5})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = json.loads((tmp_path / FILE).read_text(), parse_constant=refuse)
    assert line == {"kind": "training", "round": 1, "loss": None, "norm": None, "ok": 1.5}


def test_a_process_that_does_not_write_leaves_the_folder_alone(tmp_path: Path) -> None:
    write_rounds(tmp_path, 1, 2, writes=False)
    assert list(tmp_path.iterdir()) == []


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """Reads TensorBoard's own format: length, checksum, event, checksum."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            data = data[16 + length :]
    return found


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    write_rounds(tmp_path, 1, 2)
    assert scalars(tmp_path) == [
        ("run/parameters", 0, 3.0),
        ("training/loss", 1, 1.0),
        ("training/loss", 2, 0.5),
        ("evaluation/loss", 2, 1.0),
    ]

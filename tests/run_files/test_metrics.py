import json
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from fedpax.errors import ConfigurationError
from fedpax.run_files.metrics import (
    MetricsWriter,
    describe_damage,
    read_metrics,
    select,
    with_quantiles,
)
from fedpax.run_files.paths import METRICS

SIZES = {"num_parameters": 3, "num_participants": 1, "item_unit": "tokens", "items_per_round": 8}


def write_rounds(folder: Path, first: int, last: int, **writer: object) -> None:
    with MetricsWriter(folder, **writer) as metrics:
        metrics.write_sizes(**SIZES)
        for number in range(first, last + 1):
            metrics.write("training", number, {"loss": 1 / number})
            if number % 2 == 0:
                metrics.write("evaluation", number, {"loss": 2 / number})
        metrics.sync()


def test_lines_are_read_back_with_their_kinds(tmp_path: Path) -> None:
    write_rounds(tmp_path, 1, 3)
    lines = read_metrics(tmp_path)
    assert lines == [
        {"kind": "run", "round": 0, **SIZES},
        {"kind": "training", "round": 1, "loss": 1.0},
        {"kind": "training", "round": 2, "loss": 0.5},
        {"kind": "evaluation", "round": 2, "loss": 1.0},
        {"kind": "training", "round": 3, "loss": 1 / 3},
    ]
    assert select(lines, "evaluation") == [lines[3]]


@pytest.mark.parametrize("after", [2, 3, 4])
def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path: Path, after: int) -> None:
    write_rounds(tmp_path / "uninterrupted", 1, 6)
    write_rounds(tmp_path / "resumed", 1, 5)
    write_rounds(tmp_path / "resumed", after + 1, 6, after=after)
    uninterrupted, resumed = (tmp_path / name / METRICS for name in ("uninterrupted", "resumed"))
    assert uninterrupted.read_bytes() == resumed.read_bytes()


def test_a_file_cut_at_any_byte_is_completed_on_resume(tmp_path: Path) -> None:
    write_rounds(tmp_path / "uninterrupted", 1, 6)
    whole = (tmp_path / "uninterrupted" / METRICS).read_bytes()
    kept_by_checkpoint = whole.index(b'"round": 3')  # the checkpoint of round 2 was saved before
    random = np.random.default_rng(0)
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        cut = int(random.integers(kept_by_checkpoint, len(whole)))
        (folder / METRICS).write_bytes(whole[:cut])
        write_rounds(folder, 3, 6, after=2)
        assert (folder / METRICS).read_bytes() == whole


def test_a_new_run_drops_the_lines_of_a_run_without_checkpoint(tmp_path: Path) -> None:
    write_rounds(tmp_path, 1, 3)
    write_rounds(tmp_path, 1, 1, after=0)
    assert [line["round"] for line in read_metrics(tmp_path)] == [0, 1]


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write("training", 1, {"loss": float("nan"), "norm": float("inf"), "ok": 1.5})

    def fail(constant: str) -> None:
        raise AssertionError(constant)

    line = json.loads((tmp_path / METRICS).read_text(), parse_constant=fail)
    assert line == {"kind": "training", "round": 1, "loss": None, "norm": None, "ok": 1.5}


def test_a_disabled_writer_writes_nothing(tmp_path: Path) -> None:
    write_rounds(tmp_path, 1, 2, enabled=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        b'{"kind": "trai\x00ning", "round": 2',
        b"",
        b"3",
        b'{"kind": "training"}',
        b'{"kind": 3, "round": 2}',
        b'{"kind": "training", "round": 2, "loss": "2.5"}',
        b"\xff",
    ],
)
def test_a_damaged_line_loses_no_other_line(
    tmp_path: Path, damage: bytes, capsys: pytest.CaptureFixture
) -> None:
    write_rounds(tmp_path / "whole", 1, 6)
    write_rounds(tmp_path / "damaged", 1, 5)
    path = tmp_path / "damaged" / METRICS
    lines = path.read_bytes().split(b"\n")
    assert json.loads(lines[2])["round"] == 2
    lines[2] = damage
    path.write_bytes(b"\n".join(lines))
    write_rounds(tmp_path / "damaged", 6, 6, after=5)
    expected = read_metrics(tmp_path / "whole")
    assert read_metrics(tmp_path / "damaged") == expected[:2] + expected[3:]
    assert "line 3 cannot be read" in capsys.readouterr().err


def test_the_line_of_sizes_is_written_again_where_it_was_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_rounds(tmp_path / "whole", 1, 6)
    write_rounds(tmp_path / "damaged", 1, 5)
    path = tmp_path / "damaged" / METRICS
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first[:20] + b"\n", b"[]\n", *others]))
    write_rounds(tmp_path / "damaged", 6, 6, after=5)
    assert "lines 1, 2 cannot be read" in capsys.readouterr().err
    assert path.read_bytes() == (tmp_path / "whole" / METRICS).read_bytes()


def test_a_folder_in_place_of_the_file_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / METRICS).mkdir()
    for read in (read_metrics, MetricsWriter):
        with pytest.raises(ConfigurationError, match=r"Is a directory.*Move it away to train"):
            read(tmp_path)


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """Read TensorBoard's format: length, checksum, event, checksum."""
    collected = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            collected += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            data = data[16 + length :]
    return collected


def test_tensorboard_files_hold_the_same_numbers(tmp_path: Path) -> None:
    write_rounds(tmp_path, 1, 2)
    assert scalars(tmp_path) == [
        ("run/num_parameters", 0, 3.0),
        ("run/num_participants", 0, 1.0),
        ("run/items_per_round", 0, 8.0),
        ("training/loss", 1, 1.0),
        ("training/loss", 2, 0.5),
        ("evaluation/loss", 2, 1.0),
    ]


def test_a_run_line_whose_unit_is_no_text_is_damaged(tmp_path: Path) -> None:
    line = {"kind": "run", "round": 0, "item_unit": 3, "parameters": 5}
    (tmp_path / METRICS).write_text(json.dumps(line) + "\n")
    assert read_metrics(tmp_path) == []
    assert describe_damage(tmp_path, 0) == [
        f"{tmp_path / METRICS}: line 1 cannot be read and is left out."
    ]


def test_vectors_have_quantiles_of_what_is_finite() -> None:
    values = {"loss": 0.5, "accuracy": np.array([0.1, 0.3, np.nan, 0.8])}
    quantiles = {"accuracy/p10": 0.14, "accuracy/p50": 0.3, "accuracy/p90": 0.7}
    assert with_quantiles(values) == pytest.approx({"loss": 0.5, **quantiles})

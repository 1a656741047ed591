"""The harness of the benchmarks: options, the table, JSON, pictures and the exit status."""

import functools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, Timed, command, option
from fedpax.experiments.benchmarks.workloads import Sizes


class Plain(Timed):
    sizes: list[int] = option("2,8", "sizes", harness.integers)
    limit: int | None = option(None, "the largest size", int)
    repetitions: int = option(5, "timed calls of each", least=1)
    columns = "size {size:4} | median s {seconds:.1f} | ratio {ratio:.2f} | memory {memory:bytes}"
    bar = "at most the limit"

    def measure(self) -> Iterator[Row]:
        for size in self.sizes:
            seconds = [float(size)] * self.repetitions + [100.0, 0.0]
            met = self.limit is None or size <= self.limit
            yield Row(
                size=size,
                seconds=seconds,
                ratio=None,
                memory=2e6 * size,
                met=met,
                _figure=object(),
            )


class Drawing(Plain):
    columns = ""

    def summary(self, rows: list[Row]) -> str:
        return f"{len(rows)} rows"

    def draw(self, rows: list[Row]) -> Figure:
        axes = harness.panels({"xlabel": "row"}, size=(3, 2))
        axes[0].plot([row.size for row in rows], label="sizes")
        return harness.figure_of(axes)


class Sorted(Plain):
    def order(self, row: Row) -> int:
        return -row.size


plain, drawing = command(Plain), command(Drawing)


def test_rows_are_a_markdown_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = plain.run(["--sizes=3,1", "--repetitions=3"])
    head, rule, *table, empty, bar, content = capsys.readouterr().out.splitlines()
    assert head.split() == "| size | median s | ratio | memory |".split()
    assert rule.startswith("|---") and len({len(line) for line in (head, rule, *table)}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells == [["3", "3.0", "-", "6.0 MB"], ["1", "1.0", "-", "2.0 MB"]]
    assert (empty, bar) == ("", "Bar (at most the limit): met.")
    result = json.loads(content)
    assert result["settings"]["sizes"] == [3, 1] and result["settings"]["clock"] == "wall"
    assert [row["seconds"] for row in result["rows"]] == [row.seconds for row in rows]
    assert all("_figure" not in row for row in result["rows"])


def test_a_benchmark_with_an_order_prints_its_rows_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(Sorted).run(["--sizes=3,10,1"])
    _, _, *table = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert [line.strip("| ").split()[0] for line in table] == ["10", "3", "1"]


def test_a_pivot_has_a_line_and_a_column_for_each_value() -> None:
    rows = [Row(site=s, guard=g, loss=k) for k, (s, g) in enumerate(["ax", "ay", "bx", "by"])]
    lines = harness.pivot(rows, "site", "guard", "{loss:.1f}", "sites").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["sites", "x", "y"]
    assert cells[2:] == [["a", "0.0", "1.0"], ["b", "2.0", "3.0"]]


def test_rounds_are_timed_in_turn_and_paired_with_their_baselines() -> None:
    calls: list[str] = []
    rounds = {
        name: timing.Compiled(None, functools.partial(calls.append, name), 0.0, size)
        for name, size in (("a", 5), ("b", 6), ("c", 7))
    }
    rows = Plain(repetitions=2).compare(rounds, {"a": "a", "b": "a", "c": "b"})
    assert [(row.name, row.baseline, row.temporary_bytes) for row in rows] == [
        ("a", "a", 5),
        ("b", "a", 6),
        ("c", "b", 7),
    ]
    assert len(calls) == 3 * 3 and rows[0].ratio == 1  # a warm-up, and two repetitions
    assert rows[2].ratio == timing.paired_ratio(rows[2].seconds, rows[1].seconds)


def test_a_row_that_misses_the_bar_gives_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert plain(["--limit=8"]) == 0 and plain(["--limit=7"]) == 1
    assert "Bar (at most the limit): missed by 8, 8.0." in capsys.readouterr().out


@pytest.mark.parametrize("name", ["--plot", "--out"])
def test_a_benchmark_with_a_picture_writes_json_only_to_a_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, file = tmp_path / "new" / "picture.png", tmp_path / "rows.json"
    assert drawing([f"{name}={picture}", f"--json={file}"]) == 0
    assert capsys.readouterr().out.splitlines() == ["2 rows", str(picture)]
    assert picture.read_bytes()[1:4] == b"PNG"
    assert [row["size"] for row in json.loads(file.read_text())["rows"]] == [2, 8]
    drawing([])
    assert capsys.readouterr().out == "2 rows\n"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--sizes=a", "argument --sizes: 'a', expected integers of at least 1"),
        ("--repetitions=0", "--repetitions is 0, expected at least 1"),
        ("--clock=sun", "invalid choice: 'sun'"),
    ],
)
def test_wrong_options_are_usage_errors(
    argument: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        plain([argument])
    assert error.value.code == 2 and words in capsys.readouterr().err


def test_help_has_the_description_and_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drawing(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "The harness of the benchmarks" in text
        and "sizes; default 2,8" in text
        and "--out FILE" in text
    )


def test_unknown_names_are_told_with_the_known_ones() -> None:
    class Chosen(Plain):
        names: list[str] | None = harness.some(",", lambda own: [f"of {own.limit}", "b"])

    assert Chosen().names is None
    assert Chosen(limit=3, names=["of 3"]).names == ["of 3"]
    with pytest.raises(ValueError, match=r"unknown names \['of 4'\]; choose from of 3, b"):
        Chosen(limit=3, names=["of 4"])
    with pytest.raises(ValueError, match=r"unknown methods \['c'\]; choose from a, b"):
        harness.check_names("methods", ["c", "a"], ["a", "b"])
    with pytest.raises(ValueError, match=r"choose from a \(1, 2\); b"):
        harness.check_names("methods", ["c"], ["a (1, 2)", "b"])


def test_the_smallest_of_several_numbers_is_checked() -> None:
    class AtLeast(Plain):
        sizes: list[int] = option("2,8", "sizes", harness.integers, least=2)

    assert AtLeast(sizes=[3, 2]).sizes == [3, 2]
    with pytest.raises(ValueError, match="--sizes is 1, expected at least 2"):
        AtLeast(sizes=[3, 1])


def test_a_process_of_python_is_timed_and_its_output_is_returned() -> None:
    seconds, cpu_seconds, output = timing.run_python("-c", "print(sum(range(10**6)))")
    assert output == "499999500000\n" and 0 < cpu_seconds and 0 < seconds
    with pytest.raises(subprocess.CalledProcessError):
        timing.run_python("-c", "raise SystemExit(3)")


def test_a_benchmark_without_its_measurement_cannot_be_made() -> None:
    class Empty(Benchmark):
        pass

    class Unmeasured(Sizes):
        pass

    for benchmark, name in ((Empty, "measure"), (Unmeasured, "measure_size")):
        with pytest.raises(TypeError, match=rf"abstract .*\b{name}\b"):
            benchmark()

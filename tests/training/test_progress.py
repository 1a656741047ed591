import io
import re
import sys
import types

import jax
import pytest
from tqdm.utils import disp_len

from fedpax.training import progress as progress_module
from fedpax.training.progress import Progress, describe_devices, format_metrics


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("diloco", rounds_done=1, rounds=4, item_unit="tokens") as progress:
        progress.show_round(2, loss=1.25, items_per_second=12345.6)
        progress.show_evaluation(2, {"loss": 1.5})
        progress.show_round(3, loss=1.125, items_per_second=54321.0)
        progress.show_round(4, loss=1.0, items_per_second=54321.0)
    text = sys.stderr.getvalue()
    assert "4/4" in text and "diloco" in text
    assert "loss 1.0000, 54,321 tokens/s, held-out 1.5000" in text


def test_a_notebook_shows_the_bar_of_tqdm_auto(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real kernel is in `tests/test_notebooks.py`."""
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    kernel = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    with Progress("diloco", rounds_done=1, rounds=3) as progress:
        progress.show_round(2, loss=1.25, items_per_second=10.0)
        progress.show_evaluation(2, {"loss": 1.5})
        progress.show_round(3, loss=1.125, items_per_second=10.0)
    last = capsys.readouterr().err.split("\r")[-1]
    assert re.search(r"diloco: 100%\|.*3/3 \[.*loss 1.1250, 10 examples/s, held-out 1.5000\]", last)


def test_a_log_gets_a_line_per_evaluation(capsys: pytest.CaptureFixture) -> None:
    with Progress("diloco", rounds_done=0, rounds=4) as progress:
        for number in (1, 2):
            progress.show_round(number, loss=1.25, items_per_second=10.0)
        progress.show_evaluation(2, {"accuracy": 0.25, "loss": 1.5})
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("diloco round 2/4: held-out loss 1.5000, accuracy 0.2500, ")
    assert line.endswith("00:00 left")


def test_lines_between_evaluations_are_at_least_seconds_apart(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))  # seconds, one more at every call
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", 5)
    with Progress("diloco", rounds_done=0, rounds=100) as progress:
        for number in range(1, 51):
            progress.show_round(number, loss=1.0, items_per_second=10.0)
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 10
    assert re.fullmatch(
        r"diloco round \d+/100: loss 1.0000, 10 examples/s, \d\d:\d\d left", lines[-1]
    )


def test_a_round_beyond_the_planned_ones_has_no_total_and_no_time_left(
    capsys: pytest.CaptureFixture,
) -> None:
    with Progress("island0", rounds_done=0, rounds=2) as progress:
        for number in (1, 2, 3):
            progress.show_round(number, loss=1.0, items_per_second=10.0)
        progress.show_evaluation(3, {"loss": 1.5})
    assert capsys.readouterr().err == "island0 round 3: held-out loss 1.5000\n"


def test_a_disabled_progress_prints_nothing(capsys: pytest.CaptureFixture) -> None:
    with Progress("diloco", rounds_done=0, rounds=2, enabled=False) as progress:
        progress.show_round(1, loss=1.0, items_per_second=1.0)
        progress.show_evaluation(1, {"loss": 1.0})
    assert capsys.readouterr().err == ""


def test_a_note_stands_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("digits", rounds_done=0, rounds=2) as progress:
        progress.note("compiling")
        progress.show_round(1, 0.5, 1000.0)
    assert "digits: compiling\n" in sys.stderr.getvalue()


@pytest.mark.parametrize("name", ["fedavg_digits", "日本語の実験" * 6])
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_bar_stays_on_one_line(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(name, rounds_done=0, rounds=1000) as progress:
        bar = progress._bar
        assert bar is not None
        bar.dynamic_ncols = lambda stream: (columns, 24)
        progress.show_evaluation(1, {"loss": 1.5})
        progress.show_round(1, loss=1.25, items_per_second=12345.6, mfu=0.1)
        line = str(bar)
    assert disp_len(line) < columns
    assert "1/1000" in line and "loss 1.2500" in line and "held-out 1.5000" in line
    assert ("examples/s" in line) == (columns == 200)


def test_devices_and_metrics_in_a_few_words() -> None:
    described = describe_devices(jax.make_mesh((1,), ("clients",)))
    assert re.fullmatch(r"1 .+ device", described)
    assert format_metrics({"accuracy": 0.75, "loss": 0.5}) == "loss 0.5000, accuracy 0.7500"

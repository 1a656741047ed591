"""The progress of a run: a bar on a terminal or in a notebook, plain lines in a log."""

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from jax.sharding import Mesh
from tqdm import TqdmWarning, tqdm
from tqdm.utils import disp_len, disp_trim

from fedpax.console import escape_controls, print_error
from fedpax.training.experiment import Experiment

SECONDS_BETWEEN_LINES = 10.0


# A terminal shows the first that it can show whole.
_LAYOUTS = (
    "{desc}: {percentage:3.0f}%|{bar}| {count} [{elapsed}<{remaining}, {rate_fmt}{values}]",
    "{desc}: {count} [{elapsed}<{remaining}{values}]",
    "{desc}: {count}{values}",
    "{desc}: {count}{brief}",
    "{count}{brief}",
)


class _Bar(tqdm):
    """A progress bar on one line of the terminal, whatever its width."""

    values = brief = ""  # the round's values, and the losses alone

    def show(self, text: str, brief: str) -> None:
        """Show the values of a round, which has completed."""
        self.values, self.brief = text, brief
        self.update()

    def status_printer(self, file: Any) -> Callable[[str], None]:
        """Return a function that overwrites the line of the terminal, which can be narrower now."""
        former = 0

        def overwrite(text: str) -> None:
            nonlocal former
            length = disp_len(text)
            rest = min(former, self._free_columns(self.format_dict)) - length
            file.write(f"\r{text}{' ' * rest}")
            file.flush()
            former = length

        return overwrite

    @staticmethod
    def _free_columns(state: Mapping[str, Any]) -> int:
        # Some terminals begin a new line once the last column is written.
        return int(state["ncols"] or 80) - 1

    def __str__(self) -> str:
        """Return the widest layout that leaves the terminal's last column free."""
        state = self.format_dict
        width = self._free_columns(state)
        count = f"{self.n}/{self.total}" if self.n <= self.total else f"{self.n}"
        texts = {"values": self.values, "brief": self.brief, "count": count}
        text = ""
        for layout in _LAYOUTS:
            for name, value in texts.items():
                layout = layout.replace(f"{{{name}}}", value)
            text = self.format_meter(**{**state, "ncols": None, "bar_format": layout})
            if disp_len(text) <= width:
                if "{bar}" in layout:
                    text = self.format_meter(**{**state, "ncols": width, "bar_format": layout})
                return text
        return disp_trim(text, width)


def _is_notebook() -> bool:
    """Return whether the process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def _notebook_bar(**settings: Any) -> Any:
    """Make a bar for a notebook: a widget if ipywidgets is installed, or else text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # about ipywidgets: text is good enough
        from tqdm.auto import tqdm as notebook_tqdm

    class NotebookBar(notebook_tqdm):
        """A progress bar with the round's values behind it."""

        def show(self, text: str, brief: str) -> None:
            """Show the values of a round, which has completed."""
            self.set_postfix_str(text.removeprefix(", "), refresh=False)
            self.update()

    return NotebookBar(**settings)


class Progress(AbstractContextManager["Progress"]):
    """A progress bar on stderr, or lines where it is neither a terminal nor a notebook."""

    def __init__(
        self,
        name: str,
        *,
        rounds_done: int,
        rounds: int,
        item_unit: str = "examples",
        enabled: bool = True,
    ) -> None:
        self._name = name
        self._rounds = rounds
        self._item_unit = item_unit
        self._clock: tuple[int, float] | None = None  # the first round shown, and its time
        self._last_line = time.perf_counter()
        self._enabled = enabled
        self._bar: Any = None
        if enabled and (sys.stderr.isatty() or _is_notebook()):
            make_bar = _Bar if sys.stderr.isatty() else _notebook_bar
            self._bar = make_bar(
                total=rounds,
                initial=rounds_done,
                desc=escape_controls(name),
                unit=" rounds",
                dynamic_ncols=True,
            )
        self._evaluation = ""

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            line = escape_controls(f"{self._name}: {text}", keep="\n\t")
            self._bar.write(line, file=sys.stderr)
        elif self._enabled:
            print_error(f"{self._name}: {text}")

    def set_rounds(self, rounds: int) -> None:
        """Change the number of rounds of the whole run."""
        self._rounds = rounds
        if self._bar is not None:
            self._bar.total = rounds
            self._bar.refresh()

    def restart(self, rounds_done: int, reason: str) -> None:
        """Continue from an earlier round."""
        self._clock = None
        if self._bar is not None:
            self._bar.n = rounds_done
            self._bar.refresh()
        self.note(reason)

    def show_round(
        self,
        number: int,
        loss: float | None,
        items_per_second: float,
        mfu: float | None = None,
    ) -> None:
        """Show a completed round; a site does not know its loss."""
        if self._clock is None:
            self._clock = (number, time.perf_counter())
        known = "" if loss is None else f"loss {loss:.4f}, "
        text = f"{known}{items_per_second:,.0f} {self._item_unit}/s"
        text += "" if mfu is None else f", MFU {mfu:.1%}"
        if self._bar is not None:
            brief = f", {known.rstrip(', ')}{self._evaluation}"
            self._bar.show(f", {text}{self._evaluation}", brief)
        elif time.perf_counter() - self._last_line > SECONDS_BETWEEN_LINES:
            self._print_line(number, f"{text}{self._time_left(number)}")

    def show_evaluation(self, number: int, values: Mapping[str, float], source: str = "") -> None:
        """Show the metrics on held-out data, and in `source` whose data these are."""
        self._evaluation = f", held-out {values['loss']:.4f}{source}"
        if self._bar is None:
            text = f"held-out {format_metrics(values)}{source}"
            self._print_line(number, f"{text}{self._time_left(number)}")

    def _print_line(self, number: int, text: str) -> None:
        if self._enabled:
            # An island that other islands wait for trains more rounds than planned.
            total = f"/{self._rounds}" if number <= self._rounds else ""
            print_error(f"{self._name} round {number}{total}: {text}")
        self._last_line = time.perf_counter()

    def _time_left(self, number: int) -> str:
        # Measured from the end of the first round, which excludes compilation.
        if self._clock is None or number <= self._clock[0] or number > self._rounds:
            return ""
        first, started = self._clock
        seconds = (time.perf_counter() - started) / (number - first) * (self._rounds - number)
        return f", {tqdm.format_interval(seconds)} left"

    def __exit__(self, *error: object) -> None:
        """Close the bar; its last state stays on the screen."""
        if self._bar is not None:
            self._bar.close()


def describe_devices(mesh: Mesh) -> str:
    """Describe a mesh's devices in a few words."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
    return (
        f"{mesh.size} {mesh.devices.flat[0].platform} device{'s' * (mesh.size != 1)}"
        f"{f', mesh {axes}' if axes else ''}"
    )


def format_metrics(values: Mapping[str, float]) -> str:
    """Format held-out metrics as one line, with the loss first."""
    loss_first = {"loss": values["loss"], **values}
    return ", ".join(f"{key} {value:.4f}" for key, value in loss_first.items())


def open_progress(
    experiment: Experiment,
    exp: str,
    done: int,
    island: str = "",
    *,
    item_unit: str = "examples",
    enabled: bool = True,
) -> Progress:
    """Return the progress of a run, by the names of the experiment and of an island."""
    name = exp or type(experiment).__name__
    return Progress(
        f"{name} {island}" if island else name,
        rounds_done=done,
        rounds=experiment.training.rounds,
        item_unit=item_unit,
        enabled=enabled,
    )

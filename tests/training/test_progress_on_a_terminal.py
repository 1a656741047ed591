"""The bar of a run on a real terminal: one line at every width, and while the width changes."""

import os
import sys

import pytest
from tqdm.utils import disp_len

from fedpax.training.progress import Progress

pytest.importorskip("fcntl", reason="Windows has no pseudo-terminals")
import fcntl
import struct
import termios


class Screen:
    """The rows of a terminal that wraps, as a user sees them; rows are not wrapped again."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self._begin_row()

    def _begin_row(self) -> None:
        self.rows.append("")
        self._cells, self.column = list[str](), 0

    def narrow(self, width: int) -> None:
        """Cut the last row, as xterm does."""
        while disp_len("".join(self._cells)) > width:
            self._cells.pop()
        self.rows[-1] = "".join(self._cells)

    def write(self, text: str, width: int) -> None:
        for character in text:
            if character == "\r":
                self.column = 0
            elif character == "\n":
                self._begin_row()
            elif character == "\x1b":
                pytest.fail(f"the bar moves the cursor: {text!r}")
            else:
                columns = disp_len(character)
                if self.column + columns > width:
                    self._begin_row()
                row = self._cells + [" "] * (self.column - len(self._cells))
                row[self.column : self.column + columns] = [character, ""][:columns]
                self._cells, self.column = row, self.column + columns
                self.rows[-1] = "".join(row)


class Terminal:
    """A pseudo-terminal, which is the stderr of a run's progress."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._master, self._slave = os.openpty()
        self.screen, self._width, self._round = Screen(), 0, 0
        self.resize(80)
        stderr = open(self._slave, "w", encoding="utf-8", closefd=False)
        monkeypatch.setattr(sys, "stderr", stderr)
        self.progress = Progress(name, rounds_done=0, rounds=1000, item_unit="tokens")
        self.progress._bar.mininterval = self.progress._bar.miniters = 0

    def resize(self, width: int) -> None:
        self._width = width
        self.screen.narrow(width)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    def show_round(self) -> None:
        self._round += 1
        self.progress.show_evaluation(self._round, {"loss": 1.5})
        self.progress.show_round(self._round, loss=1.25, items_per_second=12345.6, mfu=0.1)
        self.read()

    def note(self, text: str) -> None:
        self.progress.note(text)
        self.read()

    def read(self) -> None:
        """Read what has been written, up to a zero behind it."""
        os.write(self._slave, b"\0")
        content = b""
        while not content.endswith(b"\0"):
            content += os.read(self._master, 1 << 16)
        self.screen.write(content[:-1].decode(), self._width)

    def close(self) -> None:
        os.close(self._slave)
        os.close(self._master)


@pytest.mark.parametrize("name", ["fedavg_digits", "日本語の実験" * 3], ids=["narrow", "wide"])
def test_the_bar_stays_on_one_line_while_the_width_changes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(name, monkeypatch)
    screen, number = terminal.screen, 0
    with terminal.progress:
        for width in (80, 200, 120, 40, 61, 30, 132, 79, 20, 80):
            terminal.resize(width)
            for _ in range(2):
                number += 1
                terminal.show_round()
                assert len(screen.rows) == 1, (width, screen.rows)
                assert f"{number}/1000" in screen.rows[0]
                assert "1.2500" in screen.rows[0] or width < 30
        for notes, width in enumerate((200, 80, 120, 60), 1):
            terminal.resize(width)
            terminal.show_round()
            terminal.note("note x")
            terminal.show_round()
            assert len(screen.rows) == notes + 1 and "1.2500" in screen.rows[-1], screen.rows
            # The last column can keep a character of a wider bar: it is never written.
            assert ": note x  " in screen.rows[-2], screen.rows
    terminal.read()
    assert len(screen.rows) == 6 and screen.rows[-1] == "", screen.rows
    terminal.close()

"""The bar of a run on a real terminal: one line at every width, and while the width changes."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tqdm.utils import disp_len

pytest.importorskip("fcntl", reason="Windows has no pseudo-terminals")
import fcntl
import struct
import termios

# Shows a round, or a note, for each line of stdin.
CODE = """
import sys
from fedpax.training.progress import Progress
with Progress(sys.argv[1], rounds_done=0, rounds=1000, item_unit="tokens") as progress:
    progress._bar.mininterval = 0
    progress._bar.miniters = 0
    for number, line in enumerate(sys.stdin, 1):
        if line.startswith("note"):
            progress.note(line.strip())
        else:
            progress.show_evaluation(number, {"loss": 1.5})
            progress.show_round(number, loss=1.25, items_per_second=12345.6, mfu=0.1)
        print("shown", flush=True)
"""


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
    """A process whose stderr is a pseudo-terminal."""

    def __init__(self, name: str) -> None:
        self._master, slave = os.openpty()
        self.screen, self._width = Screen(), 0
        self.resize(80)
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=slave,
            text=True,
            env={**os.environ, "PYTHONUTF8": "1"},
        )
        os.close(slave)

    def resize(self, width: int) -> None:
        self._width = width
        self.screen.narrow(width)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    def send(self, line: str) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "shown\n", self.read()
        self.read()

    def read(self) -> str:
        content = b""
        while select.select([self._master], [], [], 0.05)[0]:
            try:
                content += os.read(self._master, 1 << 16)
            except OSError:  # Linux's answer once the process has closed its end
                break
        text = content.decode()
        self.screen.write(text, self._width)
        return text

    def close(self) -> str:
        """End the process, and return what it has printed on the way."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        return self.read()


@pytest.fixture(params=["fedavg_digits", "日本語の実験" * 3], ids=["narrow", "wide"])
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    terminal = Terminal(request.param)
    yield terminal
    terminal.process.kill()
    terminal.process.wait()


def test_the_bar_stays_on_one_line_while_the_width_changes(terminal: Terminal) -> None:
    screen, number = terminal.screen, 0
    for width in (80, 200, 120, 40, 61, 30, 132, 79, 20, 80):
        terminal.resize(width)
        for _ in range(2):
            number += 1
            terminal.send("round")
            assert len(screen.rows) == 1, (width, screen.rows)
            assert f"{number}/1000" in screen.rows[0]
            assert "1.2500" in screen.rows[0] or width < 30
    for notes, width in enumerate((200, 80, 120, 60), 1):
        terminal.resize(width)
        terminal.send("round")
        terminal.send("note x")
        terminal.send("round")
        assert len(screen.rows) == notes + 1 and "1.2500" in screen.rows[-1], screen.rows
        # The last column can keep a character of a wider bar: it is never written.
        assert ": note x  " in screen.rows[-2], screen.rows
    terminal.close()
    assert len(screen.rows) == 6 and screen.rows[-1] == "", screen.rows

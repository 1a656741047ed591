"""What a run measures: one JSON object a line in ``metrics.jsonl``, and TensorBoard scalars."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from fedpax.training.configuration import write_atomically

FILE = "metrics.jsonl"

TIMINGS = frozenset({"seconds", "tokens_per_second", "input_wait_fraction", "wall_seconds"})
"""The keys that differ between two runs of the same configuration; every other is repeated."""


def read_metrics(job_log_dir: str | Path) -> list[dict[str, Any]]:
    """Reads the lines of ``metrics.jsonl``.

    Each line has ``"kind"`` and ``"round"``. The kinds are ``run`` (the first line: parameters,
    participants), ``training`` (one a round) and ``evaluation``.

    Args:
        job_log_dir: a run's folder.

    Returns:
        The lines up to the first one that a kill left unfinished; none if there is no file.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with MetricsWriter(folder) as metrics:
        ...     metrics.write("training", 1, {"loss": 2.5})
        >>> read_metrics(folder)
        [{'kind': 'training', 'round': 1, 'loss': 2.5}]
    """
    path = Path(job_log_dir) / FILE
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for text in path.read_bytes().split(b"\n")[:-1]:  # what follows the last newline is a part
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def select(lines: Iterable[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """Returns the lines of one kind.

    Example:
        >>> select([{"kind": "run"}, {"kind": "training", "round": 1}], "training")
        [{'kind': 'training', 'round': 1}]
    """
    return [line for line in lines if line["kind"] == kind]


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Appends to ``metrics.jsonl`` and to TensorBoard's files; a context manager.

    Opened for a run that goes on after round ``r``, it first cuts every line of a later round, so
    that in the end the file equals that of an unbroken run apart from :data:`TIMINGS`.
    TensorBoard is told to hide the same rounds.

    Args:
        job_log_dir: the run's folder.
        after: the round of the checkpoint from which the run goes on; 0 for a fresh run.
        writes: whether this process writes at all; with several processes one of them does.

    Attributes:
        kept: the lines that were there and stay.
    """

    def __init__(self, job_log_dir: str | Path, *, after: int = 0, writes: bool = True) -> None:
        folder = Path(job_log_dir)
        # A line of round 0 describes the run; a fresh run writes its own.
        self.kept = [line for line in read_metrics(folder) if after > 0 and line["round"] <= after]
        self._writes = writes
        if not writes:
            return
        path = folder / FILE
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in self.kept))
        self._file = path.open("a")
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)

    def write(self, kind: str, round_number: int, values: Mapping[str, float]) -> None:
        """Writes one line, and each number as the TensorBoard scalar ``kind/name``.

        A value that is not finite is written as ``null``, which every JSON reader takes.

        Args:
            kind: ``"run"``, ``"training"`` or ``"evaluation"``.
            round_number: the round after which it was measured.
            values: numbers by name.
        """
        if not self._writes:
            return
        finite = {key: v if math.isfinite(v) else None for key, v in values.items()}
        self._file.write(json.dumps({"kind": kind, "round": round_number, **finite}) + "\n")
        self._file.flush()
        for key, value in values.items():
            self._tensorboard.add_scalar(f"{kind}/{key}", value, round_number)

    def sync(self) -> None:
        """Waits until the lines are on the disk: a checkpoint must never be ahead of them."""
        if self._writes:
            os.fsync(self._file.fileno())
            self._tensorboard.flush()

    def __exit__(self, *error: object) -> None:
        """Closes the files."""
        if self._writes:
            self._file.close()
            self._tensorboard.close()

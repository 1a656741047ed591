"""Agreement: check before a run that all its processes have equal settings and versions."""

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

import fedpax
from fedpax.clients.cohort_stream import CohortStream, fingerprint
from fedpax.errors import ConfigurationError
from fedpax.processes.gather import gather_json
from fedpax.run_files.configuration import flatten, to_json
from fedpax.run_files.paths import latest_round
from fedpax.training.experiment import Experiment
from fedpax.training.job_dir_lock import LOCK

SAME_COMMAND = (
    "Start every process with the same command and the same installation.",
    "Set a --job_log_dir on a file system that all hosts share.",
)
SAME_FILES = (
    "The processes divide the rows of one stream: each would leave out most of its own documents.",
    "Give all hosts the same files, in the folder that --data.data_dir names on each of them.",
)

SECONDS_UNTIL_VISIBLE = 10.0
"""Seconds that network file systems may take to show a file that another host has created."""


def check_agreement(folder: Path, experiment: Experiment, saved_in: Path | None = None) -> None:
    """Check that the processes have one experiment, one folder and one version of fedpax and JAX.

    If they differed, they would run different programs and wait for each other forever. With one
    process, nothing is checked. With a folder `saved_in` for checkpoints, each process can have a
    run's folder of its own.
    """
    if jax.process_count() == 1:
        return
    saved_in = folder if saved_in is None else saved_in
    settings = {
        "the version of fedpax": fedpax.__version__,
        "the version of jax": jax.__version__,
        **{f"--{path}": repr(value) for path, value in flatten(to_json(experiment))},
        f"the newest checkpoint in {saved_in}": f"round {latest_round(saved_in) or 0}",
    }
    if saved_in == folder:
        lock = folder / LOCK
        deadline = time.monotonic() + SECONDS_UNTIL_VISIBLE
        while not lock.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        settings["what process 0 writes into --job_log_dir"] = (
            "present" if lock.exists() else "missing"
        )
    everyone = gather_json({**settings, "host": socket.gethostname()})
    if difference := describe_difference(everyone):
        raise ConfigurationError(difference)


def check_same_data(cohorts: CohortStream) -> dict[str, str]:
    """Check that the processes have the same data; return its fingerprint."""
    # With other files under the same name, each process would leave out most of its documents. With
    # one process, nothing is compared.
    data_fingerprint = fingerprint(cohorts)
    if jax.process_count() > 1:
        everyone = gather_json(
            {f"the data set {name}": text for name, text in data_fingerprint.items()}
            | {"host": socket.gethostname()}
        )
        if difference := describe_difference(everyone, SAME_FILES):
            raise ConfigurationError(difference)
    return data_fingerprint


def describe_difference(
    everyone: list[Mapping[str, str]], remedies: Sequence[str] = SAME_COMMAND
) -> str | None:
    """Describe how processes differ from process 0."""
    first = everyone[0]
    lines = [
        f"  process {number} on {process['host']}: {name} is {process.get(name, 'missing')}, in "
        f"process 0 on {first['host']} it is {first.get(name, 'missing')}"
        for number, process in enumerate(everyone)
        for name in sorted(process.keys() | first.keys())
        if name != "host" and process.get(name) != first.get(name)
    ]
    if not lines:
        return None
    more = [f"  and {len(lines) - 10} more differences"] if len(lines) > 10 else []
    return "\n".join(
        [
            "The processes of the job differ, expected the same in all of them:",
            *lines[:10],
            *more,
            *remedies,
        ]
    )

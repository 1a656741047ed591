"""Check that the processes of a job agree: on settings, versions, data, program and state."""

import hashlib
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np

import fedpax
from fedpax.clients.cohort import CohortStream, fingerprint
from fedpax.console import count_of
from fedpax.errors import ConfigurationError
from fedpax.processes.communication import gather_json
from fedpax.run_files.configuration import flatten, to_json
from fedpax.run_files.paths import latest_round
from fedpax.training.experiment import Experiment
from fedpax.training.folder_owners import LOCK

SAME_COMMAND = (
    "Start every process with the same command, installation and environment variables.",
    "Set a --job_log_dir on a file system that all hosts share.",
)
SAME_CODE = (
    "Else they would wait forever, or train different models as one run.",
    "Give all hosts the same files of code, packages and environment variables.",
)
SAME_FILES = (
    "The processes divide the rows of one stream: each would leave out most of its own documents.",
    "Give all hosts the same files, in the folder that --data.data_dir names on each of them.",
)

VERSIONS = (fedpax, jax, np)

SETTINGS_OF_JAX = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_x64",
    "jax_legacy_prng_key",
    "jax_numpy_dtype_promotion",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)
"""JAX's settings that change programs or their results."""

SECONDS_UNTIL_VISIBLE = 10.0
"""Seconds that network file systems may take to show a file that another host has created."""


def check_agreement(folder: Path, experiment: Experiment, saved_in: Path | None = None) -> None:
    """Check that processes agree on experiment, folder and versions."""
    if jax.process_count() == 1:
        return
    saved_in = folder if saved_in is None else saved_in
    settings = {
        **{f"the version of {module.__name__}": module.__version__ for module in VERSIONS},
        **{name.upper(): str(getattr(jax.config, name)) for name in SETTINGS_OF_JAX},
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
    _check_same(settings, SAME_COMMAND)


def check_same_data(
    cohorts: CohortStream, heldout: Callable[[], Mapping[str, str]] | None = None
) -> dict[str, str]:
    """Check that the processes have the same data; return the fingerprint of the training data."""
    # With other files under the same name, each process would leave out most of its documents.
    data_fingerprint = fingerprint(cohorts)
    if jax.process_count() > 1:
        every = {} if heldout is None else {f"{k}, held out": text for k, text in heldout().items()}
        every |= data_fingerprint
        _check_same({f"the data set {name}": text for name, text in every.items()}, SAME_FILES)
    return data_fingerprint


def check_same_program(lowered: jax.stages.Lowered) -> None:
    """Check that the processes compile the same round, before they run it."""
    if jax.process_count() == 1:
        return
    # Callbacks are numbered or addressed in each process.
    lines = [line for line in lowered.as_text().splitlines() if "callback" not in line]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    _check_same({"the hash of the round's program": digest[:16]}, SAME_CODE)


def check_same_state(state: chex.ArrayTree, round_number: int) -> None:
    """Check that processes with replicas of the same values have the same bits."""
    if jax.process_count() == 1:
        return
    # Addressed by the devices that replicate a shard: one checksum of all shards that they share.
    checksums: dict[str, int] = {}
    for leaf in jax.tree.leaves(state):
        for devices, shard in _shards_in_several_processes(leaf):
            name = hashlib.sha256(repr(devices).encode()).hexdigest()[:16]
            data = np.ascontiguousarray(shard.data).tobytes()
            checksums[name] = zlib.crc32(data, checksums.get(name, 0))
    first: dict[str, tuple[int, int]] = {}  # the number of the first process that has a value
    for number, values in enumerate(gather_json(checksums)):
        for name, checksum in values.items():
            earlier, expected = first.setdefault(name, (number, checksum))
            if checksum != expected:
                raise ConfigurationError(
                    f"The state of round {round_number} differs between process {earlier} and "
                    f"process {number}, which hold replicas of the same values, expected equal "
                    f"bits. {' '.join(SAME_CODE)}"
                )


def _shards_in_several_processes(
    leaf: jax.Array,
) -> Iterator[tuple[list[int], jax.Shard]]:
    """Yield one local shard for each part of an array that other processes hold too."""
    array = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    holders: dict[str, list[jax.Device]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        holders.setdefault(str(index), []).append(device)
    for part, shard in {str(shard.index): shard for shard in array.addressable_shards}.items():
        if len({device.process_index for device in holders[part]}) > 1:
            yield sorted(device.id for device in holders[part]), shard


def _check_same(facts: Mapping[str, str], remedies: Sequence[str]) -> None:
    """Check that all processes have the same facts. A collective."""
    everyone = gather_json({**facts, "host": socket.gethostname()})
    if difference := describe_difference(everyone, remedies):
        raise ConfigurationError(difference)


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
    more = [f"  and {count_of(len(lines) - 10, 'more difference')}"] if len(lines) > 10 else []
    return "\n".join(
        [
            "The processes of the job differ, expected the same in all of them:",
            *lines[:10],
            *more,
            *remedies,
        ]
    )

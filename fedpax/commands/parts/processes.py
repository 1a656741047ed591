"""Join the processes of a job, of `fedpax train --multihost` or `fedpax join --multihost`."""

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import flags

from fedpax.commands.parts.devices import provide_devices
from fedpax.console import count_of, print_error
from fedpax.errors import FedpaxError, UsageError
from fedpax.processes.communication import ControlChannel, all_agree
from fedpax.processes.job_processes import (
    JobProcesses,
    JobProcessesError,
    call_roll,
    find_job_processes,
    wait_for_coordinator,
)
from fedpax.run_files.paths import folder_of_checkpoints, latest_round
from fedpax.training.experiment import Experiment

USAGE_ERROR = 2
PROCESS_ENDED = 75  # EX_TEMPFAIL of sysexits.h: the same command can succeed later
SECONDS_TO_LEAVE = 10.0
"""Seconds that process 0, after it failed, waits for the others to end too; they need it."""
LOST_PEER = re.compile("gloo|(closed|reset) by peer|ncclremoteerror|remote process", re.IGNORECASE)
"""Found in the errors of collectives whose other processes are gone."""


class LostProcessError(FedpaxError):
    """Another process of the job is gone."""

    exit_status = PROCESS_ENDED


def provide_processes(options: flags.FlagValues, experiment: Experiment) -> None:
    """Join the other processes with `--multihost`, and provide the devices of an experiment."""
    num_processes: int | None = 1
    if options.multihost:
        num_processes = join_processes(options.join_timeout, options.heartbeat_timeout)
    # Where only JAX knows the number of processes, it knows their devices too.
    try:
        if num_processes is not None:
            provide_devices(experiment.mesh, experiment.sharded_sizes(), num_processes)
    finally:  # a lost device can be the reason for which a mesh does not fit
        if options.multihost:
            _check_devices()
    if options.multihost and jax.default_backend() == "cpu":
        # JAX writes programs in process 0 alone, which would wait for the others' compilation of
        # their own programs longer than gloo does, 30 seconds.
        jax.config.update("jax_enable_compilation_cache", False)


def _check_devices() -> None:
    """Check that each process has as many devices as process 0: JAX's collectives need it."""
    counts = Counter(device.process_index for device in jax.devices())
    for number in range(jax.process_count()):
        if counts[number] != counts[0]:
            raise UsageError(
                f"--multihost: process {number} has {count_of(counts[number], 'device')}, process "
                f"0 has {counts[0]}, expected the same number in all processes. Give each process "
                "the same number (CUDA_VISIBLE_DEVICES, JAX_LOCAL_DEVICE_IDS, "
                "JAX_NUM_CPU_DEVICES), or leave out a host that has lost a device."
            )


def join_processes(timeout: float, heartbeat_timeout: int) -> int | None:
    """Join the processes that train together; return their number, None if JAX knows it alone."""
    if timeout <= 0:
        raise UsageError(
            f"--join_timeout={timeout:g}: expected a positive number of seconds, such as 300."
        )
    # Collectives between CPU processes need gloo; other devices bring their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        processes = find_job_processes()
        if processes is not None:
            call_roll(processes, timeout)
            wait_for_coordinator(processes, timeout)
    except JobProcessesError as error:
        raise UsageError(f"--multihost: {error}") from None
    with _exit_after(timeout):
        _initialize(processes, timeout, heartbeat_timeout)
    return processes and processes.num_processes


def _initialize(processes: JobProcesses | None, timeout: float, heartbeat_timeout: int) -> None:
    # JAX's own timeout, which names no remedy, comes later.
    initialization_timeout = int(timeout) + 60
    try:
        if processes is None:
            jax.distributed.initialize(
                initialization_timeout=initialization_timeout,
                heartbeat_timeout_seconds=heartbeat_timeout,
            )
            return
        # JAX still reads from Slurm which GPU belongs to the process. In Kubernetes it would ask
        # for a package that finds no more than the variables say.
        kubernetes = "KUBERNETES_SERVICE_HOST" in os.environ
        jax.distributed.initialize(
            processes.coordinator,
            processes.num_processes,
            processes.process_id,
            cluster_detection_method="deactivate" if kubernetes else None,
            initialization_timeout=initialization_timeout,
            heartbeat_timeout_seconds=heartbeat_timeout,
        )
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"--multihost found no other processes ({error}), expected the processes of a TPU pod, "
            "a Slurm step (srun) or the environment. Elsewhere set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID. "
            "docs/several_hosts.md has a script for each."
        ) from None


@contextlib.contextmanager
def _exit_after(timeout: float) -> Iterator[None]:
    """Exit with a message if the block takes longer: JAX cannot be interrupted."""

    def stop() -> None:
        print_error(
            f"fedpax: --multihost: the other processes did not come within {timeout:g} s. Read "
            "their logs; all of them need the same command. If they start later, raise "
            "--join_timeout."
        )
        os._exit(USAGE_ERROR)

    timer = threading.Timer(timeout, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def leave_on_failure() -> Iterator[None]:
    """End this process soon after an error, even if the other processes continue."""
    # At exit JAX would wait five minutes for the other processes, which wait for this one in the
    # next collective. Without that they notice its end and stop.
    try:
        yield
    except BaseException:
        if jax.distributed.is_initialized():
            seconds = SECONDS_TO_LEAVE if jax.process_index() == 0 else SECONDS_TO_LEAVE / 2
            timer = threading.Timer(seconds, os._exit, [1])
            timer.daemon = True
            timer.start()
        raise


@contextlib.contextmanager
def end_together(folder: Path, checkpoint_dir: str | None, silence: float) -> Iterator[None]:
    """End this process, and tell why, if another one of the job fails, ends or is silent."""
    if jax.process_count() == 1:
        yield
        return
    is_open = False

    def describe(reason: str) -> str:
        kept = 0
        with contextlib.suppress(Exception):  # the bucket is away
            kept = latest_round(folder_of_checkpoints(folder, checkpoint_dir)) or 0
        return (
            f"{reason}. Without it the job cannot train. Start all processes again: the run "
            f"resumes from {f'its checkpoint of round {kept}' if kept else 'its beginning'}."
        )

    def end(reason: str) -> None:
        if is_open:
            print_error(f"fedpax: {describe(reason)}")
            os._exit(PROCESS_ENDED)  # the main thread may wait for the devices forever

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(ControlChannel(end, silence))
        except JobProcessesError as error:
            print_error(f"fedpax: {error} Until then, JAX alone notices the end of a process.")
            all_agree(False)
        else:
            is_open = all_agree(True)
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if not LOST_PEER.search(str(error)):
                raise
            time.sleep(SECONDS_TO_LEAVE)  # the channel tells more, and ends this process
            reason = str(error).partition("\n")[0]
            raise LostProcessError(describe(f"a process of the job is gone ({reason})")) from error

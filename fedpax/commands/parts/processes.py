"""Join the processes of a job, of `fedpax train --multihost` or `fedpax join --multihost`."""

import contextlib
import os
import threading
from collections.abc import Iterator

import jax
from absl import flags

from fedpax.commands.parts.devices import provide_devices
from fedpax.console import print_error
from fedpax.errors import UsageError
from fedpax.processes.job_processes import (
    JobProcesses,
    JobProcessesError,
    call_roll,
    find_job_processes,
    wait_for_coordinator,
)
from fedpax.training.experiment import Experiment

USAGE_ERROR = 2
SECONDS_TO_LEAVE = 10.0
"""Seconds that a process that failed waits for the others to end too."""


def provide_processes(options: flags.FlagValues, experiment: Experiment) -> None:
    """Join the other processes with `--multihost`, and provide the devices of an experiment."""
    num_processes: int | None = 1
    if options.multihost:
        num_processes = join_processes(options.join_timeout, options.heartbeat_timeout)
    # Where only JAX knows the number of processes, it knows their devices too.
    if num_processes is not None:
        provide_devices(experiment.mesh, experiment.sharded_sizes(), num_processes)
    if options.multihost and jax.default_backend() == "cpu":
        # JAX writes programs in process 0 alone, which would wait for the others' compilation of
        # their own programs longer than gloo does, 30 seconds.
        jax.config.update("jax_enable_compilation_cache", False)


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
    # JAX's own timeout aborts the process without a word about the remedy: it comes later.
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
    """Exit with a message if the block takes longer: JAX cannot be interrupted in another way."""

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
            timer = threading.Timer(SECONDS_TO_LEAVE, os._exit, [1])
            timer.daemon = True
            timer.start()
        raise

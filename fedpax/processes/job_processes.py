"""The processes of a job: read from the environment that a launcher sets."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


class JobProcessesError(Exception):
    """The processes do not form a job; the message names the remedy."""


class JobProcesses(NamedTuple):
    """The processes of a job, as one of them sees it."""

    coordinator: str  # `HOST:PORT`; process 0 listens there
    num_processes: int  # number of processes of the job
    process_id: int  # this process's number, from 0
    source: str  # the names of the variables that were read, for messages

    @property
    def host(self) -> str:
        """The host of process 0."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port on which process 0 listens."""
        return int(self.coordinator.rpartition(":")[2])


def find_job_processes(environment: Mapping[str, str] | None = None) -> JobProcesses | None:
    """Read the job from variables, by default the environment's; None: JAX may find it itself."""
    # The explicit variables take precedence over a Slurm step's. A step's coordinator is its first
    # host.
    environment = os.environ if environment is None else environment
    read = {name: environment.get(name, "") for name in EXPLICIT}
    explicit = [name for name, value in read.items() if value]
    slurm = all(environment.get(name) for name in SLURM)
    if slurm:
        job = int(environment["SLURM_JOB_ID"])
        # As in jax.distributed: the last 4,096 ports, which few programs use.
        port = environment.get("JAX_COORDINATOR_PORT") or str(job % 4096 + 61440)
        # node7 or node[007-012,20] or node7,other3
        first = re.match(r"([^,\[]+)(?:\[(\d+))?", environment["SLURM_STEP_NODELIST"])
        host = "".join(group or "" for group in first.groups()) if first else "localhost"
        from_slurm = (f"{host}:{port}", environment["SLURM_NTASKS"], environment["SLURM_PROCID"])
        read = {name: read[name] or other for name, other in zip(EXPLICIT, from_slurm, strict=True)}
    elif not explicit:
        return None
    if missing := [name for name, value in read.items() if not value]:
        raise JobProcessesError(
            f"{' and '.join(explicit)} {'is' if len(explicit) == 1 else 'are'} set, but not "
            f"{' and '.join(missing)}, expected all three. Set JAX_COORDINATOR_ADDRESS=HOST:PORT "
            "(of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0) in every process."
        )
    address, count, process = read.values()
    if not re.fullmatch(r"[^:\s]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", address):
        raise JobProcessesError(
            f"JAX_COORDINATOR_ADDRESS={address} is not an address, expected HOST:PORT such as "
            "10.0.0.1:8476 or [fd00::1]:8476. Name the host of process 0 and a free port there."
        )
    if not (count.isdecimal() and process.isdecimal() and int(process) < int(count)):
        raise JobProcessesError(
            f"JAX_PROCESS_ID={process} and JAX_NUM_PROCESSES={count}: expected integers with "
            "0 <= JAX_PROCESS_ID < JAX_NUM_PROCESSES. Number the processes from 0, each with its "
            "own number and all with the same count."
        )
    source = "SLURM_*" if slurm and not explicit else ", ".join(explicit)
    return JobProcesses(address, int(count), int(process), source)

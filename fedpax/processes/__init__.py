"""The hosts of one job: how they find each other, agree, and exchange values."""

from fedpax.processes.job_processes import JobProcesses, JobProcessesError, call_roll

__all__ = ["JobProcesses", "JobProcessesError", "call_roll"]

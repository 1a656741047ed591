"""Compile the round of fewer processes while all train, so that a lost host costs no compilation.

Every process of an elastic job compiles it for the devices of the first processes of the job: those
that remain are numbered again from 0, and have devices with the same numbers.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
from jax.sharding import use_abstract_mesh

from fedpax.console import print_error
from fedpax.elastic.membership import Membership
from fedpax.parallel.mesh import default_devices
from fedpax.run_files.configuration import to_json
from fedpax.training.compiled_round import compile_round, with_shardings
from fedpax.training.experiment import Experiment

FIRST_ROUNDS = 2
TICK = 0.1


class CompileAhead(AbstractContextManager["CompileAhead"]):
    """A thread that compiles and saves the round of fewer processes; a context manager.

    It begins after the first rounds of this process, and does nothing if the round is saved
    already. If it fails, the round is compiled when it is needed.

    Args:
        experiment: makes the experiment of fewer processes.
        membership: the part of this process in an elastic job, with their number.
        rounds_trained: returns the number of rounds that this process has trained.
    """

    def __init__(
        self,
        experiment: Callable[[], Experiment],
        membership: Membership,
        rounds_trained: Callable[[], int],
    ) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compile ahead", daemon=True)
        self._experiment, self._membership = experiment, membership
        self._rounds_trained = rounds_trained

    def _run(self) -> None:
        while self._rounds_trained() < FIRST_ROUNDS:
            if self._done.wait(TICK):
                return
        try:
            compile_ahead(self._experiment(), self._membership)
        except Exception as error:  # the run itself is not affected
            if jax.process_index() == 0:
                print_error(
                    f"fedpax: elastic: the round of {self._membership.fewer} processes was not "
                    f"compiled ahead ({type(error).__name__}: {error}). A restart after the loss "
                    "of a host will take longer."
                )

    def __enter__(self) -> "CompileAhead":
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Wait until the thread has ended: JAX cannot be shut down while it compiles."""
        self._done.set()
        self._thread.join()


def compile_ahead(experiment: Experiment, membership: Membership) -> None:
    """Compile and save the round of fewer processes. No collective.

    Args:
        experiment: the experiment of these processes.
        membership: the part of this process in an elastic job.
    """
    assert membership.fewer is not None
    saved = membership.program(to_json(experiment), membership.fewer)
    if saved.exists():
        return
    devices = [device for device in jax.devices() if device.process_index < membership.fewer]
    with default_devices(devices):
        run = experiment.build()
    if run.cohort_shapes is None:
        return
    cohort = with_shardings(run.cohort_shapes, run.resolved_shardings.cohort)
    training = experiment.training
    # The devices of other processes run nothing for this one.
    with use_abstract_mesh(run.mesh.abstract_mesh):
        compile_round(
            run,
            cohort,
            update_norm=training.update_norm,
            skip_spikes=training.on_spike == "skip",
            saved=saved,
            load=False,
        )

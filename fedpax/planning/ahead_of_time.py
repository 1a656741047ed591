"""Ahead-of-time compilation of an experiment's round, without the hardware."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.sharding import use_abstract_mesh

from fedpax.errors import FedpaxError
from fedpax.parallel.mesh import default_devices
from fedpax.planning.compiled_plan import CompiledPlan, RoundWorkload, make_plan, memory_of
from fedpax.planning.memory_overflow import MemoryOverflowError, overflow_report, shortage_of
from fedpax.planning.mesh_fit import describe_misfit
from fedpax.planning.topology import Topology, foreign_libtpu
from fedpax.run_files.paths import write_atomically
from fedpax.training.compiled_round import compile_round, with_shardings
from fedpax.training.experiment import Experiment, Run


class PlanError(FedpaxError, ValueError):
    """An experiment that cannot be planned; the message gives the reason."""


def plan_experiment(
    experiment: Experiment,
    topology: Topology,
    *,
    exp: str = "",
    slice_bandwidth: float | None = None,
    program_file: str | Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[CompiledPlan, Run]:
    """Compile the round of an experiment for a topology and make its plan.

    Args:
        experiment: the experiment.
        topology: the devices to compile for.
        exp: name of the experiment in the report. Default "": the name of its class.
        slice_bandwidth: bytes per second out of a slice, for the time that transfers stay exposed.
            Default None: the published bandwidth of its chips together.
        program_file: path to write the compiled text to. Default None: do not write it.
        progress: called with a line of text at each stage of the work. Default: ignore the lines.

    Returns:
        The plan, and the run that was compiled.

    Raises:
        PlanError: if the mesh has another number of devices or does not fit the experiment, the run
            does not state the shapes of its cohorts, or JAX cannot read the program of another
            libtpu.
        MemoryOverflowError: if the compiler runs out of device memory.
    """
    started = time.perf_counter()

    def report(line: str) -> None:
        progress(f"{time.perf_counter() - started:6.1f} s  {line}")

    name = exp or type(experiment).__name__
    with default_devices(topology.devices):
        try:
            mesh = experiment.make_mesh()
        except ValueError as error:
            stated = math.prod(map(abs, experiment.mesh.stated.values()))  # -1: any number
            sizes_follow = experiment.sharded_sizes() and len(topology.devices) % stated == 0
            misfit = None if sizes_follow else describe_misfit(name, experiment.mesh, topology)
            raise PlanError(misfit or f"{name} on {topology.name}: {error}") from None
        report(f"building {name} for {mesh.size:,} devices")
        run = experiment.build()
    if run.cohort_shapes is None:
        raise PlanError(
            f"{name} does not state the shapes of its cohorts without its data: its build() must "
            "return a Run with cohort_shapes."
        )
    cohort = with_shardings(run.cohort_shapes, run.resolved_shardings.cohort)
    other_version = foreign_libtpu() if topology.devices[0].platform == "tpu" else None
    if other_version:
        report(f"note: {other_version}")
    options = ", ".join(f"{name}={value}" for name, value in (run.compiler_options or {}).items())
    report(f"compiling its round{options and f' with {options}'}; a large model takes minutes")
    try:
        # Without the hardware, the mesh's devices run nothing. With the concrete mesh set, JAX
        # would run the small computations of tracing on them.
        with _repeated(report, "still compiling"), use_abstract_mesh(run.mesh.abstract_mesh):
            training = experiment.training
            compiled = compile_round(
                run,
                cohort,
                update_norm=training.update_norm,
                skip_spikes=training.on_spike == "skip",
            )
    except jax.errors.JaxRuntimeError as error:
        if other_version and "RET_CHECK" in str(error):
            raise PlanError(
                f"{name}: JAX cannot read the program for {topology.name}. {other_version}. {error}"
            ) from None
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        shortage = shortage_of(str(error))
        raise MemoryOverflowError(
            overflow_report(name, topology, experiment, run, shortage)
        ) from None
    except ValueError as error:
        raise PlanError(f"{name} cannot be compiled for {topology.name}: {error}") from error
    text = compiled.round.as_text() or ""
    if program_file:
        write_atomically(Path(program_file), text)
    report(f"reading the compiled program, {len(text) / 1e6:.1f} MB")
    first = jax.tree.leaves(run.cohort_shapes)[0].shape  # [participants, steps, ...]
    workload = RoundWorkload(
        experiment=name,
        placement=run.placement,
        num_participants=compiled.num_participants,
        local_steps=first[1] if len(first) > 1 else 1,
        num_parameters=compiled.num_parameters,
        items_per_round=run.items_per_round,
        item_unit=run.item_unit,
        flops_per_item=run.flops_per_item,
    )
    memory = memory_of(compiled.round, topology)
    plan = make_plan(text, run.mesh, topology, workload, memory, slice_bandwidth)
    report("done")
    return plan, run


@contextlib.contextmanager
def _repeated(report: Callable[[str], None], line: str, every: float = 30.0) -> Iterator[None]:
    """Report a line every `every` seconds while the body runs."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(every):
            report(line)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()

"""Ahead-of-time compilation of an experiment's round, without the hardware."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import chex
import jax
from jax.sharding import NamedSharding, use_abstract_mesh

from fedpax.errors import FedpaxError
from fedpax.parallel.mesh import MeshConfig, default_devices
from fedpax.planning.compiled_plan import CompiledPlan, RoundWorkload, make_plan, memory_of
from fedpax.planning.topology import Topology, foreign_libtpu
from fedpax.run_files.paths import write_atomically
from fedpax.training.compiled_round import compile_round, run_state_shardings, with_shardings
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
        slice_bandwidth: bytes per second out of a slice. Default None: the published bandwidth of
            its chips.
        program_file: path to write the compiled text to. Default None: do not write it.
        progress: called with a line of text at each stage of the work.

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
        # With the concrete mesh, JAX would run the small computations of tracing on its devices,
        # which do not exist.
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


# ---- the sizes of a mesh, compared with the devices of a topology


def describe_misfit(name: str, mesh: MeshConfig, topology: Topology) -> str | None:
    """Describe a mesh that needs another number of devices than the topology's; else None."""
    sizes = {axis: size for axis, size in mesh.stated.items() if size != 1}
    total, needed = len(topology.devices), math.prod(size for size in sizes.values() if size != -1)
    takes_rest = -1 in sizes.values()
    if not sizes or total == needed or (takes_rest and total % needed == 0):
        return None
    count = f"a multiple of {needed:,} devices" if takes_rest else f"{needed:,} devices"
    axes = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    fitting = fitting_sizes(sizes, total)
    change = (
        f"Change {' and '.join(f'--mesh.{axis}' for axis in sizes)}, or"
        if fitting is None
        else f"Use all: {' '.join(f'--mesh.{axis}={size}' for axis, size in fitting.items())}. Or"
    )
    nearest = max(1, total // needed) * needed if takes_rest else needed
    device, _, _ = topology.name.partition(":")
    other = f"--topology={device}:{nearest}" if topology.shape == () else f"{nearest:,} devices"
    return (
        f"{name} uses {count} ({axes}), {topology.name}"
        f"{f' in {topology.slices} slices' if topology.slices > 1 else ''} has {total:,}. "
        f"{change} plan for {other}."
    )


def fitting_sizes(sizes: Mapping[str, int], total: int) -> dict[str, int] | None:
    """Return sizes near the given ones that take all devices; None if none are near."""
    # Additional devices go to the axis `clients`, or else to `fsdp`. Other sizes only become
    # divisors of the given ones, to divide the same array dimensions.
    needed = math.prod(size for size in sizes.values() if size != -1)
    if -1 not in sizes.values() and total % needed == 0:
        axis = "clients" if "clients" in sizes else "fsdp"
        return {**sizes, axis: sizes.get(axis, 1) * (total // needed)}
    for axis in reversed(list(sizes)):  # the axes of placements are the first ones
        other_sizes = 1 if sizes[axis] == -1 else needed // sizes[axis]
        if sizes[axis] == -1 or total % other_sizes:
            continue
        smaller = math.gcd(sizes[axis], total // other_sizes)
        if -1 in sizes.values() or smaller * other_sizes == total:
            return {**sizes, axis: smaller}
    return None


class MemoryOverflowError(FedpaxError):
    """A round that does not fit the memory of a device; the message lists the remedies."""

    exit_status = 1


# Fields that reduce a round's memory: the effect, and the value beyond which there is none.
_REMEDIES: dict[str, tuple[str, Any]] = {
    "mesh.fsdp": ("shard parameters and optimizer state over more devices", None),
    "mesh.tensor": ("shard heads and MLP dimensions over more devices", None),
    "mesh.stage": ("divide the layers among more pipeline stages", None),
    "model.remat": ("recompute activations instead of storing them, such as full", "full"),
    "model.num_microbatches": ("divide a batch into more pipeline microbatches", None),
    "loss.grad_accum_steps": ("accumulate the gradient over more microbatches", None),
    "optimizer.name": ("use an optimizer with a smaller state, such as adafactor", "adafactor"),
    "data.batch_size": ("use smaller batches", 1),
    "data.seq_len": ("use shorter sequences", 1),
    "cohort.chunk_size": ("run fewer clients at once on a device", 1),
    "cohort.batch_size": ("use smaller batches", 1),
}


def overflow_report(
    name: str, topology: Topology, experiment: Experiment, run: Run, shortage: str
) -> str:
    """Describe a round that does not fit: the memory of its arguments, and fields to change."""
    lines = [f"{name} does not fit: a device of {topology.name} {shortage}. On each device:"]
    for part, size in _argument_bytes(run).items():
        lines.append(f"  {size / 2**30:8.2f} GiB  {part}")
    lines.append("Change one or more of these:")
    for field, (remedy, last) in _REMEDIES.items():
        group, _, name_of_axis = field.partition(".")
        value = run.mesh.shape.get(name_of_axis) if group == "mesh" else _value(experiment, field)
        no_effect = field == "model.num_microbatches" and run.mesh.shape.get("stage", 1) == 1
        if value not in (None, last) and not no_effect:
            lines.append(f"  --{field}={value} now: {remedy}")
    lines.append("  --topology, --slices: more chips, or chips with more memory")
    return "\n".join(lines)


def shortage_of(message: str) -> str:
    """Summarize the compiler's error message: the memory needed, available, and largest arrays."""
    sizes = re.search(r"[Uu]sed ([\d.]+\w?) of ([\d.]+\w?) hbm", message) or re.search(
        r"temporaries \(([\d.]+\w?)\) exceeds available HBM \(([\d.]+\w?)\)", message
    )
    if not sizes:
        return message.partition("\n")[0]
    largest = re.findall(r"Size: ([\d.]+\w?)\b.*?Shape: (\w+\[[\d,]*\])", message, re.DOTALL)
    arrays = ", ".join(f"{size} {shape}" for size, shape in largest[:3])
    purpose = " for temporaries alone" if "temporaries (" in message else ""
    return f"needs {sizes[1]} of {sizes[2]}{purpose}" + (f" (largest: {arrays})" if arrays else "")


def _value(experiment: Experiment, field: str) -> Any:
    """Return the value of a field such as "data.seq_len"; None if the experiment lacks it."""
    value: Any = experiment
    for name in field.split("."):
        value = getattr(value, name, None)
    return value


def _argument_bytes(run: Run) -> dict[str, int]:
    params = jax.eval_shape(run.init, jax.random.key(0))
    state = jax.eval_shape(run.algorithm.init, params)
    participants = jax.tree.leaves(run.cohort_shapes)[0].shape[0]
    whole = _device_bytes(state, run_state_shardings(run, params, state, participants))
    model = _device_bytes(params, run.resolved_shardings.params)
    frozen = {} if run.frozen is None else {"frozen values": _device_bytes(run.frozen.shapes)}
    return {
        "the model": model,
        "the rest of the state: optimizers, state of participants": whole - model,
        "a round's cohort": _device_bytes(run.cohort_shapes, run.resolved_shardings.cohort),
    } | frozen


def _device_bytes(
    shapes: chex.ArrayTree, shardings: NamedSharding | chex.ArrayTree | None = None
) -> int:
    """Count the bytes on a device. Default of the shardings: those that the shapes have."""
    leaves = jax.tree.leaves(shapes if shardings is None else with_shardings(shapes, shardings))
    total = 0
    for leaf in leaves:
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        shape = leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * (8 if is_key else leaf.dtype.itemsize)
    return total

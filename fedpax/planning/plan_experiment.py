"""Compiles an experiment's round for devices that need not be there, and reads what it needs."""

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import use_abstract_mesh

from fedpax.parallel.mesh import default_devices
from fedpax.planning.compiled_plan import Plan, Workload, make_plan, memory_of
from fedpax.planning.topology import Topology
from fedpax.training.compiled_round import compile_round, shardings_of_state, with_shardings
from fedpax.training.configuration import write_atomically
from fedpax.training.experiment import Experiment, Run


class PlanError(ValueError):
    """An experiment that cannot be planned; the message says why."""


class MemoryOverflowError(Exception):
    """A round that does not fit the devices' memory; the message says what to change."""


def plan_experiment(
    experiment: Experiment,
    topology: Topology,
    *,
    exp: str = "",
    program_file: str | Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Plan, Run]:
    """Compiles the round of an experiment for a topology and makes its plan.

    Args:
        experiment: what would be trained.
        topology: on what.
        exp: the experiment's name on the command line.
        program_file: a file that gets the text of the compiled round.
        progress: is told what is being done.

    Returns:
        The plan, and the run that was compiled.

    Raises:
        PlanError: if the mesh does not fit the devices or the experiment, or only data would tell
            the batches' shapes.
        MemoryOverflowError: if a device's memory is too small.
    """
    started = time.perf_counter()

    def tell(line: str) -> None:
        progress(f"{time.perf_counter() - started:6.1f} s  {line}")

    name = exp or type(experiment).__name__
    with default_devices(topology.devices):
        try:
            mesh = experiment.mesh.make()
        except ValueError as error:
            raise PlanError(
                f"{name} does not fit {topology.name}: {error} Change the mesh, such as "
                "--mesh.islands=2 --mesh.fsdp=-1, where -1 takes the devices that are left."
            ) from None
        tell(f"making {name} for {mesh.size:,} devices")
        run = experiment.build()
    if run.batch_shapes is None:
        raise PlanError(
            f"{name} does not say the shapes of its batches without its data: its build() must "
            "return a Run with batch_shapes."
        )
    batches = with_shardings(run.batch_shapes, run.shardings.batches)
    tell("compiling its round; minutes, for a large model")
    try:
        # The mesh's devices may not be there: with the mesh itself set, JAX would run the little
        # that it computes while tracing on them.
        with _repeated(tell, "still compiling"), use_abstract_mesh(run.mesh.abstract_mesh):
            program = compile_round(run, batches)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        shortage = _shortage(str(error))
        raise MemoryOverflowError(
            overflow_report(name, topology, experiment, run, shortage)
        ) from None
    except ValueError as error:
        raise PlanError(f"{name} cannot be compiled for {topology.name}: {error}") from error
    text = program.round.as_text() or ""
    if program_file:
        write_atomically(Path(program_file), text)
    tell(f"reading the compiled program, {len(text) / 1e6:.1f} MB")
    first = jax.tree.leaves(run.batch_shapes)[0].shape
    workload = Workload(
        experiment=name,
        placement=run.placement,
        participants=program.participants,
        steps=first[1] if len(first) > 1 else 1,
        parameters=program.parameters,
        tokens=run.items_per_round,
        flops_per_token=run.flops_per_token,
    )
    plan = make_plan(text, run.mesh, topology, workload, memory_of(program.round, topology))
    tell("done")
    return plan, run


@contextlib.contextmanager
def _repeated(tell: Callable[[str], None], line: str, every: float = 30.0) -> Iterator[None]:
    """Tells a line again and again while something goes on that tells nothing itself."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(every):
            tell(line)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# What makes a round smaller, by the experiment's field, and the value at which it can do no more.
_REMEDIES: dict[str, tuple[str, Any]] = {
    "mesh.fsdp": ("cut parameters and optimizer state over more devices", None),
    "mesh.tensor": ("cut heads and inner widths over more devices", None),
    "mesh.stage": ("put the layers on more stages", None),
    "model.remat": ("compute activations again instead of keeping them, such as full", "full"),
    "model.microbatches": ("send a batch through the pipeline in more parts", None),
    "loss.accumulation": ("compute a step's batch in more parts, one after another", None),
    "optimizer.name": ("an optimizer that keeps less, such as adafactor", "adafactor"),
    "data.batch": ("a smaller batch", 1),
    "data.length": ("shorter sequences", 1),
    "cohort.chunk_size": ("fewer clients at once on a device", 1),
    "cohort.batch": ("smaller batches", 1),
}


def overflow_report(
    name: str, topology: Topology, experiment: Experiment, run: Run, shortage: str
) -> str:
    """Says that a round does not fit, what takes the memory, and which fields would change it.

    Args:
        name: the experiment's name.
        topology: what it was compiled for.
        experiment: the experiment.
        run: what it built.
        shortage: such as "needs 20.31G of 15.75G".

    Returns:
        Lines.
    """
    lines = [f"{name} does not fit: a device of {topology.name} {shortage}. On each device:"]
    for part, size in _argument_bytes(run).items():
        lines.append(f"  {size / 2**30:8.2f} GiB  {part}")
    lines.append("Change one or more of these:")
    for field, (remedy, last) in _REMEDIES.items():
        value = _value(experiment, field)
        in_vain = field == "model.microbatches" and _value(experiment, "mesh.stage") == 1
        if value not in (None, last) and not in_vain:
            lines.append(f"  --{field}={value} now: {remedy}")
    lines.append("  --topology, --slices: more chips, or chips with more memory")
    return "\n".join(lines)


def _value(experiment: Experiment, field: str) -> Any:
    """The value of a field such as "mesh.fsdp", or None where the experiment has none."""
    value: Any = experiment
    for step in field.split("."):
        value = getattr(value, step, None)
    return value


def _shortage(message: str) -> str:
    """What the compiler's message says is missing."""
    found = re.search(r"[Uu]sed ([\d.]+\w?) of ([\d.]+\w?) hbm", message) or re.search(
        r"temporaries \(([\d.]+\w?)\) exceeds available HBM \(([\d.]+\w?)\)", message
    )
    if not found:
        return message.partition("\n")[0]
    largest = re.findall(r"Size: ([\d.]+\w?)\b.*?Shape: (\w+\[[\d,]*\])", message, re.DOTALL)
    those = ", ".join(f"{size} {shape}" for size, shape in largest[:3])
    what = " for temporaries alone" if "temporaries (" in message else ""
    return f"needs {found[1]} of {found[2]}{what}" + (f" (largest: {those})" if those else "")


def _argument_bytes(run: Run) -> dict[str, int]:
    """Bytes of a round's arguments on a device."""
    params = jax.eval_shape(run.init, jax.random.key(0))
    state = jax.eval_shape(run.algorithm.init, params)
    participants = jax.tree.leaves(run.batch_shapes)[0].shape[0]
    whole = _device_bytes(state, shardings_of_state(run, params, state, participants))
    model = _device_bytes(params, run.shardings.params)
    return {
        "the model": model,
        "the rest of the state: optimizers, what each participant keeps": whole - model,
        "a round's batches": _device_bytes(run.batch_shapes, run.shardings.batches),
    }


def _device_bytes(shapes: Any, shardings: Any) -> int:
    leaves = jax.tree.leaves(with_shardings(shapes, shardings))
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * _width(leaf.dtype) for leaf in leaves
    )


def _width(dtype: Any) -> int:
    return 8 if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize

"""The report on a round that does not fit the memory of a device."""

from __future__ import annotations

import math
import re
from typing import Any

import chex
import jax
from jax.sharding import NamedSharding

from fedpax.errors import FedpaxError
from fedpax.planning.topology import Topology
from fedpax.training.compiled_round import run_state_shardings, with_shardings
from fedpax.training.experiment import Experiment, Run


class MemoryOverflowError(FedpaxError):
    """A round that does not fit the memory of a device; the message lists the remedies."""

    exit_status = 1


# Fields of experiments that reduce a round's memory: what a change of the field does, and the
# value beyond which it does no more.
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
    """Return the bytes of a round's arguments on a device, by part."""
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

"""Pipeline parallelism: layers sharded over the mesh axis `stage`, a batch in microbatches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from fedpax.errors import ArgumentError
from fedpax.parallel.axes import entry_axes, partition_spec


class StageTask(NamedTuple):
    """The task of a stage in a tick, as integers or arrays of integers."""

    useful: bool | jax.Array  # if not, the result is discarded
    repeat: int | jax.Array  # the stage's block of layers to apply
    microbatch: int | jax.Array


class Schedule:
    """The schedule of a pipeline with interleaved stages."""

    # Microbatches go around the stages in groups of `num_stages`. When the last stage has applied
    # its first block to a microbatch, the first stage has applied its first block to the whole
    # group, and applies its next block to this microbatch. No microbatch waits between two stages.

    def __init__(self, num_stages: int, num_microbatches: int, num_repeats: int):
        for name, value in (("num_microbatches", num_microbatches), ("num_repeats", num_repeats)):
            if value < 1:
                raise ArgumentError(f"A pipeline has {name}={value}, expected at least 1.")
        if num_microbatches % num_stages:
            raise ArgumentError(
                f"A pipeline has num_microbatches={num_microbatches}, which its {num_stages} "
                f"stages do not divide: use a multiple of {num_stages}, at best several times "
                f"{num_stages}."
            )
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.num_repeats = num_repeats

    @property
    def num_ticks(self) -> int:
        """Number of ticks until every microbatch has passed every block of layers."""
        return self.num_repeats * self.num_microbatches + self.num_stages - 1

    @property
    def microbatches_per_stage(self) -> int:
        """Number of microbatches that a stage stores before and after the pipeline."""
        return self.num_microbatches // self.num_stages

    def task(self, tick: int | jax.Array, stage: int | jax.Array) -> StageTask:
        """Return the task of a stage in a tick; both can be arrays."""
        started = tick - stage
        lap, index = started // self.num_stages, started % self.num_stages
        group, repeat = lap // self.num_repeats, lap % self.num_repeats
        useful = (started >= 0) & (started < self.num_repeats * self.num_microbatches)
        return StageTask(useful, repeat, (group * self.num_stages + index) % self.num_microbatches)


LayerFn: TypeAlias = Callable[
    [jax.Array, chex.ArrayTree, chex.ArrayTree], tuple[jax.Array, chex.ArrayTree]
]
Remat: TypeAlias = Callable[[Callable], Callable]


def run_pipeline(
    layer_fn: LayerFn,
    stacked_params: chex.ArrayTree,
    x: Float[Array, "batch ..."],
    side_inputs: chex.ArrayTree = (),
    *,
    num_microbatches: int = 1,
    num_repeats: int = 1,
    axis: str = "stage",
    remat: Remat | None = None,
    unroll: int = 1,
) -> tuple[Float[Array, "batch ..."], chex.ArrayTree]:
    """Apply a stack of layers to a batch, in a pipeline if the mesh has one.

    Without a pipeline, this is a `jax.lax.scan` over the layers of the whole batch.

    With a pipeline, the axis must be automatic, and it alone becomes manual: other axes still shard
    the batch, and the layers within a stage. The batch axis of the features is sharded over `axis`
    as well (rule "batch"), on the way in and out. Microbatches move around the ring of stages.

    Parameters never move between stages. With num_repeats > 1 they are stored as [num_repeats,
    layers / num_repeats, ...] with logical axes ("repeats", "layers", ...), the second one sharded
    over `stage`: the same numbers in the same order as [layers, ...].

    Args:
        layer_fn: one layer, `layer_fn(x, params, side_inputs) -> (x, auxiliary)`, which must not
            close over arrays. x keeps its shape and dtype. `auxiliary` is a pytree of scalars, such
            as a load-balancing loss; () for none.
        stacked_params: the layers' parameters, a pytree of [layers, ...], or of [num_repeats,
            layers / num_repeats, ...] if num_repeats > 1.
        x: features [batch, ...].
        side_inputs: further inputs of the layers, such as segments, a pytree of arrays. [batch,
            ...] are divided into microbatches as x is; [1, ...] are passed unchanged.
        num_microbatches: microbatches of the batch, a multiple of the number of stages.
        num_repeats: blocks of layers on each stage. Default 1: GPipe.
        axis: name of the pipeline's mesh axis.
        remat: transforms `layer_fn` so that it stores fewer residuals, such as
            `functools.partial(jax.checkpoint, prevent_cse=False)`. Default None: store all
            residuals, except in a pipeline with num_repeats > 1, which uses `jax.checkpoint`.
        unroll: unroll factor of the scan over layers.

    Returns:
        The features [batch, ...], and the auxiliary scalars, summed over layers and averaged over
        microbatches.

    Raises:
        ValueError: if num_microbatches does not divide the batch, or the number of stages does not
            divide num_microbatches; if the stacks have different lengths, or num_stages *
            num_repeats does not divide their length; if `side_inputs` have another batch size; if
            the axis is explicit; if it is called inside a `jax.shard_map` over other axes with
            `check_vma`.

    Example:
        >>> layer_fn = lambda x, weight, _: (jnp.tanh(weight * x), {"norm": jnp.sum(x**2)})
        >>> weights, x = jnp.array([0.5, 2.0]), jnp.ones((4, 3))
        >>> y, auxiliary = run_pipeline(layer_fn, weights, x, num_microbatches=2)  # no mesh is set
        >>> bool(jnp.allclose(y, jnp.tanh(2 * jnp.tanh(x / 2)))), sorted(auxiliary)
        (True, ['norm'])

    Reference:
        Huang et al., GPipe, arXiv:1811.06965, section 2; Narayanan et al., arXiv:2104.04473,
        section 2.2.
    """
    num_layers = _check_stacked(stacked_params, num_repeats)
    _check_side_inputs(side_inputs, x.shape[0])
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    stages = mesh.shape[axis] if types.get(axis, AxisType.Manual) is not AxisType.Manual else 1
    if stages == 1:
        apply_layer = (remat or _unchanged)(lambda x, params: layer_fn(x, params, side_inputs))
        if num_repeats > 1:
            stacked_params = jax.tree.map(
                lambda p: p.reshape(num_layers, *p.shape[2:]), stacked_params
            )
        y, auxiliary = jax.lax.scan(apply_layer, x, stacked_params, unroll=unroll)
        return y, jax.tree.map(lambda scalars: scalars.sum(0), auxiliary)
    if types[axis] is AxisType.Explicit:
        raise ArgumentError(
            f"run_pipeline: the mesh axis {axis!r} is explicit, but a pipeline needs an automatic "
            f"axis: make the mesh with axis_types={{{axis!r}: jax.sharding.AxisType.Auto}}."
        )
    if varying := getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", None):
        raise ArgumentError(
            f"run_pipeline: the enclosing jax.shard_map checks varying axes "
            f"({', '.join(varying)}): pass check_vma=False to it, or use fedpax.federated_map."
        )
    schedule = Schedule(stages, num_microbatches, num_repeats)
    if num_layers % (stages * num_repeats):
        raise ArgumentError(
            f"run_pipeline: {num_layers} layers cannot be divided into {stages} stages of "
            f"{num_repeats} blocks: use a multiple of {stages * num_repeats} layers, another size "
            f"of the mesh axis {axis!r} (stage), or another num_repeats (num_pipeline_repeats)."
        )
    if x.shape[0] % num_microbatches:
        raise ArgumentError(
            f"run_pipeline: num_microbatches={num_microbatches} does not divide the batch of "
            f"{x.shape[0]}: change one of them."
        )
    on_device = functools.partial(_pipeline_on_device, layer_fn, schedule, axis, remat, unroll)
    split = functools.partial(_split_microbatches, schedule=schedule, axis=axis)
    params_spec = PartitionSpec(axis) if num_repeats == 1 else PartitionSpec(None, axis)
    y, auxiliary = jax.shard_map(
        on_device,
        in_specs=(params_spec, PartitionSpec(axis), PartitionSpec()),
        out_specs=(PartitionSpec(axis), PartitionSpec()),
        axis_names={axis},
        # With the check, JAX could not differentiate a layer that contains a `shard_map`.
        check_vma=False,
    )(
        stacked_params,
        split(x),
        jax.tree.map(lambda a: a if a.shape[0] == 1 else split(a), side_inputs),
    )
    return _merge_microbatches(y, schedule, axis), auxiliary


def _unchanged(layer_fn: Callable) -> Callable:
    return layer_fn


def _pipeline_on_device(
    layer_fn: LayerFn,
    schedule: Schedule,
    axis: str,
    remat: Remat | None,
    unroll: int,
    own_params: chex.ArrayTree,
    buffer: jax.Array,
    side_inputs: chex.ArrayTree,
) -> tuple[jax.Array, chex.ArrayTree]:
    """Run the pipeline on one device; return its microbatches and the auxiliary scalars."""
    # `buffer` has the microbatches of the device, [microbatches_per_stage, microbatch, ...].
    stage = jax.lax.axis_index(axis)
    run_layers = _own_layers(layer_fn, schedule, remat, unroll, own_params, side_inputs)
    forward = [(s, (s + 1) % schedule.num_stages) for s in range(schedule.num_stages)]
    backward = [(target, source) for source, target in forward]

    def exchange(arriving: jax.Array, buffer: jax.Array, tick: Any) -> tuple[jax.Array, jax.Array]:
        """Let stage 0 take a new microbatch and return a finished one; rotate the buffers."""
        # When stage 0 begins with microbatch m, it takes it from slot m % microbatches_per_stage of
        # its buffer, and stores the microbatch m - num_stages that finishes in this tick. Then this
        # slot moves to the previous stage, on all devices. After all rotations, each microbatch is
        # on the device where it started.
        _, repeat, microbatch = schedule.task(tick, 0)
        slot = microbatch % schedule.microbatches_per_stage
        stored = jax.lax.dynamic_index_in_dim(buffer, slot, keepdims=False)
        begins = repeat == 0
        entering = jnp.where((stage == 0) & begins, stored, arriving)
        leaving = jnp.where((stage == 0) & begins, arriving, stored)
        rotated = jax.lax.ppermute(leaving, axis, backward)
        if schedule.num_repeats > 1:
            rotated = jnp.where(begins, rotated, leaving)
        return entering, jax.lax.dynamic_update_index_in_dim(buffer, rotated, slot, 0)

    def run_tick(
        carry: tuple[jax.Array, jax.Array], tick: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], Any]:
        entering, buffer = exchange(*carry, tick)
        y, auxiliary = run_layers(entering, schedule.task(tick, stage))
        return (jax.lax.ppermute(y, axis, forward), buffer), auxiliary

    ticks = jnp.arange(schedule.num_ticks)
    # While the pipeline fills, stages compute on an example: derivatives at zeros can be NaN.
    (arriving, buffer), per_tick = jax.lax.scan(run_tick, (buffer[0], buffer), ticks)
    last = schedule.num_repeats * schedule.num_microbatches + schedule.num_stages - 1
    _, buffer = exchange(arriving, buffer, last)
    buffer = jnp.roll(buffer, -(schedule.num_stages % schedule.microbatches_per_stage), axis=0)
    useful = schedule.task(ticks, stage).useful
    auxiliary = jax.tree.map(
        lambda a: jax.lax.psum(jnp.where(useful, a, 0).sum(0), axis) / schedule.num_microbatches,
        per_tick,
    )
    return buffer, auxiliary


def _own_layers(
    layer_fn: LayerFn,
    schedule: Schedule,
    remat: Remat | None,
    unroll: int,
    own_params: chex.ArrayTree,
    side_inputs: chex.ArrayTree,
) -> Callable[[jax.Array, StageTask], tuple[jax.Array, chex.ArrayTree]]:
    """Return the function that applies a block of the device's layers to a microbatch."""

    # Slices that depend on the tick are taken in here, so that `remat` does not store them.
    def apply_layer(
        x: jax.Array, params: Any, repeat: Any, microbatch: Any, side_inputs: Any
    ) -> Any:
        if schedule.num_repeats > 1:
            params = jax.tree.map(functools.partial(_slice, repeat), params)
        of_microbatch = functools.partial(_slice, microbatch)
        inputs = jax.tree.map(lambda a: a if a.shape[0] == 1 else of_microbatch(a), side_inputs)
        return layer_fn(x, params, inputs)

    if schedule.num_repeats > 1:
        apply_layer = (remat or functools.partial(jax.checkpoint, prevent_cse=False))(apply_layer)
        # [layers of a block, num_repeats, ...], to scan over the layers of a block.
        own_params = jax.tree.map(lambda p: jnp.moveaxis(p, 0, 1), own_params)
    elif remat is not None:
        apply_layer = remat(apply_layer)

    def run_layers(x: jax.Array, task: StageTask) -> tuple[jax.Array, chex.ArrayTree]:
        x, per_layer = jax.lax.scan(
            lambda x, params: apply_layer(x, params, task.repeat, task.microbatch, side_inputs),
            x,
            own_params,
            unroll=unroll,
        )
        return x, jax.tree.map(lambda scalars: scalars.sum(0), per_layer)

    return run_layers


def _slice(index: int | jax.Array, stack: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _split_microbatches(x: jax.Array, schedule: Schedule, axis: str) -> jax.Array:
    """Reshape [batch, ...] to [num_microbatches, microbatch, ...] without transfers."""
    # Any assignment of examples is valid. Here each device contributes its own examples to each
    # microbatch: the batch axis is sharded first over the other axes, then over the stages.
    shards = _batch_shards(x.shape[0] // schedule.num_microbatches, axis)
    x = x.reshape(shards, schedule.num_microbatches, -1, *x.shape[1:])
    return jnp.moveaxis(x, 1, 0).reshape(schedule.num_microbatches, -1, *x.shape[3:])


def _merge_microbatches(x: jax.Array, schedule: Schedule, axis: str) -> jax.Array:
    shards = _batch_shards(x.shape[1], axis)
    x = jnp.moveaxis(x.reshape(schedule.num_microbatches, shards, -1, *x.shape[2:]), 0, 1)
    return x.reshape(-1, *x.shape[3:])


def _batch_shards(examples: int, axis: str) -> int:
    """Return the number of shards of a microbatch over the axes other than `axis`."""
    axes = entry_axes(partition_spec(("batch",), shape=(examples,))[0])
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[other] for other in axes if other != axis)


def _check_stacked(stacked_params: chex.ArrayTree, num_repeats: int) -> int:
    """Check the shapes of the stacked parameters and return the number of layers."""
    leading = 1 if num_repeats == 1 else 2
    counts = {}
    for path, leaf in jax.tree.leaves_with_path(stacked_params):
        name = f"stacked_params{jax.tree_util.keystr(path)}"
        if leaf.ndim < leading or (num_repeats > 1 and leaf.shape[0] != num_repeats):
            raise ArgumentError(
                f"run_pipeline: {name} has shape {leaf.shape}, expected [{num_repeats}, layers / "
                f"{num_repeats}, ...] for num_repeats={num_repeats}: reshape the stack of all "
                "layers, which keeps their order."
                if num_repeats > 1
                else f"run_pipeline: {name} has shape {leaf.shape}, expected [layers, ...]."
            )
        counts[math.prod(leaf.shape[:leading])] = name
    if len(counts) != 1:
        raise ArgumentError(
            f"run_pipeline: stacked_params has {counts or 'no arrays'}: expected arrays with the "
            "same number of layers."
        )
    return next(iter(counts))


def _check_side_inputs(side_inputs: chex.ArrayTree, batch: int) -> None:
    for path, leaf in jax.tree.leaves_with_path(side_inputs):
        if leaf.ndim < 1 or leaf.shape[0] not in (1, batch):
            raise ArgumentError(
                f"run_pipeline: side_inputs{jax.tree_util.keystr(path)} has shape {leaf.shape}, "
                f"expected [{batch}, ...], the batch size of x, or [1, ...] for the same value in "
                "all microbatches."
            )

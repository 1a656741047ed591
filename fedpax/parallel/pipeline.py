"""Pipeline parallelism: a stack of layers cut over the mesh axis `stage`, a batch in microbatches.

Each device of `stage` holds some of the layers. Microbatches go from one to the next, so that all
of them compute at once, on different microbatches. A tick is what every stage does at once: it
receives a microbatch's features, runs one run of its layers on them, and sends them on.

With one run of layers a stage (`repeats=1`) this is GPipe. With several, stage s has runs s,
s + stages, s + 2 stages ..., and a microbatch goes around that often: ticks are shorter, and so
is the time in which the last stage waits for the first microbatch (`bubble_fraction`).

A function and its gradient run through the same pipeline, the gradient backwards: JAX derives it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from fedpax.parallel.axes import partition_spec

Step = Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]]


def run_stages(
    step: Step,
    stacked: Any,
    x: jax.Array,
    along: Any = (),
    *,
    microbatches: int = 1,
    repeats: int = 1,
    axis: str = "stage",
    remat: Callable[[Callable], Callable] | None = None,
    unroll: int = 1,
) -> tuple[jax.Array, Any]:
    """Applies a stack of layers to a batch, in a pipeline where the mesh has one.

    On a mesh without the axis, or with one device along it, or inside a `jax.shard_map` over it,
    this is a `jax.lax.scan` over the layers and nothing else: the whole batch goes through each.

    On a mesh with the axis, which must be automatic, only the axis becomes manual: other axes go
    on sharding the batch and the layers within a stage. Features come in and go out with their
    batch axis cut over `axis` as well (rule "batch"), so that what stands before and after the
    layers, embeddings and logits, is divided among the stages instead of repeated on each. The
    first stage takes microbatches from the ring of stages and gives finished ones back to it, and
    no device ever holds more than its part of the batch and two microbatches.

    Parameters never move between stages. With repeats > 1 their order on the stages is not that
    of the layers, so they are stored with the axis of the runs in front, [repeats,
    layers / repeats, ...], of logical axes ("repeats", "layers", ...), whose second axis is cut
    over `stage`: the same numbers in the same order as [layers, ...].

    Args:
      step: one layer, `step(x, layer, along) -> (x, auxiliary)`, where x keeps shape and dtype,
        and auxiliary is a pytree of scalars, such as a load-balancing loss; () for none. Arrays
        that it needs come as arguments, none by closure.
      stacked: a pytree of the layers' parameters, [layers, ...], or [repeats, layers / repeats,
        ...] if repeats > 1.
      x: features [batch, ...].
      along: a pytree of what else layers want to know of each example, such as its segments:
        arrays [batch, ...], which `step` gets by microbatch, or [1, ...], which it gets as they
        are.
      microbatches: parts of the batch, a multiple of the number of stages. More of them make
        the bubble smaller, and each product smaller.
      repeats: runs of layers on each stage.
      axis: the mesh axis.
      remat: makes `step` keep less for the backward pass, as `functools.partial(jax.checkpoint,
        prevent_cse=False)` does. In a pipeline with repeats > 1 a layer is always rematerialized,
        by `jax.checkpoint` if there is no other wish, since JAX would otherwise keep a copy of a
        run's parameters for each tick.
      unroll: of the scan over layers.

    Returns:
      The features [batch, ...], and the auxiliary scalars: summed over layers, averaged over
      microbatches. (A scalar that is no mean over examples differs between microbatches and the
      whole batch.)

    Raises:
      ValueError: the microbatches do not divide the batch, or the stages not the microbatches; or
        the stacks have different lengths, which stages * repeats do not divide; or `along` has
        another batch; or the axis is explicit; or it is called inside of a `jax.shard_map` over
        other axes with `check_vma`.

    Example:
      >>> step = lambda x, weight, along: (jnp.tanh(weight * x), {"norm": jnp.sum(x**2)})
      >>> weights, x = jnp.array([0.5, 2.0]), jnp.ones((4, 3))
      >>> y, auxiliary = run_stages(step, weights, x, microbatches=2)  # no mesh is set
      >>> bool(jnp.allclose(y, jnp.tanh(2 * jnp.tanh(x / 2)))), sorted(auxiliary)
      (True, ['norm'])

    Reference: Huang et al., "GPipe" (arXiv:1811.06965), section 2; Narayanan et al., "Efficient
    Large-Scale Language Model Training on GPU Clusters" (arXiv:2104.04473), section 2.2.
    """
    layers = _check_stacked(stacked, repeats)
    _check_along(along, x.shape[0])
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    stages = mesh.shape[axis] if kinds.get(axis, AxisType.Manual) is not AxisType.Manual else 1
    if stages == 1:
        one = (remat or _same)(lambda x, layer: step(x, layer, along))
        if repeats > 1:
            stacked = jax.tree.map(lambda p: p.reshape(layers, *p.shape[2:]), stacked)
        y, each = jax.lax.scan(one, x, stacked, unroll=unroll)
        return y, jax.tree.map(lambda scalars: scalars.sum(0), each)
    if kinds[axis] is AxisType.Explicit:
        raise ValueError(
            f"run_stages: the mesh axis {axis!r} is explicit, but a pipeline needs it automatic: "
            f"make the mesh with axis_types={{{axis!r}: jax.sharding.AxisType.Auto}}."
        )
    if varying := getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", None):
        raise ValueError(
            f"run_stages: a jax.shard_map around it checks what varies over {', '.join(varying)}: "
            "pass check_vma=False to it, or use fedpax.federated_map instead."
        )
    plan = Schedule(stages, microbatches, repeats)
    if layers % (stages * repeats):
        raise ValueError(
            f"run_stages: {layers} layers cannot be cut into {stages} stages of {repeats} runs: "
            f"use a number of layers that {stages * repeats} divides, another size of the mesh "
            f"axis {axis!r} (stage), or other repeats (num_pipeline_repeats)."
        )
    if x.shape[0] % microbatches:
        raise ValueError(
            f"run_stages: microbatches={microbatches} does not divide the batch of {x.shape[0]}: "
            "change one of them."
        )
    pipeline = functools.partial(_pipeline, step, plan, axis, remat, unroll)
    cut = functools.partial(_cut, plan=plan, axis=axis)
    parameters = PartitionSpec(axis) if repeats == 1 else PartitionSpec(None, axis)
    y, auxiliary = jax.shard_map(
        pipeline,
        in_specs=(parameters, PartitionSpec(axis), PartitionSpec()),
        out_specs=(PartitionSpec(axis), PartitionSpec()),
        axis_names={axis},
        # With it, JAX could not differentiate a layer that has a `shard_map` of its own.
        check_vma=False,
    )(stacked, cut(x), jax.tree.map(lambda a: a if a.shape[0] == 1 else cut(a), along))
    return _join(y, plan, axis), auxiliary


def bubble_fraction(stages: int, microbatches: int, repeats: int = 1) -> float:
    """Says which part of its time a stage has nothing to do, while the pipeline fills and drains.

    (stages - 1) / (repeats microbatches + stages - 1): a tick is one run of layers of one
    microbatch, and each stage has repeats * microbatches of them to do.

    Args:
      stages: devices along the pipeline's mesh axis.
      microbatches: parts of the batch, a multiple of `stages`.
      repeats: runs of layers on each stage.

    Returns:
      The fraction, of the forward pass, and likewise of the backward pass.

    Raises:
      ValueError: a number is below 1, or the stages do not divide the microbatches.

    Example:
      >>> bubble_fraction(4, 12), bubble_fraction(4, 12, repeats=4)
      (0.2, 0.058823529411764705)
    """
    return (stages - 1) / Schedule(stages, microbatches, repeats).ticks


class Work(NamedTuple):
    """What a stage does in a tick.

    Attributes:
      useful: whether it is anything; else the stage waits, and what it computes is not used.
      repeat: which of its runs of layers it applies.
      microbatch: to which microbatch.
    """

    useful: Any
    repeat: Any
    microbatch: Any


class Schedule:
    """Which stage does what in which tick.

    Microbatches go around in groups of as many as there are stages: when the last stage has
    applied its first run to a microbatch, the first stage has just done its group, and goes on
    with this microbatch's next run. So nothing waits on the way.

    Attributes:
      stages: devices along the pipeline's mesh axis.
      microbatches: parts of the batch.
      repeats: runs of layers on each stage.

    Raises:
      ValueError: a number is below 1, or the stages do not divide the microbatches.

    Example:
      >>> plan = Schedule(stages=2, microbatches=2, repeats=2)
      >>> [plan.work(tick, stage=1) for tick in range(2)]
      [Work(useful=False, repeat=1, microbatch=1), Work(useful=True, repeat=0, microbatch=0)]
    """

    def __init__(self, stages: int, microbatches: int, repeats: int):
        for name, value in (("microbatches", microbatches), ("repeats", repeats)):
            if value < 1:
                raise ValueError(f"A pipeline has {name}={value}, expected at least 1.")
        if microbatches % stages:
            raise ValueError(
                f"A pipeline has microbatches={microbatches}, which its {stages} stages do not "
                f"divide: use a multiple of {stages}, at best several times as many."
            )
        self.stages, self.microbatches, self.repeats = stages, microbatches, repeats

    @property
    def ticks(self) -> int:
        """How many ticks there are."""
        return self.repeats * self.microbatches + self.stages - 1

    @property
    def waiting(self) -> int:
        """How many microbatches each stage keeps that wait for the pipeline or have left it."""
        return self.microbatches // self.stages

    def work(self, tick: Any, stage: Any) -> Work:
        """What a stage does in a tick, integers or arrays of them."""
        started = tick - stage
        around, place = started // self.stages, started % self.stages
        group, repeat = around // self.repeats, around % self.repeats
        useful = (started >= 0) & (started < self.repeats * self.microbatches)
        return Work(useful, repeat, (group * self.stages + place) % self.microbatches)


def _same(step: Callable) -> Callable:
    return step


def _pipeline(
    step: Step,
    plan: Schedule,
    axis: str,
    remat: Callable[[Callable], Callable] | None,
    unroll: int,
    stacked: Any,
    waiting: jax.Array,
    along: Any,
) -> tuple[jax.Array, Any]:
    """What one device does: its layers, the microbatches that wait here, everyone's `along`."""
    stage = jax.lax.axis_index(axis)
    layers = _own_layers(step, plan, remat, unroll, stacked, along)
    onward = [(s, (s + 1) % plan.stages) for s in range(plan.stages)]
    back = [(target, source) for source, target in onward]

    def exchange(arriving: jax.Array, waiting: jax.Array, tick: Any) -> tuple[jax.Array, jax.Array]:
        """Stage 0 takes a new microbatch and leaves a finished one; all turn the ring of them."""
        # In tick m, or the m-th in which stage 0 begins with a microbatch, the ring has brought
        # microbatch m to stage 0, and microbatch m - stages comes there finished. Each place goes
        # on to the stage before, so that every microbatch ends where it came from.
        _, repeat, microbatch = plan.work(tick, 0)
        place = microbatch % plan.waiting
        here = jax.lax.dynamic_index_in_dim(waiting, place, keepdims=False)
        begins = repeat == 0
        entering = jnp.where((stage == 0) & begins, here, arriving)
        leaving = jnp.where((stage == 0) & begins, arriving, here)
        turned = jax.lax.ppermute(leaving, axis, back)
        if plan.repeats > 1:
            turned = jnp.where(begins, turned, leaving)
        return entering, jax.lax.dynamic_update_index_in_dim(waiting, turned, place, 0)

    def do_tick(
        carry: tuple[jax.Array, jax.Array], tick: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], Any]:
        entering, waiting = exchange(*carry, tick)
        done, auxiliary = layers(entering, plan.work(tick, stage))
        return (jax.lax.ppermute(done, axis, onward), waiting), auxiliary

    ticks = jnp.arange(plan.ticks)
    # While the pipeline fills, stages compute with an example of the batch and not with zeros,
    # whose derivatives may be no numbers.
    (arriving, waiting), each = jax.lax.scan(do_tick, (waiting[0], waiting), ticks)
    _, waiting = exchange(arriving, waiting, plan.repeats * plan.microbatches + plan.stages - 1)
    waiting = jnp.roll(waiting, -(plan.stages % plan.waiting), axis=0)
    useful = plan.work(ticks, stage).useful
    auxiliary = jax.tree.map(
        lambda a: jax.lax.psum(jnp.where(useful, a, 0).sum(0), axis) / plan.microbatches, each
    )
    return waiting, auxiliary


def _own_layers(
    step: Step,
    plan: Schedule,
    remat: Callable[[Callable], Callable] | None,
    unroll: int,
    stacked: Any,
    along: Any,
) -> Callable[[jax.Array, Work], tuple[jax.Array, Any]]:
    """What a stage applies to a microbatch in a tick."""

    # What depends on the tick is looked up in here, where `remat` keeps none of it.
    def one(x: jax.Array, layer: Any, repeat: Any, microbatch: Any, along: Any) -> Any:
        if plan.repeats > 1:
            layer = jax.tree.map(functools.partial(_pick, repeat), layer)
        whole = functools.partial(_pick, microbatch)
        return step(x, layer, jax.tree.map(lambda a: a if a.shape[0] == 1 else whole(a), along))

    if plan.repeats > 1:
        one = (remat or functools.partial(jax.checkpoint, prevent_cse=False))(one)
        # The layers of a run in front, to scan over; each comes in all its repeats.
        stacked = jax.tree.map(lambda p: jnp.moveaxis(p, 0, 1), stacked)
    elif remat is not None:
        one = remat(one)

    def run(x: jax.Array, work: Work) -> tuple[jax.Array, Any]:
        x, each = jax.lax.scan(
            lambda x, layer: one(x, layer, work.repeat, work.microbatch, along),
            x,
            stacked,
            unroll=unroll,
        )
        return x, jax.tree.map(lambda scalars: scalars.sum(0), each)

    return run


def _pick(index: Any, stack: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _cut(x: jax.Array, plan: Schedule, axis: str) -> jax.Array:
    """[batch, ...] as [microbatches, batch / microbatches, ...], without moving anything.

    Which examples make a microbatch does not matter. Here each device of the axes that cut the
    batch gives the next of its own to each microbatch: the batch axis is cut first over the
    other axes, then over the stages.
    """
    parts = _parts(x.shape[0] // plan.microbatches, axis)
    x = x.reshape(parts, plan.microbatches, -1, *x.shape[1:])
    return jnp.moveaxis(x, 1, 0).reshape(plan.microbatches, -1, *x.shape[3:])


def _join(x: jax.Array, plan: Schedule, axis: str) -> jax.Array:
    """The inverse of `_cut`."""
    parts = _parts(x.shape[1], axis)
    x = jnp.moveaxis(x.reshape(plan.microbatches, parts, -1, *x.shape[2:]), 0, 1)
    return x.reshape(-1, *x.shape[3:])


def _parts(examples: int, axis: str) -> int:
    """Into how many parts the axes besides `axis` cut a microbatch."""
    entry = partition_spec(("batch",), shape=(examples,))[0]
    axes = (entry,) if isinstance(entry, str) else entry or ()
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[other] for other in axes if other != axis)


def _check_stacked(stacked: Any, repeats: int) -> int:
    """The number of layers."""
    leading = 1 if repeats == 1 else 2
    found = {}
    for path, leaf in jax.tree.leaves_with_path(stacked):
        name = f"stacked{jax.tree_util.keystr(path)}"
        if leaf.ndim < leading or (repeats > 1 and leaf.shape[0] != repeats):
            raise ValueError(
                f"run_stages: {name} has shape {leaf.shape}, expected [{repeats}, layers / "
                f"{repeats}, ...] for repeats={repeats}: reshape the stack of all layers, which "
                "keeps their order."
                if repeats > 1
                else f"run_stages: {name} has shape {leaf.shape}, expected [layers, ...]."
            )
        found[math.prod(leaf.shape[:leading])] = name
    if len(found) != 1:
        raise ValueError(
            f"run_stages: stacked has {found or 'no arrays'}: expected arrays of one number of "
            "layers."
        )
    return next(iter(found))


def _check_along(along: Any, batch: int) -> None:
    for path, leaf in jax.tree.leaves_with_path(along):
        if leaf.ndim < 1 or leaf.shape[0] not in (1, batch):
            raise ValueError(
                f"run_stages: along{jax.tree_util.keystr(path)} has shape {leaf.shape}, expected "
                f"[{batch}, ...], as many examples as x, or [1, ...] for the same in all."
            )

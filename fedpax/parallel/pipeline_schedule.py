"""The schedule of a pipeline: the microbatch and the layers of each stage in each tick."""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedpax.errors import ArgumentError


class Task(NamedTuple):
    """The task of a stage in a tick, as integers or arrays of integers.

    Attributes:
        useful: whether the stage has a task. If not, its result is discarded.
        repeat: index of the stage's block of layers to apply.
        microbatch: index of the microbatch to apply it to.
    """

    useful: bool | jax.Array
    repeat: int | jax.Array
    microbatch: int | jax.Array


class Schedule:
    """The schedule of a pipeline with interleaved stages.

    Microbatches go around the stages in groups of `num_stages`. When the last stage has applied
    its first block to a microbatch, the first stage has applied its first block to the whole
    group, and applies its next block to this microbatch. No microbatch waits between two stages.

    Attributes:
        num_stages: devices along the pipeline's mesh axis.
        num_microbatches: microbatches of a batch.
        num_repeats: blocks of layers on each stage.

    Raises:
        ValueError: if a number is below 1, or `num_stages` does not divide `num_microbatches`.

    Example:
        >>> schedule = Schedule(num_stages=2, num_microbatches=2, num_repeats=2)
        >>> [schedule.task(tick, stage=1) for tick in range(2)]
        [Task(useful=False, repeat=1, microbatch=1), Task(useful=True, repeat=0, microbatch=0)]
    """

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

    def task(self, tick: int | jax.Array, stage: int | jax.Array) -> Task:
        """Return the task of a stage in a tick; both can be arrays."""
        started = tick - stage
        lap, index = started // self.num_stages, started % self.num_stages
        group, repeat = lap // self.num_repeats, lap % self.num_repeats
        useful = (started >= 0) & (started < self.num_repeats * self.num_microbatches)
        return Task(useful, repeat, (group * self.num_stages + index) % self.num_microbatches)


def bubble_fraction(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> float:
    """Return the fraction of its time that a stage is idle, while the pipeline fills and drains.

    (num_stages - 1) / (num_repeats num_microbatches + num_stages - 1): a tick is one block of
    layers on one microbatch, and each stage has num_repeats * num_microbatches such tasks.

    Args:
        num_stages: devices along the pipeline's mesh axis.
        num_microbatches: microbatches of a batch, a multiple of `num_stages`.
        num_repeats: blocks of layers on each stage. Default 1.

    Returns:
        The fraction, for the forward pass and for the backward pass.

    Raises:
        ValueError: if a number is below 1, or `num_stages` does not divide `num_microbatches`.

    Example:
        >>> bubble_fraction(4, 12), bubble_fraction(4, 12, num_repeats=4)
        (0.2, 0.058823529411764705)
    """
    schedule = Schedule(num_stages, num_microbatches, num_repeats)
    return (num_stages - 1) / schedule.num_ticks

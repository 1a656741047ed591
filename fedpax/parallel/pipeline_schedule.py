"""The schedule of a pipeline: the microbatch and the layers of each stage in each tick."""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedpax.errors import ArgumentError


class StageTask(NamedTuple):
    """The task of a stage in a tick, as integers or arrays of integers."""

    useful: bool | jax.Array  # whether the stage has a task. If not, its result is discarded
    repeat: int | jax.Array  # index of the stage's block of layers to apply
    microbatch: int | jax.Array  # index of the microbatch to apply it to


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

"""A ring of devices that hold shards of a sequence and pass them from device to device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

State = TypeVar("State", bound=chex.ArrayTree)
Tree = TypeVar("Tree", bound=chex.ArrayTree)


class Ring(NamedTuple):
    """The devices along a mesh axis that shards a sequence, for causal computations over tokens."""

    # All methods except `run_on_devices` and the properties of sizes are called inside the function
    # that `run_on_devices` runs. Arrays are shards [batch, tokens_per_device, ...].

    axis: str | None  # None for one device
    num_devices: int
    tokens_per_device: int
    window: int  # tokens that a token attends to, itself included
    # Whether each device computes on an early and a late part of the sequence instead of its own
    # shard, so that all devices have the same number of visible keys.
    balanced: bool

    def run_on_devices(self, local_fn: Callable, num_outputs: int) -> Callable:
        """Map a function of shards over the devices; it returns a tuple of `num_outputs` shards."""
        if self.axis is None:
            return local_fn
        spec = PartitionSpec(None, self.axis)
        return jax.shard_map(
            local_fn, in_specs=spec, out_specs=(spec,) * num_outputs, axis_names={self.axis}
        )

    @property
    def num_steps(self) -> int:
        """Number of shards that each device needs, its own included."""
        return min(self.num_devices, 1 - (1 - self.window) // self.tokens_per_device)

    @property
    def device_index(self) -> int | jax.Array:
        """Index of the device along the axis."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis)

    def positions(self, step: int | jax.Array) -> Int[Array, "1 tokens"]:
        """Return the sequence positions of the tokens that arrive in a step; own ones in step 0."""
        device = (self.device_index - step) % self.num_devices
        if not self.balanced:
            return (device * self.tokens_per_device + jnp.arange(self.tokens_per_device))[None]
        half = self.tokens_per_device // 2
        first = jnp.stack([device, 2 * self.num_devices - 1 - device]) * half
        return (first[:, None] + jnp.arange(half)).reshape(1, -1)

    def send(self, tree: Tree, distance: int = 1) -> Tree:
        """Send arrays to the device `distance` further along the ring. Default 1: the next one."""
        if self.axis is None:
            return tree
        targets = [(i + distance) % self.num_devices for i in range(self.num_devices)]
        return self._permute(tree, targets)

    def fold(
        self,
        shard: chex.ArrayTree,
        first: Callable[[chex.ArrayTree], State],
        later: Callable[[State, chex.ArrayTree, int | jax.Array], State],
    ) -> State:
        """Pass shards around the ring and fold a function over those that arrive."""
        # `first(shard) -> state` takes the shard of the device itself, and `later(state, shard,
        # step) -> state` the shard of the device `step` positions before this one.
        if self.num_steps == 1:
            return first(shard)

        def step_fn(
            carry: tuple[State, chex.ArrayTree], step: jax.Array
        ) -> tuple[tuple[State, chex.ArrayTree], None]:
            state, shard = carry
            following = self.send(shard)  # sent first, to overlap with the computation
            return (later(state, shard, step), following), None

        following = self.send(shard)
        carry = first(shard), following
        if self.num_steps > 2:
            carry, _ = jax.lax.scan(step_fn, carry, jnp.arange(1, self.num_steps - 1))
        return later(*carry, self.num_steps - 1)

    def balance(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Replace the shard of each device by an early and a late part of the sequence."""
        # The sequence is 2 n parts on n devices. Device d holds parts 2 d and 2 d + 1, and computes
        # on parts d and 2 n - 1 - d.
        if not self.balanced:
            return tree
        even, odd = (
            self._permute(
                jax.tree.map(lambda a, parity=parity: jnp.split(a, 2, 1)[parity], tree),
                self._targets(parity),
            )
            for parity in (0, 1)
        )
        # The early part is d, which is an even part on every other device.
        first = self.device_index % 2 == 0
        return jax.tree.map(
            lambda a, b: jnp.concatenate([jnp.where(first, a, b), jnp.where(first, b, a)], 1),
            even,
            odd,
        )

    def unbalance(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Invert `balance`."""
        if not self.balanced:
            return tree
        early, late = (jax.tree.map(lambda a, i=i: jnp.split(a, 2, 1)[i], tree) for i in (0, 1))
        even_is_early = self.device_index % 2 == 0
        shards = []
        for parity in (0, 1):
            targets = self._targets(parity)
            is_early = even_is_early == (parity == 0)
            parts = jax.tree.map(
                lambda a, b, is_early=is_early: jnp.where(is_early, a, b), early, late
            )
            shards.append(self._permute(parts, [targets.index(i) for i in range(self.num_devices)]))
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), *shards)

    def _targets(self, parity: int) -> list[int]:
        """Return the device that computes on part 2 d + parity, for each device d."""
        parts = [2 * device + parity for device in range(self.num_devices)]
        return [
            part if part < self.num_devices else 2 * self.num_devices - 1 - part for part in parts
        ]

    def _permute(self, tree: Tree, targets: list[int]) -> Tree:
        return jax.lax.ppermute(tree, self.axis, list(enumerate(targets)))

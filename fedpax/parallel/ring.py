"""A ring of devices, each with a part of a sequence, whose parts go around from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


class Ring(NamedTuple):
    """The devices along a mesh axis that cuts a sequence, for work where tokens see earlier ones.

    The methods besides `on_devices` and `parts` run inside it. Arrays are [batch, tokens, ...]
    with a device's own tokens.

    Attributes:
      axis: the mesh axis; None for one device.
      devices: how many there are along it.
      tokens: how many each of them has.
      window: how many tokens a token sees, itself and those just before it.
      balanced: whether each device works on an early and a late part of the sequence in place of
        its own, so that all have as much to see.
    """

    axis: str | None
    devices: int
    tokens: int
    window: int
    balanced: bool

    def on_devices(self, local: Callable, outputs: int) -> Callable:
        """Runs a function of a device's parts on every device; it returns a tuple of parts."""
        if self.axis is None:
            return local
        cut = PartitionSpec(None, self.axis)
        return jax.shard_map(
            local, in_specs=cut, out_specs=(cut,) * outputs, axis_names={self.axis}
        )

    @property
    def steps(self) -> int:
        """How many devices' parts each device has to see, its own among them."""
        return min(self.devices, 1 - (1 - self.window) // self.tokens)

    @property
    def here(self) -> Any:
        """The device's index."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis)

    def places(self, step: Any) -> jax.Array:
        """Where in the sequence the tokens are that come in a step [1, tokens]; own in step 0."""
        device = (self.here - step) % self.devices
        if not self.balanced:
            return (device * self.tokens + jnp.arange(self.tokens))[None]
        half = self.tokens // 2
        first = jnp.stack([device, 2 * self.devices - 1 - device]) * half
        return (first[:, None] + jnp.arange(half)).reshape(1, -1)

    def send(self, tree: Any, distance: int = 1) -> Any:
        """Passes arrays to the next device, or to one further on."""
        if self.axis is None:
            return tree
        return self._exchange(tree, [(i + distance) % self.devices for i in range(self.devices)])

    def around(self, part: Any, first: Callable, later: Callable) -> Any:
        """Passes a part around and sees the others'.

        Args:
          part: arrays of the device.
          first: `first(part) -> state`, of its own part.
          later: `later(state, part, step) -> state`, of the part from `step` devices before.

        Returns:
          The last state.
        """
        if self.steps == 1:
            return first(part)

        def see(carry: tuple[Any, Any], step: Any) -> tuple[tuple[Any, Any], None]:
            state, part = carry
            following = self.send(part)  # first, so that it goes on while this device computes
            return (later(state, part, step), following), None

        following = self.send(part)
        carry = first(part), following
        if self.steps > 2:
            carry, _ = jax.lax.scan(see, carry, jnp.arange(1, self.steps - 1))
        return later(*carry, self.steps - 1)

    def exchange(self, tree: Any) -> Any:
        """Gives each device the parts that it works on, if `balanced`: one early, one late.

        The sequence is 2 n parts on n devices. Device d has 2 d and 2 d + 1, works on d and
        2 n - 1 - d.
        """
        if not self.balanced:
            return tree
        even = self._exchange(jax.tree.map(lambda a: jnp.split(a, 2, 1)[0], tree), self._worker(0))
        odd = self._exchange(jax.tree.map(lambda a: jnp.split(a, 2, 1)[1], tree), self._worker(1))
        return self._in_turn(even, odd)

    def exchange_back(self, tree: Any) -> Any:
        """The inverse of `exchange`."""
        if not self.balanced:
            return tree
        early, late = (jax.tree.map(lambda a, i=i: jnp.split(a, 2, 1)[i], tree) for i in (0, 1))
        of_even = self.here % 2 == 0
        back = []
        for parity in (0, 1):
            worker = self._worker(parity)
            mine = of_even == (parity == 0)
            parts = jax.tree.map(lambda a, b, mine=mine: jnp.where(mine, a, b), early, late)
            back.append(self._exchange(parts, [worker.index(i) for i in range(self.devices)]))
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), *back)

    def _worker(self, parity: int) -> list[int]:
        """Who works on part 2 d + parity, for each device d."""
        parts = [2 * device + parity for device in range(self.devices)]
        return [part if part < self.devices else 2 * self.devices - 1 - part for part in parts]

    def _exchange(self, tree: Any, targets: list[int]) -> Any:
        return jax.lax.ppermute(tree, self.axis, list(enumerate(targets)))

    def _in_turn(self, even: Any, odd: Any) -> Any:
        """Early part before late part: early is d, even on every other device."""
        first = self.here % 2 == 0
        return jax.tree.map(
            lambda a, b: jnp.concatenate([jnp.where(first, a, b), jnp.where(first, b, a)], 1),
            even,
            odd,
        )

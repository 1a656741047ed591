"""A mixture of experts: every token goes through the few feed-forward networks chosen for it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from fedpax.models.grouped_matmul import grouped_matmul
from fedpax.models.parameters import normal
from fedpax.models.quantization import Quantization, quantized_grouped_matmul
from fedpax.parallel.axes import RULES, constrain, partition_spec


class MixtureOfExperts(nnx.Module):
    """SwiGLU experts, of which a router chooses a few for each token; no token is dropped.

    y = sum of w_e expert_e(x) over the chosen experts e, w = softmax over the chosen logits alone,
    logits = x router, and expert_e(x) = down_e (silu(gate_e x) * (up_e x)).

    Tokens are sorted by expert, and each expert multiplies the rows that it was given, see
    `fedpax.models.grouped_matmul`: an expert without tokens costs nothing, and one with all of
    them takes them all.

    On a mesh each device routes and sorts the tokens that it has. Where the axis `expert` cuts
    the experts, a device of it gathers the tokens of the others (the batch is cut along it too),
    computes the experts that it has, and what they add to each token is reduced and scattered.
    With n tokens on each of E devices, a device receives (E - 1) n vectors for it and sends as
    many; were chosen tokens alone exchanged, from all to all, it would be k (E - 1) n / E each
    way, which is less if E is larger than k, the experts of a token. A device has room for
    E n min(k, its experts) rows, since its experts may be chosen by all, and so it would have to
    be with the exchange; it computes those that there are. An axis `expert` no larger than it
    takes for the parameters to fit, beside `fsdp`, is best.

    fsdp cuts the experts' parameters as those of other layers: gathered for a product, and once
    more in the backward pass, their gradients reduced and scattered. tensor cuts the inside of
    each expert.

    Attributes:
      router: [embed_dim, num_experts], whole on every device.
      gate: [num_experts, embed_dim, mlp_dim], as is `up`.
      up: see `gate`.
      down: [num_experts, mlp_dim, embed_dim].
      num_experts_per_token: how many experts a token goes through.
      quantization: the number format of the experts' products in the forward pass.

    Raises:
      ValueError: there are no experts, or fewer than a token goes through.

    Example:
      >>> mixture = MixtureOfExperts(16, 32, 4, 2, output_scale=1.0, rngs=nnx.Rngs(0))
      >>> x = jax.random.normal(jax.random.key(1), (2, 8, 16))
      >>> y, losses = jax.jit(lambda x: mixture(x))(x)
      >>> y.shape, sorted(losses)
      ((2, 8, 16), ['load_balance', 'router_z'])

    Reference: Jiang et al., "Mixtral of Experts" (arXiv:2401.04088), section 2.1; Gale et al.,
    "MegaBlocks" (arXiv:2211.15841), on computing without dropping tokens.
    """

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        output_scale: float,
        quantization: Quantization = "none",
        rngs: nnx.Rngs,
    ):
        """Draws each expert as a feed-forward network of its own, down times `output_scale`."""
        if num_experts < 1:
            raise ValueError(
                f"MixtureOfExperts: num_experts={num_experts}, expected at least 1. Without experts, use "
                "FeedForward."
            )
        if not 1 <= num_experts_per_token <= num_experts:
            raise ValueError(
                f"MixtureOfExperts: num_experts_per_token={num_experts_per_token}, but there are "
                f"num_experts={num_experts}: choose from 1 to {num_experts} for each token."
            )
        self.num_experts_per_token, self.quantization = num_experts_per_token, quantization
        self.router = nnx.Param(
            embed_dim**-0.5 * jax.random.normal(rngs.params(), (embed_dim, num_experts)),
            logical_axes=(None, None),
        )
        wide, names = (num_experts, embed_dim, mlp_dim), ("experts", "embed", "mlp")
        self.gate = normal(rngs, wide, embed_dim**-0.5, names)
        self.up = normal(rngs, wide, embed_dim**-0.5, names)
        self.down = normal(
            rngs,
            (num_experts, mlp_dim, embed_dim),
            output_scale * mlp_dim**-0.5,
            ("experts", "mlp", "embed"),
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Sends each token through its experts.

        Args:
          x: [batch, sequence, embed_dim]; the products are computed in its dtype, the router and the
            sum over a token's experts in float32.

        Returns:
          The same shape and dtype as x, and two losses of the routing, float32 scalars over all
          tokens of the batch: `load_balance` and `router_z`, see `routing_losses`.
        """
        names = ("batch", "sequence", None)
        tokens = partition_spec(names, shape=x.shape)
        # Where fsdp does not cut the tokens, its devices do the same work with the same, whole,
        # parameters, which are gathered outside; else each gathers them for its own tokens.
        rules = RULES if "fsdp" in _names(tokens) else {**RULES, "embed": None}
        # Inside a scan over layers the parameters' first axis, "layers", is gone.
        gate, up, down = (
            constrain(p[...].astype(x.dtype), p.logical_axes[-3:], rules)
            for p in (self.gate, self.up, self.down)
        )
        layout = _Layout(
            tokens,
            partition_spec(self.gate.logical_axes[-3:], rules=rules, shape=gate.shape),
            partition_spec(self.down.logical_axes[-3:], rules=rules, shape=down.shape),
        )
        local = functools.partial(
            _mixture, k=self.num_experts_per_token, layout=layout, quantization=self.quantization
        )
        if layout.axes:
            # By hand, because the compiler would gather all tokens on every device to sort them.
            local = jax.shard_map(
                local,
                in_specs=(tokens, PartitionSpec(), layout.wide, layout.wide, layout.narrow),
                out_specs=(tokens, PartitionSpec()),
                axis_names=layout.axes,
            )
        return local(constrain(x, names), self.router[...], gate, up, down)


def routing_losses(
    logits: jax.Array, chosen: jax.Array, axes: Iterable[str] = ()
) -> dict[str, jax.Array]:
    """Computes the losses that keep a router even and its logits small.

    load_balance = experts * sum over e of f_e P_e, where f_e is the part of all choices that fell
    on expert e, and P_e the mean of its probability, softmax(logits). It is 1 where all experts
    are chosen alike, and `experts` where the router is certain of the same one for every token.
    f has no gradient.

    router_z = mean over tokens of logsumexp(logits)^2.

    Args:
      logits: [tokens, num_experts], float32.
      chosen: integers [tokens, k], the experts of each token.
      axes: the manual axes of the mesh over which the tokens are spread.

    Returns:
      `load_balance` and `router_z`, scalars of the logits' dtype.

    Reference: Fedus et al., "Switch Transformers" (arXiv:2101.03961), equations 4 to 6, here for
    several experts a token; Zoph et al., "ST-MoE" (arXiv:2202.08906), equation 5.

    Example:
      >>> losses = routing_losses(jnp.zeros((4, 2)), jnp.array([[0], [1], [0], [1]]))
      >>> float(losses["load_balance"]), round(float(losses["router_z"]), 4)  # log(2)^2
      (1.0, 0.4805)
    """
    experts = logits.shape[-1]
    picked = chosen[..., None] == jnp.arange(experts)
    means = (
        jnp.mean(picked, axis=(0, 1), dtype=logits.dtype),
        jnp.mean(jax.nn.softmax(logits), axis=0),
        jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1))),
    )
    # Over all devices before they are multiplied: the mean of products would be another loss.
    fraction, probability, square = jax.lax.pmean(means, tuple(sorted(axes))) if axes else means
    return {"load_balance": experts * jnp.dot(fraction, probability), "router_z": square}


class _Layout(NamedTuple):
    """Which axes of the mesh cut what, of those that are not manual already.

    Attributes:
      tokens: of x [batch, sequence, embed_dim].
      wide: of the experts' gate and up [num_experts, embed_dim, mlp_dim].
      narrow: of the experts' down [num_experts, mlp_dim, embed_dim].
    """

    tokens: PartitionSpec
    wide: PartitionSpec
    narrow: PartitionSpec

    @property
    def axes(self) -> set[str]:
        """All of them."""
        return _names(self.tokens) | _names(self.wide) | _names(self.narrow)

    @property
    def own(self) -> set[str]:
        """The axis, at most one, along which each device has experts of its own."""
        return _names(self.wide[:1])

    @property
    def partial(self) -> tuple[str, ...]:
        """The axes along which each device has a part of the sum over experts and features."""
        return tuple(sorted((self.own - _names(self.tokens)) | _names(self.wide[2:])))


def _mixture(
    x: jax.Array,
    router: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    k: int,
    layout: _Layout,
    quantization: Quantization,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mixture of one device: its tokens x, the whole router, its parts of the experts."""
    token_axes = _names(layout.tokens)
    gathered = layout.own & token_axes
    accurate = jnp.promote_types(x.dtype, jnp.float32)
    tokens = x.reshape(-1, x.shape[-1])
    logits = jnp.dot(
        tokens.astype(accurate), router.astype(accurate), precision=jax.lax.Precision.HIGHEST
    )
    chosen_logits, chosen = jax.lax.top_k(logits, k)
    losses = routing_losses(logits, chosen, token_axes)

    # Declared to vary before they are gathered: so gradients are scattered over expert first, and
    # what is left is summed over tensor.
    routed = _varying((tokens, chosen, jax.nn.softmax(chosen_logits)), layout.axes - token_axes)
    for axis in gathered:
        routed = jax.lax.all_gather(routed, axis, tiled=True)
    tokens, chosen, shares = routed
    experts = gate.shape[0]
    for axis in layout.own:
        chosen -= experts * jax.lax.axis_index(axis)
    mine = (0 <= chosen) & (chosen < experts)

    # Sorted by expert, choices of other devices' experts last. A token chooses an expert once.
    order = jnp.argsort(jnp.where(mine, chosen, experts).ravel(), stable=True)
    rows = len(tokens) * min(k, experts)
    sizes = jnp.sum(chosen[..., None] == jnp.arange(experts), axis=(0, 1), dtype=jnp.int32)
    filled = (jnp.arange(rows) < jnp.sum(sizes))[:, None]
    # Rows of no group may come out of a product as anything. What goes in is cleared for the sake
    # of its gradients.
    order_of_rows = order[:rows]
    sorted_tokens = jnp.where(filled, tokens[order_of_rows // k], 0)
    sorted_shares = jnp.where(filled, shares.reshape(-1, 1)[order_of_rows], 0)
    product = functools.partial(_product, sizes=sizes, axes=layout.axes, quantization=quantization)
    inner = jax.nn.silu(product(sorted_tokens, gate, layout.wide, embed=1))
    inner = inner * product(sorted_tokens, up, layout.wide, embed=1)
    # The share comes before the last product, whose results no gradient needs then.
    inner = inner * sorted_shares.astype(x.dtype)
    outputs = jnp.where(filled, product(inner, down, layout.narrow, embed=2), 0)

    place = jnp.argsort(order).reshape(chosen.shape)  # of each choice among the rows, or after them
    outputs = outputs.at[place].get(mode="fill", fill_value=0, unique_indices=True)
    y = jnp.sum(outputs, axis=1, dtype=accurate).astype(x.dtype)
    for axis in gathered:
        y = jax.lax.psum_scatter(y, axis, tiled=True)
    y = jax.lax.psum(y, layout.partial) if layout.partial else y
    return y.reshape(x.shape), losses


def _product(
    rows: jax.Array,
    kernels: jax.Array,
    spec: PartitionSpec,
    *,
    embed: int,
    sizes: jax.Array,
    axes: set[str],
    quantization: Quantization,
) -> jax.Array:
    """Multiplies each expert's rows by its kernel, whose axis `embed` is gathered for it."""
    # Declared to vary before it is gathered: so gradients are scattered over fsdp first, and what
    # is left is summed over data.
    kernels = _varying(kernels, axes - _names(spec))

    def compute(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
        for axis in _names(spec[embed : embed + 1]):
            kernels = jax.lax.all_gather(kernels, axis, axis=embed, tiled=True)
        if quantization != "none":
            return quantized_grouped_matmul(rows, kernels, sizes, quantization)
        return grouped_matmul(rows, kernels, sizes)

    # Kept from one pass to the other, the gathered experts would take the memory that fsdp saves.
    return jax.checkpoint(compute, prevent_cse=False)(rows, kernels, sizes)


def _names(spec: Iterable[str | tuple[str, ...] | None]) -> set[str]:
    """The axes of the mesh that stand in a specification."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return {axis for entry in entries for axis in entry}


def _varying(values: Any, axes: set[str]) -> Any:
    # Sorted, here as elsewhere, because all processes must write the same program.
    return jax.lax.pcast(values, tuple(sorted(axes)), to="varying") if axes else values

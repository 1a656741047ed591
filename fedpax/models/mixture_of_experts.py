"""Mixture of experts: a router sends each token through a few of many feed-forward networks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from fedpax.errors import ArgumentError
from fedpax.models.layers import normal_param
from fedpax.ops.grouped_matmul import grouped_matmul
from fedpax.ops.quantization import Quantization, quantized_grouped_matmul
from fedpax.parallel.axes import RULES, constrain, entry_axes, partition_spec


class MixtureOfExperts(nnx.Module):
    """SwiGLU experts with a top-k router and no dropped tokens."""

    # y = sum of w_e expert_e(x) over the k chosen experts e, where w is the softmax over the k
    # chosen logits alone, logits = x router, and expert_e(x) = down_e (silu(gate_e x) * (up_e x)).
    # Tokens are sorted by expert, and one grouped matmul multiplies each expert with its own
    # tokens. There is no capacity: one expert may get all tokens. The axis `expert` shards the
    # experts and the batch: a device all-gathers the tokens of the other devices along it, and the
    # outputs are reduce-scattered. An all-to-all of the chosen tokens would move less on an axis of
    # more than k devices: it should be small. Mixtral (arXiv:2401.04088), section 2.1; MegaBlocks
    # (arXiv:2211.15841).

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
        """Initialize each expert as a `FeedForward`; multiply `down` by `output_scale`."""
        if num_experts < 1:
            raise ArgumentError(
                f"MixtureOfExperts: num_experts={num_experts}, expected at least 1. For a layer "
                "without experts use FeedForward."
            )
        if not 1 <= num_experts_per_token <= num_experts:
            raise ArgumentError(
                f"MixtureOfExperts: num_experts_per_token={num_experts_per_token}, but there are "
                f"num_experts={num_experts}: expected 1 to {num_experts} experts for each token."
            )
        self.num_experts_per_token, self.quantization = num_experts_per_token, quantization
        self.router = nnx.Param(
            embed_dim**-0.5 * jax.random.normal(rngs.params(), (embed_dim, num_experts)),
            logical_axes=(None, None),
        )
        wide, names = (num_experts, embed_dim, mlp_dim), ("experts", "embed", "mlp")
        self.gate = normal_param(rngs, wide, embed_dim**-0.5, names)
        self.up = normal_param(rngs, wide, embed_dim**-0.5, names)
        self.down = normal_param(
            rngs,
            (num_experts, mlp_dim, embed_dim),
            output_scale * mlp_dim**-0.5,
            ("experts", "mlp", "embed"),
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> tuple[Float[Array, "batch seq embed"], dict[str, Float[Array, ""]]]:
        """Route the tokens and apply the experts; return the output and the `routing_losses`."""
        # The experts compute in the dtype of x; the router and the sum over a token's experts are
        # in float32.
        names = ("batch", "sequence", None)
        tokens = partition_spec(names, shape=x.shape)
        # Where fsdp shards the tokens, each device gathers the parameters for its own tokens inside
        # the shard_map. Elsewhere its devices repeat the same work, with parameters gathered here.
        rules = RULES if "fsdp" in _names(tokens) else {**RULES, "embed": None}
        # A scan over layers has removed the parameters' first axis, "layers".
        gate, up, down = (
            constrain(p[...].astype(x.dtype), p.logical_axes[-3:], rules)
            for p in (self.gate, self.up, self.down)
        )
        shardings = _Shardings(
            tokens,
            partition_spec(self.gate.logical_axes[-3:], rules=rules, shape=gate.shape),
            partition_spec(self.down.logical_axes[-3:], rules=rules, shape=down.shape),
        )
        local = functools.partial(
            _mixture,
            k=self.num_experts_per_token,
            shardings=shardings,
            quantization=self.quantization,
        )
        if shardings.axes:
            # Manual, because the compiler would gather all tokens on every device to sort them.
            local = jax.shard_map(
                local,
                in_specs=(
                    tokens,
                    PartitionSpec(),
                    shardings.wide,
                    shardings.wide,
                    shardings.narrow,
                ),
                out_specs=(tokens, PartitionSpec()),
                axis_names=shardings.axes,
            )
        return local(constrain(x, names), self.router[...], gate, up, down)


def routing_losses(
    logits: Float[Array, "tokens experts"],
    chosen: Int[Array, "tokens k"],
    axes: Iterable[str] = (),
) -> dict[str, Float[Array, ""]]:
    """Compute the load-balancing loss E sum(f_e P_e) and the router z-loss of one layer."""
    # With E experts, T tokens and k experts per token, over all tokens, masked ones included,
    #     load_balance = E sum over e of f_e P_e,
    #     f_e = number of choices that fell on expert e / (k T),
    #     P_e = mean over tokens of softmax(logits)_e,
    #     router_z = mean over tokens of logsumexp(logits)^2.
    # f has no gradient. `load_balance` is 1 for balanced experts and at most E / k. The loss takes
    # its mean over layers. With `grad_accum_steps`, f and P are a microbatch's: the mean of the
    # products is not the whole batch's loss. `axes`: manual mesh axes that shard the tokens.
    # - Switch Transformers (arXiv:2101.03961), equations 4 to 6, add alpha times this value, with k
    #   = 1, for every layer: alpha = 0.01 is `load_balance_weight=0.01 * num_layers`.
    # - `router_aux_loss_coef=c` of Mixtral in Hugging Face Transformers is
    #   `load_balance_weight=k * c`, but it averages f and P over all layers before it multiplies
    #   them. Here each layer is balanced by itself.
    # router_z: Zoph et al., "ST-MoE" (arXiv:2202.08906), equation 5.
    num_experts = logits.shape[-1]
    is_chosen = chosen[..., None] == jnp.arange(num_experts)
    means = (
        jnp.mean(is_chosen, axis=(0, 1), dtype=logits.dtype),
        jnp.mean(jax.nn.softmax(logits), axis=0),
        jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1))),
    )
    # Averaged over devices before they are multiplied: a mean of products is another loss.
    fraction, probability, square = jax.lax.pmean(means, tuple(sorted(axes))) if axes else means
    return {"load_balance": num_experts * jnp.dot(fraction, probability), "router_z": square}


class _Shardings(NamedTuple):
    """Shardings of tokens and experts over the mesh axes that are not manual already."""

    tokens: PartitionSpec  # of x `[batch, seq_len, embed_dim]`
    wide: PartitionSpec  # of gate and up `[num_experts, embed_dim, mlp_dim]`
    narrow: PartitionSpec  # of down `[num_experts, mlp_dim, embed_dim]`

    @property
    def axes(self) -> set[str]:
        """Mesh axes that shard any of them."""
        return _names(self.tokens) | _names(self.wide) | _names(self.narrow)

    @property
    def expert_axes(self) -> set[str]:
        """Mesh axes, at most one, that shard the experts."""
        return _names(self.wide[:1])

    @property
    def partial_sum_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the output is summed: each device has a part of the sum."""
        return tuple(sorted((self.expert_axes - _names(self.tokens)) | _names(self.wide[2:])))


def _mixture(
    x: jax.Array,
    router: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    k: int,
    shardings: _Shardings,
    quantization: Quantization,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the mixture on one device: its tokens, the whole router, its shard of the experts."""
    token_axes = _names(shardings.tokens)
    gathered = shardings.expert_axes & token_axes
    accurate = jnp.promote_types(x.dtype, jnp.float32)
    tokens = x.reshape(-1, x.shape[-1])
    logits = jnp.dot(
        tokens.astype(accurate), router.astype(accurate), precision=jax.lax.Precision.HIGHEST
    )
    chosen_logits, chosen = jax.lax.top_k(logits, k)
    losses = routing_losses(logits, chosen, token_axes)

    # Made varying before the gather, so that gradients are reduce-scattered over `expert` before
    # the smaller remainder is summed over `tensor`.
    routed = _varying((tokens, chosen, jax.nn.softmax(chosen_logits)), shardings.axes - token_axes)
    for axis in gathered:
        routed = jax.lax.all_gather(routed, axis, tiled=True)
    tokens, chosen, weights = routed
    num_local = gate.shape[0]
    for axis in shardings.expert_axes:
        chosen -= num_local * jax.lax.axis_index(axis)
    is_local = (0 <= chosen) & (chosen < num_local)

    # Sort choices by expert, experts of other devices last. A token chooses an expert once.
    order = jnp.argsort(jnp.where(is_local, chosen, num_local).ravel(), stable=True)
    rows = len(tokens) * min(k, num_local)
    group_sizes = jnp.sum(chosen[..., None] == jnp.arange(num_local), axis=(0, 1), dtype=jnp.int32)
    filled = (jnp.arange(rows) < jnp.sum(group_sizes))[:, None]
    # The grouped matmul leaves arbitrary values in rows after the last group. Its outputs are
    # masked below, and its inputs here, for their gradients.
    order_of_rows = order[:rows]
    sorted_tokens = jnp.where(filled, tokens[order_of_rows // k], 0)
    sorted_weights = jnp.where(filled, weights.reshape(-1, 1)[order_of_rows], 0)
    matmul = functools.partial(
        _expert_matmul, group_sizes=group_sizes, axes=shardings.axes, quantization=quantization
    )
    inner = jax.nn.silu(matmul(sorted_tokens, gate, shardings.wide, embed=1))
    inner = inner * matmul(sorted_tokens, up, shardings.wide, embed=1)
    # Weighted before the last matmul, so that no gradient needs the result of that matmul.
    inner = inner * sorted_weights.astype(x.dtype)
    outputs = jnp.where(filled, matmul(inner, down, shardings.narrow, embed=2), 0)

    row = jnp.argsort(order).reshape(chosen.shape)  # of each choice; past the end if not here
    outputs = outputs.at[row].get(mode="fill", fill_value=0, unique_indices=True)
    y = jnp.sum(outputs, axis=1, dtype=accurate).astype(x.dtype)
    for axis in gathered:
        y = jax.lax.psum_scatter(y, axis, tiled=True)
    y = jax.lax.psum(y, shardings.partial_sum_axes) if shardings.partial_sum_axes else y
    return y.reshape(x.shape), losses


def _expert_matmul(
    rows: jax.Array,
    kernels: jax.Array,
    spec: PartitionSpec,
    *,
    embed: int,
    group_sizes: jax.Array,
    axes: set[str],
    quantization: Quantization,
) -> jax.Array:
    """Gather the kernels along their axis `embed`; multiply each expert's rows by its kernel."""
    # As over `expert` above.
    kernels = _varying(kernels, axes - _names(spec))

    def compute(rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array) -> jax.Array:
        for axis in _names(spec[embed : embed + 1]):
            kernels = jax.lax.all_gather(kernels, axis, axis=embed, tiled=True)
        if quantization != "none":
            return quantized_grouped_matmul(rows, kernels, group_sizes, quantization)
        return grouped_matmul(rows, kernels, group_sizes)

    # Rematerialized: stored for the backward pass, gathered kernels would take the memory that
    # fsdp saves.
    return jax.checkpoint(compute, prevent_cse=False)(rows, kernels, group_sizes)


def _names(spec: Iterable[str | tuple[str, ...] | None]) -> set[str]:
    return {axis for entry in spec for axis in entry_axes(entry)}


def _varying(values: chex.ArrayTree, axes: set[str]) -> Any:
    # Sorted, because all processes must compile the same program.
    return jax.lax.pcast(values, tuple(sorted(axes)), to="varying") if axes else values

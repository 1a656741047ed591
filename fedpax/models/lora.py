"""Low-rank adaptation (LoRA) of a transformer: small trained matrices beside frozen weights.

The model's parameters stay, and every adapted weight W gets an adapter, so that

    x W   becomes   x W + (alpha / rank) (x A) B.

    adapters = lora.init(key, params, config)
    algorithm = fedavg(lora.adapter_loss(loss_fn, params, config), ...)
    state = algorithm.init(adapters)
    ...
    huggingface.save(folder, model_config, lora.merge(params, state.params, config))

Under `jax.jit`, pass `params` as an argument, so that arrays do not become constants.

Reference:
    Hu et al., arXiv:2106.09685, section 4.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from fedpax.algorithm import Params
from fedpax.checks import CheckedConfig, CountOrZero, Positive
from fedpax.errors import ArgumentError

__all__ = [
    "LoRAConfig",
    "adapter_loss",
    "attach",
    "init",
    "logical_axes",
    "merge",
]

BatchT = TypeVar("BatchT")
ResultT = TypeVar("ResultT")

NUM_INPUTS: Mapping[str, int] = {
    "query": 1,
    "key": 1,
    "value": 1,
    "output": 2,
    "gate": 1,
    "up": 1,
    "down": 1,
}
"""The weights of a layer that can have adapters, and their numbers of input axes."""


@dataclass(frozen=True)
class LoRAConfig(CheckedConfig):
    """The size of the adapters, and the weights that have one.

    Attributes:
        rank: number of columns of A and rows of B. In an experiment, 0 trains the whole model.
        alpha: the update A B is multiplied by alpha / rank.
        targets: names of the weights with an adapter, in every layer: query, key, value and output
            of attention; gate, up and down of the feed-forward network. Default (): all of them;
            of a mixture of experts only the weights of attention.

    Raises:
        ValueError: a number is out of range, or there is no weight of a name.
    """

    group = "lora"
    rank: CountOrZero = 8
    alpha: Positive = 16.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the ranges and the names."""
        super().__post_init__()
        if unknown := [name for name in self.targets if name not in NUM_INPUTS]:
            raise ArgumentError(
                f"lora.targets has {', '.join(unknown)}: expected names among "
                f"{', '.join(NUM_INPUTS)}, or none for all of them."
            )

    @property
    def scale(self) -> float:
        """The factor of an update, alpha / rank."""
        return self.alpha / self.rank


def init(key: jax.Array, params: Params, config: LoRAConfig) -> Params:
    """Make new adapters, with which the model computes what it computes without them.

    A is random, from a normal distribution of variance 1 / inputs; B is zero.

    Args:
        key: a random key.
        params: the transformer's parameters, or their shapes.
        config: the adapters' size.

    Returns:
        Nested dicts in the structure of `params` with `a`, `[layers, *inputs, rank]`, and `b`,
        `[layers, rank, *outputs]`, for each adapted weight; float32.

    Raises:
        ValueError: `config.rank` is 0, or the model has no weights of the names in
            `config.targets`.

    Example:
        >>> from fedpax.models import TransformerConfig, transformer
        >>> model = transformer(TransformerConfig(num_layers=2, embed_dim=64, num_heads=2))
        >>> params = jax.eval_shape(model.init, jax.random.key(0))
        >>> adapters = init(jax.random.key(1), params, LoRAConfig(rank=4, targets=("query",)))
        >>> jax.tree.map(jnp.shape, adapters)
        {'layers': {'attention': {'query': {'a': (2, 64, 4), 'b': (2, 4, 2, 32)}}}}
    """
    keys = iter(jax.random.split(key, len(NUM_INPUTS)))

    def make(weight: Any, num_stacked: int, num_inputs: int) -> Params:
        stacked, inner = weight.shape[:num_stacked], weight.shape[num_stacked:]
        inputs, outputs = inner[:num_inputs], inner[num_inputs:]
        stddev = math.prod(inputs) ** -0.5
        a = stddev * jax.random.normal(next(keys), (*stacked, *inputs, config.rank))
        return {"a": a, "b": jnp.zeros((*stacked, config.rank, *outputs))}

    return _map_targets(
        make, params, len(params["layers"]["attention_norm"]["scale"].shape), config
    )


def logical_axes(model_axes: Params, config: LoRAConfig) -> Params:
    """Name the axes of the adapters after the weights' axes; the rank's axis has no name."""

    def make(names: tuple[str | None, ...], num_stacked: int, num_inputs: int) -> Params:
        end = num_stacked + num_inputs
        return {"a": (*names[:end], None), "b": (*names[:num_stacked], None, *names[end:])}

    return _map_targets(
        make, model_axes, len(model_axes["layers"]["attention_norm"]["scale"]), config
    )


def attach(params: Params, adapters: Params, config: LoRAConfig) -> Params:
    """Replace each adapted weight by an `AdaptedWeight`, for the functions of `transformer`."""
    return _replace(
        params,
        adapters,
        lambda weight, adapter, _: AdaptedWeight(weight, **adapter, scale=config.scale),
    )


def merge(params: Params, adapters: Params, config: LoRAConfig) -> Params:
    """Add adapters to the weights: W + (alpha / rank) A B.

    Args:
        params: the transformer's parameters. They keep their dtypes: cast bfloat16 weights to
            float32 first.
        adapters: its adapters.
        config: the adapters' size.

    Example:
        >>> tree = lambda down: {"layers": {"feed_forward": {"down": down}}}
        >>> params = tree(jnp.zeros((1, 3, 2)))  # one layer
        >>> adapters = tree({"a": jnp.ones((1, 3, 4)), "b": jnp.ones((1, 4, 2))})
        >>> merged = merge(params, adapters, LoRAConfig(rank=4, alpha=8, targets=("down",)))
        >>> merged["layers"]["feed_forward"]["down"][0].tolist()  # 8 / 4 A B
        [[8.0, 8.0], [8.0, 8.0], [8.0, 8.0]]
    """

    def merged(weight: jax.Array, adapter: Params, num_inputs: int) -> jax.Array:
        return merge_weight(AdaptedWeight(weight, **adapter, scale=config.scale), num_inputs)

    return _replace(params, adapters, merged)


def adapter_loss(
    loss_fn: Callable[[Params, BatchT], ResultT], params: Params, config: LoRAConfig
) -> Callable[[Params, BatchT], ResultT]:
    """Make the loss of adapters from the loss of a model.

    Args:
        loss_fn: `(params, batch) -> (loss, aux)`, such as `transformer_loss(...)`.
        params: the transformer's parameters.
        config: the adapters' size.

    Example:
        >>> from fedpax.models import TransformerConfig, transformer, transformer_loss
        >>> config = TransformerConfig(num_layers=2, embed_dim=64, num_heads=2)
        >>> params = jax.jit(transformer(config).init)(jax.random.key(0))
        >>> text = jnp.frombuffer(b"to be or not to be", jnp.uint8).astype(int)[None]
        >>> batch = {"inputs": text[:, :-1], "targets": text[:, 1:]}
        >>> loss_fn, config = transformer_loss(config), LoRAConfig(rank=2)
        >>> adapters = init(jax.random.key(1), params, config)
        >>> loss, _ = adapter_loss(loss_fn, params, config)(adapters, batch)
        >>> bool(jnp.allclose(loss, loss_fn(params, batch)[0]))  # B is zero before training
        True
    """

    def loss(adapters: Params, batch: BatchT) -> ResultT:
        return loss_fn(attach(params, adapters, config), batch)

    return loss


def _map_targets(
    make: Callable[[Any, int, int], Params], tree: Params, norm_ndim: int, config: LoRAConfig
) -> Params:
    """Call `make(leaf, num_stacked, num_inputs)` for the leaf of each adapted weight."""
    if not config.rank:
        raise ArgumentError("lora.rank=0 means no adapters: expected a rank of at least 1.")
    num_stacked = norm_ndim - 1
    adapters: dict[str, dict[str, Params]] = {}
    for module in ("attention", "feed_forward"):
        weights = tree["layers"][module]
        if "router" in weights:
            continue  # experts have other matmuls
        for name in NUM_INPUTS:
            if name in weights and (not config.targets or name in config.targets):
                made = make(weights[name], num_stacked, NUM_INPUTS[name])
                adapters.setdefault(module, {})[name] = made
    names = {name for weights in adapters.values() for name in weights}
    if missing := [name for name in config.targets if name not in names]:
        raise ArgumentError(
            f"lora.targets has {', '.join(missing)}, which the model's layers do not have as one "
            "weight (experts of a mixture cannot have adapters): leave these names out."
        )
    return {"layers": adapters}


def _replace(
    params: Params, adapters: Params, function: Callable[[Any, Params, int], Any], name: str = ""
) -> Any:
    """Replace each adapted weight by `function(weight, {"a": ..., "b": ...}, num_inputs)`."""
    if adapters.keys() == {"a", "b"}:
        return function(params, adapters, NUM_INPUTS[name])
    return params | {
        name: _replace(params[name], below, function, name) for name, below in adapters.items()
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """A weight W with an adapter of rank r: W + scale A B, of which no matrix is computed."""

    # A pytree, so stacked layers can be scanned.

    weight: jax.Array  # W, `[..., *inputs, *outputs]`, where `...` are the axes of stacked layers
    a: jax.Array  # A, `[..., *inputs, rank]`
    b: jax.Array  # B, `[..., rank, *outputs]`
    scale: float = dataclasses.field(metadata={"static": True})  # alpha / rank


def merge_weight(adapted: AdaptedWeight, num_inputs: int) -> jax.Array:
    """Compute W + scale A B, in float32 at least, in the shape and dtype of W."""
    weight, a, b = adapted.weight, adapted.a, adapted.b
    num_stacked = a.ndim - num_inputs - 1
    letters = "ijklmnopq"[: weight.ndim]
    stacked, inner = letters[:num_stacked], letters[num_stacked:]
    inputs, outputs = inner[:num_inputs], inner[num_inputs:]
    accurate = jnp.promote_types(weight.dtype, jnp.float32)
    update = jnp.einsum(
        f"{stacked}{inputs}r,{stacked}r{outputs}->{letters}",
        a.astype(accurate),
        b.astype(accurate),
        precision="highest",
    )
    return (weight.astype(accurate) + adapted.scale * update).astype(weight.dtype)

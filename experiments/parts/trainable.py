"""The parameters that an experiment trains: a whole transformer, or adapters of a frozen one."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax

from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.models import lora
from fedpax.models.lora import LoRAConfig
from fedpax.models.transformer import TransformerConfig
from fedpax.parallel.axes import ShardingTree
from fedpax.training.stored_params import StoredParams, with_frozen_argument

NO_ADAPTERS = LoRAConfig(rank=0)

Evaluation = TypeVar("Evaluation")


class Trainable(NamedTuple):
    """The parameters that a run trains: a whole transformer, or adapters of a frozen one."""

    init: Callable[[jax.Array], Params]  # `key -> params`
    logical_axes: Params  # the logical axes of the parameters
    shardings: ShardingTree  # the shardings of the parameters
    flops_per_token: float  # floating-point operations per token, forward and backward
    flops_convention: str  # what they count, in words
    # the initial parameters, where they are read from a folder, as in `Run`
    initial: StoredParams | None = None
    frozen: StoredParams | None = None  # the transformer below adapters, as in `Run`
    # `params -> parameters of the transformer`, as in `Run`
    whole_model: Callable[[Params], Params] | None = None
    lora: LoRAConfig = NO_ADAPTERS  # the adapters' size

    def algorithm(
        self, make: Callable[[LossFn], FederatedAlgorithm], loss_fn: LossFn
    ) -> FederatedAlgorithm:
        """Make an algorithm that trains these parameters."""
        if self.frozen is None:
            return make(loss_fn)
        return with_frozen_argument(
            lambda base: make(lora.adapter_loss(loss_fn, base, self.lora)), self.frozen.shapes
        )

    def evaluate(
        self, make: Callable[[LossFn], Callable[[Params], Evaluation]], loss_fn: LossFn
    ) -> Callable[[Params], Evaluation]:
        """Make a function that evaluates these parameters."""
        frozen = self.frozen
        if frozen is None:
            return make(loss_fn)

        def adapted(params: Any, batch: Any) -> tuple[jax.Array, Metrics | None]:
            base, adapters = params
            return lora.adapter_loss(loss_fn, base, self.lora)(adapters, batch)

        evaluate = make(adapted)
        return lambda adapters: evaluate((frozen.load(), adapters))


def describe_flops(config: TransformerConfig, seq_len: int, adapters: LoRAConfig) -> str:
    """Describe the floating-point operations of a token that MFU counts."""
    active = "active " if config.num_experts else ""
    if adapters.rank:
        terms = "4 N + 6 A", f"N frozen {active}parameters in matmuls, A parameters of adapters"
    else:
        terms = "6 N", f"N {active}parameters in matmuls"
    window = config.sliding_window
    if window is not None and window < seq_len:
        keys = f"the T = {window} keys of the sliding window"
    else:
        keys = f"all T = {seq_len} keys"
    return f"{terms[0]} + 12 L H d T for {terms[1]} and {keys}; no recomputation"

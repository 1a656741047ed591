"""Models in flax.nnx as pure functions of their parameters, and their losses.

`transformer`, `mlp`, `cnn` and `resnet` make a `FunctionalModel` from a configuration.
`fedpax.models.attention` implements attention, `fedpax.models.presets` has configurations of known
transformers, `fedpax.models.huggingface` reads and writes Hugging Face folders, and
`fedpax.models.lora` trains low-rank adapters.
"""

from fedpax.models.classifiers import CNNConfig, MLPConfig, cnn, mlp
from fedpax.models.generation import generate
from fedpax.models.losses import (
    ModelLoss,
    accumulate_gradients,
    classification_loss,
    cross_entropy,
    next_token_loss,
    squared_error_loss,
    transformer_loss,
)
from fedpax.models.nnx_functional import FunctionalModel, to_functional
from fedpax.models.resnet import ResNetConfig, resnet
from fedpax.models.transformer import transformer
from fedpax.models.transformer_config import (
    TransformerConfig,
    flops_per_token,
    model_flops_utilization,
)
from fedpax.ops.chunked_loss import chunked_cross_entropy

__all__ = [
    "CNNConfig",
    "FunctionalModel",
    "MLPConfig",
    "ModelLoss",
    "ResNetConfig",
    "TransformerConfig",
    "accumulate_gradients",
    "chunked_cross_entropy",
    "classification_loss",
    "cnn",
    "cross_entropy",
    "flops_per_token",
    "generate",
    "mlp",
    "model_flops_utilization",
    "next_token_loss",
    "resnet",
    "squared_error_loss",
    "to_functional",
    "transformer",
    "transformer_loss",
]

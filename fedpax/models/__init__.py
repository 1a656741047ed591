"""Models in flax.nnx as pure functions of their parameters, and their losses."""

from fedpax.lazy_names import public_names as _public_names
from fedpax.models.classifiers import CNNConfig as CNNConfig
from fedpax.models.classifiers import MLPConfig as MLPConfig
from fedpax.models.classifiers import cnn as cnn
from fedpax.models.classifiers import mlp as mlp
from fedpax.models.generation import generate as generate
from fedpax.models.losses import ModelLoss as ModelLoss
from fedpax.models.losses import accumulate_gradients as accumulate_gradients
from fedpax.models.losses import classification_loss as classification_loss
from fedpax.models.losses import cross_entropy as cross_entropy
from fedpax.models.losses import next_token_loss as next_token_loss
from fedpax.models.losses import squared_error_loss as squared_error_loss
from fedpax.models.losses import transformer_loss as transformer_loss
from fedpax.models.nnx_functional import FunctionalModel as FunctionalModel
from fedpax.models.nnx_functional import to_functional as to_functional
from fedpax.models.resnet import ResNetConfig as ResNetConfig
from fedpax.models.resnet import resnet as resnet
from fedpax.models.transformer import transformer as transformer
from fedpax.models.transformer_config import TransformerConfig as TransformerConfig
from fedpax.models.transformer_config import flops_per_token as flops_per_token
from fedpax.models.transformer_config import model_flops_utilization as model_flops_utilization
from fedpax.ops.chunked_loss import chunked_cross_entropy as chunked_cross_entropy

__all__ = _public_names(globals())

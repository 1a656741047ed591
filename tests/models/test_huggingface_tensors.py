"""The tensors that hold the parameters of a transformer."""

from fedpax.models import TransformerConfig
from fedpax.models.huggingface.tensors import bounds_of, flatten, stored_parameters


def test_a_layer_of_a_parameter_has_a_tensor_with_merged_heads():
    query = stored_parameters(TransformerConfig())["layers.attention.query"]
    assert query.shape == (4, 192, 3, 64)  # layers, embed_dim, heads, head_dim
    assert query.tensor_shape == (192, 192)
    assert query.name((3,)) == "model.layers.3.self_attn.q_proj.weight"


def test_bounds_of_a_shard():
    assert bounds_of((slice(None), slice(2, 4)), (3, 8)) == ((0, 3), (2, 4))
    assert bounds_of(None, (3, 8)) == ((0, 3), (0, 8))


def test_leaves_have_dotted_paths():
    tree = {"final_norm": {"scale": 1}, "embedding": 2}
    assert flatten(tree) == {"embedding": 2, "final_norm.scale": 1}

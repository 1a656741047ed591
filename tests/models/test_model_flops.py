import numpy as np
import pytest

from fedpax.models.transformer_config import flops_per_token, model_flops_utilization
from fedpax.planning import CHIPS


def llama_8b(causal: bool = False) -> float:
    """Count Llama 3.1 8B at 8,192 tokens; its input embedding is only looked up."""
    embed_dim, num_layers, num_heads, num_kv_heads, head_dim, mlp = 4096, 32, 32, 8, 128, 14336
    attention = embed_dim * head_dim * 2 * (num_heads + num_kv_heads)
    layer = attention + 3 * embed_dim * mlp + 2 * embed_dim
    num_params = 128256 * embed_dim + num_layers * layer + embed_dim
    return flops_per_token(num_params, num_layers, num_heads, head_dim, 8192, causal)


def test_the_published_row_of_llama_on_v6e():
    """MaxText: 7,207 tokens per second and device on v6e-256 are 45.46%."""
    per_device = 7207.0
    share = model_flops_utilization(256 * per_device, llama_8b(), 256, CHIPS["v6e"].peak_flops)
    assert share == pytest.approx(0.4546, abs=0.001)
    causal = model_flops_utilization(per_device, llama_8b(causal=True), 1, 918e12)
    assert causal < 0.41  # the other convention is another figure


def test_the_published_row_of_palm():
    """PaLM 540B: 238.3k tokens per second on 6,144 v4 are 46.2% (arXiv:2204.02311, table 3)."""
    tokens = flops_per_token(540.35e9, 118, 48, 256, 2048)
    share = model_flops_utilization(238.3e3, tokens, 6144, CHIPS["v4"].peak_flops)
    assert share == pytest.approx(0.462, abs=0.001)


def test_flops_equal_those_of_all_matmuls():
    """Two FLOPs per multiplication, once in the forward pass, twice in the backward pass."""
    random = np.random.default_rng(0)
    for _ in range(10):
        embed_dim, num_heads, head_dim, mlp, seq_len, num_layers = random.integers(1, 64, 6)
        weights = [(embed_dim, num_heads * head_dim)] * 3 + [(num_heads * head_dim, embed_dim)]
        weights += [(embed_dim, mlp), (mlp, embed_dim)]
        forward = sum(2 * seq_len * rows * columns for rows, columns in weights)
        forward += num_heads * 2 * (2 * seq_len * head_dim * seq_len)  # scores, and with the values
        num_params = num_layers * sum(rows * columns for rows, columns in weights)
        counted = flops_per_token(num_params, num_layers, num_heads, head_dim, seq_len)
        assert counted * seq_len == 3 * forward * num_layers
        halved = flops_per_token(num_params, num_layers, num_heads, head_dim, seq_len, causal=True)
        attention = 3 * num_layers * num_heads * 4 * seq_len * seq_len * head_dim
        assert (counted - halved) * seq_len == attention / 2

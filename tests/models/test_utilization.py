import numpy as np
import pytest

from fedpax.models.utilization import flops_per_token, model_flops_utilization
from fedpax.planning.chips import CHIPS


def llama_8b(causal: bool = False) -> float:
    """Llama-3.1-8B at length 8192; its input embedding is only looked up."""
    width, layers, heads, key_value_heads, head_width, mlp = 4096, 32, 32, 8, 128, 14336
    attention = width * head_width * 2 * (heads + key_value_heads)
    layer = attention + 3 * width * mlp + 2 * width
    parameters = 128256 * width + layers * layer + width
    return flops_per_token(parameters, layers, heads, head_width, 8192, causal)


def test_the_published_row_of_llama_on_v6e():
    """MaxText: 7,207 tokens a second on a device of v6e-256 are 45.46%."""
    per_device = 7207.0
    share = model_flops_utilization(256 * per_device, llama_8b(), 256, CHIPS["v6e"].peak_flops)
    assert share == pytest.approx(0.4546, abs=0.001)
    causal = model_flops_utilization(per_device, llama_8b(causal=True), 1, 918e12)
    assert causal < 0.41  # the other convention is another figure


def test_the_published_row_of_palm():
    """PaLM 540B: 238.3k tokens a second on 6,144 v4 are 46.2% (arXiv:2204.02311, table 3)."""
    tokens = flops_per_token(540.35e9, 118, 48, 256, 2048)
    share = model_flops_utilization(238.3e3, tokens, 6144, CHIPS["v4"].peak_flops)
    assert share == pytest.approx(0.462, abs=0.001)


def test_it_counts_the_products_of_a_layer():
    """Against the products written out: two FLOPs for each, once forward, twice backward."""
    random = np.random.default_rng(0)
    for _ in range(10):
        width, heads, head_width, mlp, length, layers = random.integers(1, 64, 6)
        weights = [(width, heads * head_width)] * 3 + [(heads * head_width, width)]
        weights += [(width, mlp), (mlp, width)]
        forward = sum(2 * length * rows * columns for rows, columns in weights)
        forward += heads * 2 * (2 * length * head_width * length)  # scores, and with the values
        parameters = layers * sum(rows * columns for rows, columns in weights)
        counted = flops_per_token(parameters, layers, heads, head_width, length)
        assert counted * length == 3 * forward * layers
        halved = flops_per_token(parameters, layers, heads, head_width, length, causal=True)
        attention = 3 * layers * heads * 4 * length * length * head_width
        assert (counted - halved) * length == attention / 2

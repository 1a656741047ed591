from dataclasses import replace
from typing import Any

import jax
import pytest

from fedpax.models import presets
from fedpax.models.transformer import TransformerConfig, transformer

SMALL = TransformerConfig(
    vocab_size=23,
    num_layers=2,
    embed_dim=24,
    num_heads=6,
    num_kv_heads=2,
    mlp_dim=20,
    rope_base=50.0,
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_layers": 1, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32},
        {"tied_embeddings": False, "feed_forward": "gelu", "qk_norm": True},
        {"num_experts": 5, "num_experts_per_token": 3, "num_pipeline_repeats": 2},
    ],
    ids=str,
)
def test_parameters_are_counted(change: dict[str, Any]) -> None:
    config = replace(SMALL, **change)
    shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))
    assert config.num_params() == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    # A token uses 3 of 5 experts.
    experts = sum(
        leaf.size for leaf in jax.tree.leaves(shapes["layers"]["feed_forward"]) if leaf.ndim > 4
    )
    assert config.num_params() - config.num_active_params() == experts * 2 // 5


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        (presets.base_100k, 1.03e5, 1.03e5),
        (presets.base_1m, 1.10e6, 1.10e6),
        (presets.base_100m, 102e6, 102e6),
        (presets.pax_c4_1b, 1.10e9, 1.10e9),
        (presets.pax_c4_16b, 16.5e9, 16.5e9),
        (presets.llama_3_1_8b, 8.03e9, 8.03e9),
        (presets.llama_3_1_70b, 70.6e9, 70.6e9),
        (presets.mixtral_8x7b, 46.7e9, 12.9e9),
    ],
)
def test_presets_have_the_published_sizes(preset: Any, total: float, active: float) -> None:
    config = preset()
    # Shapes only: a preset may have 280 GB of parameters.
    shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert count == config.num_params() == pytest.approx(total, rel=0.005)
    assert config.num_active_params() == pytest.approx(active, rel=0.005)


@pytest.mark.parametrize(
    ("preset", "norm_eps", "scale_embeddings"),
    [
        (presets.llama_3_1_8b, 1e-5, False),
        (presets.llama_3_1_70b, 1e-5, False),
        (presets.mixtral_8x7b, 1e-5, False),
        (presets.pax_c4_1b, 1e-6, True),
        (presets.pax_c4_16b, 1e-6, True),
    ],
)
def test_presets_have_the_published_norm_epsilon_and_embedding_scale(
    preset: Any, norm_eps: float, scale_embeddings: bool
) -> None:
    """Compare with published configurations: `rms_norm_eps`, praxis' `scale_sqrt_depth`."""
    config = preset()
    assert (config.norm_eps, config.scale_embeddings) == (norm_eps, scale_embeddings)


def test_flops_of_a_token_give_published_utilizations() -> None:
    # Llama 3.1 8B on 256 TPU v6e of 918 TFLOP/s: 7,207 tokens/s a device are 45.46%.
    flops = presets.llama_3_1_8b().flops_per_token(8192)
    assert 7207 * flops / 918e12 == pytest.approx(0.4546, abs=5e-4)


def test_flops_equal_those_of_all_matmuls() -> None:
    """Counted matmul by matmul, for full attention and for the visible keys of each token."""
    config = replace(SMALL, tied_embeddings=False, sliding_window=5)
    seq_len, embed_dim, head = 12, 24, 4
    weights = embed_dim * head * (6 + 2 + 2 + 6) + 3 * embed_dim * 20
    for causal in (False, True):
        scores = 0.0
        for t in range(seq_len):
            seen = min(t + 0.5, 5) if causal else 5  # half of its own score counts
            scores += 2 * 6 * head * seen / seq_len
        expected = 6 * (config.num_layers * (weights + scores) + 23 * embed_dim)
        norms = 6 * embed_dim * (2 * config.num_layers + 1)
        assert config.flops_per_token(seq_len, causal) == pytest.approx(expected + norms)


def test_flops_of_a_mixture_count_its_active_experts() -> None:
    mixture = replace(SMALL, num_experts=7, num_experts_per_token=2)
    wide = replace(SMALL, mlp_dim=2 * SMALL.mlp_dim)
    router = 6 * SMALL.num_layers * SMALL.embed_dim * 7
    assert mixture.flops_per_token(64) == wide.flops_per_token(64) + router


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kv_heads": 4}, r"num_kv_heads=4 .* num_heads=6: use one of \[1, 2, 3, 6\]"),
        ({"embed_dim": 25}, "num_heads=6 does not divide embed_dim=25: .* set head_dim"),
        ({"head_dim": 5}, "5 features.*set an even head_dim"),
        ({"num_layers": 0}, "num_layers=0: expected a positive number"),
        ({"head_dim": 0}, "head_dim=0: expected a positive number"),
        ({"norm_eps": 0.0}, "norm_eps=0.0: expected a positive number"),
        ({"rope_base": -1.0}, "rope_base=-1.0: expected a positive number"),
        ({"logit_softcap": 0.0}, "logit_softcap=0.0: expected a positive number"),
        ({"dtype": "float8"}, "dtype='float8': use 'float32'"),
        ({"remat": True}, "remat=True: use 'none', 'full'"),
        ({"attention": "flash"}, "attention='flash': use 'auto', .* or 'splash'"),
        (
            {"num_experts": 2, "num_experts_per_token": 3},
            "num_experts_per_token=3, .*num_experts=2: expected at most 2",
        ),
        ({"num_experts": 2, "feed_forward": "gelu"}, "experts need feed_forward='swiglu'"),
        ({"num_pipeline_repeats": 3}, "num_pipeline_repeats=3 does not divide num_layers=2"),
    ],
)
def test_invalid_settings_raise(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **change)

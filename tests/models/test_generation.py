import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpax.models.generation import generate, nucleus_filter
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.parallel.axes import shardings
from fedpax.parallel.mesh import make_mesh

Draw = Callable[[FunctionalModel], Any]
SMALL = TransformerConfig(
    vocab_size=23,
    num_layers=2,
    embed_dim=24,
    num_heads=6,
    num_kv_heads=2,
    mlp_dim=20,
    rope_base=50.0,
)


def draw_prompt(batch: int = 3, length: int = 6) -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    return random.integers(0, 23, (batch, length)).astype(np.int32), np.array([6, 1, 4])


LONGEST = 6 + 9  # a token has no effect on logits before it


@functools.cache
def logits_of(config: TransformerConfig) -> Any:
    return jax.jit(transformer(config).apply)


def decode_without_cache(
    config: TransformerConfig, params: Any, prompt: Any, tokens: int
) -> list[int]:
    """Decode greedily, each token from the whole text before it."""
    text = np.zeros((1, LONGEST), np.int32)
    end = len(prompt) + tokens
    text[0, : len(prompt)] = prompt
    for t in range(len(prompt), end):
        text[0, t] = np.argmax(logits_of(config)(params, text)[0, t - 1])
    return text[0, len(prompt) : end].tolist()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"sliding_window": 3, "tied_embeddings": False, "qk_norm": True},
        pytest.param(
            {"num_experts": 4, "logit_softcap": 5.0, "num_pipeline_repeats": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_generation_equals_decoding_without_a_cache(
    random_params: Draw, change: dict[str, Any]
) -> None:
    config = replace(SMALL, **change)
    params = random_params(transformer(config))
    prompt, lengths = draw_prompt()
    result = generate(params, config, prompt, num_tokens=9, prompt_lengths=lengths, temperature=0.0)
    assert result.shape == (3, 9) and result.dtype == jnp.int32
    for row, length, generated in zip(prompt, lengths, result, strict=True):
        assert generated.tolist() == decode_without_cache(config, params, row[:length], 9)


@pytest.mark.slow
def test_generation_on_a_mesh_equals_one_device(random_params: Draw) -> None:
    model = transformer(SMALL)
    params, (prompt, lengths) = random_params(model), draw_prompt()
    run = partial(
        generate, config=SMALL, prompt=prompt, num_tokens=6, prompt_lengths=lengths, temperature=0.0
    )
    mesh = make_mesh(devices=jax.devices()[:4], fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        result = run(jax.device_put(params, shardings(model.logical_axes, params, mesh)))
    np.testing.assert_array_equal(result, run(params))


def test_explicit_axes_raise() -> None:
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="got a mesh with explicit axes"):
        generate({}, SMALL, draw_prompt()[0], num_tokens=1, temperature=0.0)


def test_tokens_behind_a_prompt_are_ignored(random_params: Draw) -> None:
    params = random_params(transformer(SMALL))
    prompt, lengths = draw_prompt()
    padded = np.where(np.arange(6) < lengths[:, None], prompt, 22)
    first, other = (
        generate(params, SMALL, p, num_tokens=5, prompt_lengths=lengths, key=jax.random.key(2))
        for p in (prompt, padded)
    )
    np.testing.assert_array_equal(first, other)


@pytest.mark.slow
def test_tokens_are_sampled_by_their_probability(random_params: Draw) -> None:
    params = random_params(transformer(SMALL))
    prompt = np.tile(draw_prompt()[0][:1], (4000, 1))
    sampled = generate(params, SMALL, prompt, num_tokens=1, key=jax.random.key(0), temperature=2.0)
    logits = jax.jit(transformer(SMALL).apply)(params, prompt[:1])[0, -1]
    expected = jax.nn.softmax(logits / 2)
    result = np.bincount(sampled[:, 0], minlength=23) / 4000
    # Four standard deviations of a frequency among 4000.
    assert np.all(np.abs(result - expected) < 4 * np.sqrt(expected * (1 - expected) / 4000) + 1e-3)
    few = generate(params, SMALL, prompt, num_tokens=1, key=jax.random.key(0), top_p=0.5)
    kept = np.flatnonzero(np.isfinite(nucleus_filter(logits, 0.5)))
    assert set(np.unique(few)) <= set(kept.tolist()) and len(kept) < 23


def test_nucleus_keeps_the_fewest_that_reach_the_probability() -> None:
    logits = np.random.default_rng(0).normal(size=(50, 17)).astype(np.float32)
    kept = np.isfinite(nucleus_filter(logits, 0.7))
    probabilities = np.asarray(jax.nn.softmax(logits))
    for row, keep in zip(probabilities, kept, strict=True):
        assert row[keep].sum() >= 0.7 > row[keep].sum() - row[keep].min()
        assert row[keep].min() >= row[~keep].max()


def test_samples_depend_on_the_key(random_params: Draw) -> None:
    params = random_params(transformer(SMALL))
    prompt, _ = draw_prompt()
    first, same, other = (
        generate(params, SMALL, prompt, num_tokens=8, key=jax.random.key(seed), temperature=3.0)
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": np.zeros(3, int)}, r"shape \(3,\).*prompt\[None\]"),
        ({"prompt": np.zeros((1, 3))}, "expected integers"),
        ({"prompt": [[1, 2, 23], [0, 0, 0], [0, 0, 0]]}, r"prompt\[0, 2\]=23: expected .* 0 to 22"),
        ({"prompt": [[1, 2], [0, -1], [0, 0]]}, r"prompt\[1, 1\]=-1: .* Use the tokenizer that"),
        ({"num_tokens": 0}, "num_tokens=0: .* at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0 .* set temperature=0"),
        ({"temperature": float("nan")}, "temperature=nan .*expected a temperature of at least 0"),
        ({"top_p": 0.0}, "top_p=0.0: .* 0 < top_p <= 1"),
        ({"key": None}, r"pass key=jax.random.key\(seed\)"),
        ({"prompt_lengths": np.array([1, 2])}, r"prompt_lengths has shape \(2,\).*shape \(3,\)"),
        ({"prompt_lengths": np.array([1, 0, 7])}, r"prompt_lengths=\[1 0 7\]: expected 1 to 6"),
    ],
)
def test_invalid_arguments_raise(change: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {
        "prompt": draw_prompt()[0],
        "num_tokens": 2,
        "key": jax.random.key(0),
    }
    options |= change
    with pytest.raises(ValueError, match=words):
        generate({}, SMALL, options.pop("prompt"), **options)

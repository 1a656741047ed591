from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpax.ops.chunked_loss import chunked_cross_entropy


def draw(batch: int = 3, seq_len: int = 7, vocab_size: int = 13) -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    features = random.normal(size=(batch, seq_len, 5))
    table = 2 * random.normal(size=(vocab_size, 5))
    targets = random.integers(0, vocab_size, (batch, seq_len)).astype(np.int32)
    return features, table, targets, random.random((batch, seq_len)) * (targets > 2)


def reference(
    features: Any, table: Any, targets: Any, mask: Any, softcap: float | None, z_loss_weight: float
) -> Any:
    """Compute the loss with all logits at once."""
    logits = features @ table.T
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    z = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    entropy = z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(mask * (entropy + z_loss_weight * z**2)) / mask.sum(), jnp.sum(
        mask * entropy
    ) / mask.sum()


@pytest.mark.each_value
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 4, 21, 1000])
@pytest.mark.parametrize(("softcap", "z_loss"), [(None, 0.0), (2.5, 0.3)])
def test_equals_all_logits_at_once(chunk: int, softcap: float | None, z_loss: float) -> None:
    with jax.enable_x64(True):
        features, table, targets, mask = draw()
        options: Any = {"softcap": softcap, "z_loss_weight": z_loss}
        chunked = partial(
            chunked_cross_entropy, targets=targets, mask=mask, tokens_per_chunk=chunk, **options
        )
        differentiated = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True))
        (loss, entropy), gradient = differentiated(features, table)
        plain = partial(reference, targets=targets, mask=mask, **options)
        (expected, of_entropy), expected_gradient = jax.jit(
            jax.value_and_grad(plain, (0, 1), has_aux=True)
        )(features, table)
        without_gradient = jax.jit(chunked)(features, table)
    np.testing.assert_allclose([loss, entropy], [expected, of_entropy], rtol=1e-9)
    np.testing.assert_allclose(without_gradient, [expected, of_entropy], rtol=1e-9)
    chex.assert_trees_all_close(gradient, expected_gradient, rtol=1e-9)


def test_all_weights_zero_give_zero() -> None:
    features, table, targets, mask = (np.float32(x) for x in draw())
    loss_fn = jax.jit(jax.value_and_grad(chunked_cross_entropy, (0, 1), has_aux=True))
    (loss, _), gradient = loss_fn(features, table, targets.astype(int), 0 * mask)
    assert loss == 0 and all(not np.any(leaf) for leaf in gradient)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    features, table, targets, mask = draw(vocab_size=4000)
    args = jnp.asarray(features, jnp.bfloat16), jnp.asarray(table, jnp.float32), targets, mask
    loss_fn = jax.jit(jax.value_and_grad(chunked_cross_entropy, (0, 1), has_aux=True))
    (loss, _), gradient = loss_fn(*args)
    assert (loss.dtype, *(g.dtype for g in gradient)) == (jnp.float32, jnp.bfloat16, jnp.float32)
    exact, _ = jax.jit(chunked_cross_entropy)(args[0].astype(jnp.float32), *args[1:])
    np.testing.assert_allclose(loss, exact, rtol=3e-3)


def test_vmap_over_clients_equals_a_loop() -> None:
    features, table, targets, mask = draw(batch=4)
    stacked = jax.vmap(
        lambda *args: chunked_cross_entropy(*args, tokens_per_chunk=3)[0], (0, None, 0, 0)
    )
    result = jax.jit(stacked)(features[:, None], table, targets[:, None], mask[:, None])
    for i in range(4):
        one = slice(i, i + 1)
        alone, _ = jax.jit(chunked_cross_entropy)(features[one], table, targets[one], mask[one])
        np.testing.assert_allclose(result[i], alone, rtol=1e-5)


def test_logits_of_all_tokens_never_exist() -> None:
    tokens, vocab_size, embed_dim, chunk = 4096, 32_000, 64, 512
    shapes = (
        jax.ShapeDtypeStruct((4, tokens // 4, embed_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((vocab_size, embed_dim), jnp.float32),
        jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32),
    )

    def temporaries(chunk: int) -> int:
        loss_fn = jax.grad(
            partial(chunked_cross_entropy, tokens_per_chunk=chunk), (0, 1), has_aux=True
        )
        return jax.jit(loss_fn).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    whole = 4 * tokens * vocab_size
    assert temporaries(chunk) < 4 * 4 * chunk * vocab_size < whole
    assert temporaries(tokens) > whole

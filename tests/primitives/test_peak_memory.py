"""The estimate of peak memory, and the chunk size that follows from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax import federated_map
from fedpax.primitives import participant_loop
from fedpax.primitives.jaxpr_analysis import peak_live_bytes


def peak_of(fn, *args):
    return peak_live_bytes(jax.make_jaxpr(fn)(*args).jaxpr)


def test_a_value_counts_until_its_last_use():
    x = jnp.ones(256)  # 1 KiB
    assert peak_of(lambda x: jnp.sin(jnp.cos(jnp.exp(x))), x) == 2 * 1024
    assert peak_of(lambda x: jnp.sin(jnp.cos(x)) * x, x) == 3 * 1024
    assert peak_of(lambda x: (jnp.sin(x), jnp.cos(x), jnp.exp(x)), x) == 4 * 1024


def test_an_unused_argument_does_not_count():
    assert peak_of(lambda x, y: x + 1, jnp.ones(4), jnp.ones(1000)) == 2 * 16


def test_a_loop_counts_its_body_once():
    def loop(x):
        return jax.lax.scan(lambda c, _: (jnp.sum(jnp.outer(c, c), 0), None), x, length=1000)[0]

    once = peak_of(lambda c: jnp.sum(jnp.outer(c, c), 0), jnp.ones(64))
    assert once <= peak_of(loop, jnp.ones(64)) <= once + 4 * 64 * 4


def test_a_conditional_counts_its_largest_branch():
    def choose(small, x):
        return jax.lax.cond(small, jnp.sum, lambda x: jnp.sum(jnp.outer(x, x)), x)

    assert 64 * 64 * 4 <= peak_of(choose, True, jnp.ones(64)) <= 64 * 64 * 4 + 4 * 64 * 4


def test_keys_and_values_without_a_shape_have_a_size():
    assert peak_of(lambda key: jax.random.split(key, 8), jax.random.key(0)) >= 8 * 8
    assert peak_of(lambda: None) == 0


def test_the_estimate_is_an_upper_bound_of_compiled_memory():
    """Compare with XLA's allocation for a training step, where both are close."""

    def loss(w, x):
        for layer in w:
            x = jnp.tanh(x @ layer)
        return jnp.sum(x**2)

    w = list(np.random.default_rng(0).normal(size=(4, 256, 256)).astype(np.float32))
    x = np.random.default_rng(1).normal(size=(512, 256)).astype(np.float32)
    memory = jax.jit(jax.grad(loss)).lower(w, x).compile().memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert needed <= 1.1 * peak_of(jax.grad(loss), w, x) <= 2 * needed


@pytest.mark.parametrize(
    ("fits", "chunk"),
    [(100, 12), (12, 12), (11, 6), (5, 4), (1, 1), (0, 1)],  # 12 clients in chunks of one size
)
def test_auto_chunks_fill_the_memory_limit_on_accelerators_and_are_one_on_cpu(
    fits, chunk, monkeypatch
):
    size = 1000
    peak = peak_of(lambda x: jnp.sin(x), jnp.ones(size))
    monkeypatch.setattr(participant_loop, "AUTO_CHUNK_BYTES", fits * peak)
    program = fedpax.program(clients=12, chunk_size="auto")(
        lambda x: federated_map(lambda x: jnp.sin(x), x)
    )
    traced = jax.jit(program).trace(jax.ShapeDtypeStruct((12, size), jnp.float32))

    def sines(platform):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        (line,) = (line for line in text.splitlines() if "stablehlo.sine" in line)
        return line.split(":")[-1].strip()

    assert sines("cpu") == f"tensor<{size}xf32>"
    wanted = f"tensor<{chunk}x{size}xf32>" if chunk > 1 else f"tensor<{size}xf32>"
    assert sines("tpu") == sines("cuda") == wanted


@pytest.mark.parametrize(
    ("device_kind", "gib"),
    [("NVIDIA H100 80GB HBM3", 5), ("TPU v4", 2), ("TPU v5 lite", 1), ("cpu", 1), ("unknown", 1)],
)
def test_auto_chunks_take_a_sixteenth_of_the_chip_and_at_least_one_gib(device_kind, gib):
    x = jax.ShapeDtypeStruct((2**20,), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda w, x: jnp.sin(w * x))(x, x)
    of_one = peak_live_bytes(jaxpr.jaxpr) - 4 * 2**20  # without the shared argument
    chunk = participant_loop.largest_auto_chunk(jaxpr, [True, False], device_kind)
    assert chunk == gib * 2**30 // of_one

"""One participant's elementwise equations compute with its leading axis what they do without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.random import default_rng

import fedpax
from fedpax import federated_map

REPORTED: list = []


def _values() -> dict[str, np.ndarray]:
    rng = default_rng(0)
    return {
        "w": rng.normal(size=(3, 4)).astype(np.float32),
        "half": rng.normal(size=(3, 4)).astype(jnp.bfloat16),
        "complex": (rng.normal(size=3) + 1j * rng.normal(size=3)).astype(np.complex64),
        "bits": rng.integers(0, 200, size=(2, 3), dtype=np.uint8),
        "mask": rng.random((3, 4)) < 0.5,
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.float32(rng.normal()),
        "count": np.int32(7),
    }


@jax.jit
def _elementwise(v: dict) -> dict:
    half = jnp.clip(v["half"] * 2, -1, v["scalar"].astype(v["half"].dtype))
    return {
        "w": jax.lax.select(v["mask"], v["w"] * v["scalar"], -jnp.tanh(v["w"])),
        "half": half.astype(jnp.float32) + v["w"],
        "complex": jax.lax.conj(v["complex"]) ** 2,
        "bits": (v["bits"] << 1) ^ jnp.uint8(3),
        "mask": ~v["mask"] & (v["w"] > 0),
        "empty": v["empty"] * 2 + 1,
        "scalar": jnp.where(v["count"] > 3, v["scalar"] / v["count"], 0.0),
        "count": v["count"] + 1,
    }


def _mixed(v: dict) -> dict:
    """Read elementwise values in other equations, and return arguments and constants."""
    new = _elementwise(v)
    rate = jax.lax.cond(v["count"] > 3, jnp.sin, jnp.cos, v["scalar"])
    scaled = jax.lax.clamp(-1.0, new["w"] + v["w"] @ v["w"].T @ v["w"], rate + 2)
    row = v["w"][:1] * 2  # JAX broadcasts an axis of size 1
    jax.debug.callback(REPORTED.append, jnp.linalg.norm(scaled), ordered=True)
    doubled, total = jax.lax.scan(lambda c, w: (c * 2, w.sum()), scaled, v["w"])
    return {
        **new,
        "same": v["half"],
        "twice": (new["w"], new["w"]),
        "constant": 2.0,
        "norm": jnp.linalg.norm(new["w"]) + total.sum(),
        "key": jax.random.normal(jax.random.key(v["count"]), (3,)) + new["scalar"],
        "rows": doubled - row + jnp.arange(12.0).reshape(3, 4),
    }


def _check(out: dict, expected: dict) -> None:
    for own, plain in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        assert (own.shape, own.dtype) == ((1, *plain.shape), plain.dtype)
        wide = complex if own.dtype == np.complex64 else float
        own, plain = (np.asarray(x).astype(wide) for x in (own[0], plain))
        np.testing.assert_allclose(own, plain, rtol=1e-6)


@pytest.mark.parametrize("chunk_size", [None, "auto"])
def test_one_participant_computes_as_without_an_axis(chunk_size):
    @fedpax.program(clients=1)
    def program(v):
        return federated_map(_mixed, v, chunk_size=chunk_size)

    REPORTED.clear()
    _check(jax.jit(program)(jax.tree.map(lambda x: x[None], _values())), jax.jit(_mixed)(_values()))
    jax.effects_barrier()
    own, plain = REPORTED
    np.testing.assert_allclose(own, plain, rtol=1e-6)


def test_elementwise_ends_keep_the_axis():
    """Also in a `jax.jit` that the function calls; a matmul before them has no axis."""

    def step(w, x):
        return w - 0.1 * jax.jit(lambda w: jnp.where(w > 0, w, 0.5 * w))(w) - x @ x

    @fedpax.program(clients=1)
    def program(w, x):
        return federated_map(jax.jit(step), w, x)

    x = jax.ShapeDtypeStruct((1, 4, 4), jnp.float32)
    text = jax.jit(program).lower(x, x).as_text()
    assert "stablehlo.subtract" in text
    for line in text.splitlines():
        elementwise = any(f"stablehlo.{op} " in line for op in ("subtract", "multiply", "select"))
        assert not elementwise or line.endswith("tensor<1x4x4xf32>"), line
        assert "dot_general" not in line or line.endswith("-> tensor<4x4xf32>"), line


def test_other_elementwise_equations_have_no_axis():
    """One that a matmul reads, one of constants alone, and one that a mean alone reads."""

    def step(w):
        constant = jnp.sin(jnp.arange(16.0).reshape(4, 4))
        return w - jnp.tanh(w) @ w - constant, jnp.cos(w)

    @fedpax.program(clients=1)
    def program(w):
        moved, cosine = federated_map(step, w)
        return moved, fedpax.federated_mean(cosine)

    text = jax.jit(program).lower(jax.ShapeDtypeStruct((1, 4, 4), jnp.float32)).as_text()
    for op in ("sine", "tanh", "cosine"):
        (line,) = [line for line in text.splitlines() if f"stablehlo.{op} " in line]
        assert line.endswith("tensor<4x4xf32>"), line


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_one_participant_per_device_computes_as_without_an_axis(kind):
    types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((4, 2), ("clients", "fsdp"), axis_types=types)

    @fedpax.program(clients=4)
    def program(w, x):
        def step(w, x):
            gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
            return w - 0.1 * gradient, (gradient**2).sum()

        w, norm = federated_map(step, w, x)
        return w, fedpax.federated_mean(norm)

    w, x = default_rng(1).normal(size=(2, 4, 6, 6)).astype(np.float32)
    loss = lambda w, x: jnp.sum(program(w, x)[0] ** 3)
    both = lambda w, x: (program(w, x), jax.grad(loss)(w, x))
    expected = jax.jit(both)(w, x)
    with jax.set_mesh(mesh):
        spec = jax.P("clients", None, "fsdp")
        out = jax.jit(both)(jax.device_put(w, spec), jax.device_put(x, jax.P("clients")))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), out, expected)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: jnp.where(x > 0, x, 0.0),
        lambda x: jax.lax.select(x > 0, jnp.float32(0), 2 * x),
        lambda x: jax.lax.select(jnp.bool_(True), x, 2 * x),
        lambda x: jax.lax.clamp(jnp.float32(-1), x, jnp.float32(1)),
        lambda x: jax.lax.clamp(-jnp.abs(x), jnp.float32(0.5), jnp.abs(x)),
        lambda x: jnp.clip(x, 0, None) ** 2 + jax.nn.relu(-x),
        lambda x: jax.lax.rem(x, jnp.float32(2)) - jax.lax.max(x, jnp.float32(0)),
        lambda x: jax.lax.atan2(x, jnp.float32(2)) + jax.lax.pow(jnp.float32(2), x),
        lambda x: jax.lax.igamma(jnp.float32(2), jnp.abs(x)),
        lambda x: jax.lax.betainc(jnp.float32(2), jnp.float32(3), jax.nn.sigmoid(x)),
    ],
)
def test_a_scalar_of_each_participant_meets_literals(step):
    """One participant on each device: its scalar is an array `[1]`, and literals are scalars."""
    x = default_rng(2).normal(size=8).astype(np.float32)

    @fedpax.program(clients=8)
    def program(x):
        return federated_map(step, x), federated_map(jax.grad(step), x)

    with jax.set_mesh(fedpax.make_mesh(clients=8)):
        out = jax.jit(program)(x)
    expected = jax.jit(lambda x: (jax.vmap(step)(x), jax.vmap(jax.grad(step))(x)))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), out, expected)

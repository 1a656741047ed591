"""The participants' axis is followed wherever array code moves it, and is never mistaken."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_table import MESHES, cases, normal, together
from test_unstack import Federated, Plain

import fedpax

N = 8


def reads_all(fn, *args):
    return "stored for" in fedpax.explain(fn, *args)


def same(federated, plain, *args, tolerance=2e-4):
    result, expected = together(federated, plain)(*args)
    chex.assert_trees_all_equal_shapes_and_dtypes(result, expected)
    chex.assert_trees_all_close(result, expected, rtol=tolerance, atol=tolerance)


def program_of(body, size=N, chunk_size=1):
    run = functools.partial(body, Federated)
    return fedpax.program(clients=size, chunk_size=chunk_size)(run)


# Reductions over participants that are written in NumPy. x: [8, 4, 6]; w: [6, 6]; n: [8].
REDUCTIONS = {
    "weighted sum by einsum": lambda f, x, w, n: jnp.einsum("n,nij->ij", n, f.map(jnp.sin, x)),
    "weighted sum by tensordot": lambda f, x, w, n: jnp.tensordot(n, f.map(jnp.sin, x), 1) @ w,
    "Gram matrix": lambda f, x, w, n: jnp.einsum("nij,nik->jk", x, f.map(jnp.sin, x)) + w,
    "flat Gram matrix": lambda f, x, w, n: f.map(jnp.sin, x)[:, 0].T @ x[:, 1] @ w,
    "sum behind a transpose": lambda f, x, w, n: (f.map(jnp.sin, x).T * w[0, 0]).sum((0, 2)),
    "mean behind a matmul": lambda f, x, w, n: jnp.einsum(
        "kj,nij->kin", w, f.map(jnp.sin, x)
    ).mean(2),
    "maximum behind a moved axis": lambda f, x, w, n: jnp.moveaxis(f.map(jnp.sin, x), 0, 1).max(1),
    "convolution over the participants": lambda f, x, w, n: jax.lax.conv_general_dilated(
        f.map(jnp.sin, x), w[:, None, :4] * n[None, :, None], (1,), "SAME",
        dimension_numbers=("CNH", "OIH", "NCH"),
    ),
    "any": lambda f, x, w, n: jnp.any(f.map(jnp.sin, x) > 0.9, axis=0) * w[0],
    "all": lambda f, x, w, n: jnp.all(f.map(jnp.sin, x) > -0.9, axis=(0, 1)) * w[0],
    "half precision": lambda f, x, w, n: jnp.einsum(
        "nij,nik->jk", *[f.map(jnp.sin, x).astype(jnp.bfloat16)] * 2
    ).astype(jnp.float32) + w,
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("chunk_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_reductions_written_in_numpy_are_accumulated_in_the_loop(name, chunk_size):
    args = normal(N, 4, 6), normal(6, 6), np.abs(normal(N))
    federated = program_of(REDUCTIONS[name], chunk_size=chunk_size)
    assert not reads_all(federated, *args)
    tolerance = 3e-2 if name == "half precision" else 2e-4
    same(federated, functools.partial(REDUCTIONS[name], Plain), *args, tolerance=tolerance)


def test_a_gradient_with_respect_to_a_server_matrix_is_accumulated_in_the_loop():
    x, w = normal(N, 4, 6), normal(6, 3)

    def body(f, x, w):
        return jax.grad(lambda w: jnp.sum(f.mean(f.map(jnp.sin, x) @ w)))(w)

    assert not reads_all(program_of(body), x, w)
    same(program_of(body), functools.partial(body, Plain), x, w)


def test_a_batched_program_stores_nothing():
    """`jax.vmap` puts its axis in front of the participants' in elementwise work."""
    x, ws = normal(N, 4, 6), normal(5, 4, 6)

    def body(f, x, w):
        return f.mean((f.map(jnp.sin, x) - jnp.cos(w)) * w)

    batched, plain = (
        jax.vmap(fn, (None, 0)) for fn in (program_of(body), functools.partial(body, Plain))
    )
    assert not reads_all(batched, x, ws)
    same(batched, plain, x, ws)


@pytest.mark.each_value
@pytest.mark.parametrize("run", ["jitted", "out of core"])
def test_a_stored_value_has_its_axes_where_the_program_put_them(run, current_mesh):
    """Returned, read by the server and by a later phase, with the participants in the middle."""
    x, w = normal(N, 4, 6), normal(5, 6)

    def body(f, x, w):
        y = jnp.einsum("kj,nij->kni", w, f.map(jnp.sin, x))
        centered = y - f.mean(jnp.moveaxis(y, 1, 0))[:, None]
        return y, jnp.prod(y, axis=1), f.mean(jnp.moveaxis(centered, 1, 0) ** 2)

    federated, plain = program_of(body), functools.partial(body, Plain)
    if run == "out of core":
        streamed = jax.tree.map(np.asarray, fedpax.out_of_core(federated, chunk_size=4)(x, w))
        expected = jax.device_get(jax.jit(plain)(x, w))
        chex.assert_trees_all_close(streamed, expected, rtol=1e-4, atol=1e-4)
    else:
        same(federated, plain, x, w)


def test_an_axis_of_the_same_size_is_no_participants_axis():
    """A transposed matrix can be passed to federated functions if it is square."""
    x, w = normal(N, N), normal(N, N)

    def body(f, x, w):
        y = f.map(jnp.sin, x)
        other = f.map(lambda row: row - jnp.max(row), (y @ w).T)
        return f.mean(y.T), f.mean(other * y), (y @ y).sum(0), y @ w.T @ y.T, f.mean(y @ w)

    same(program_of(body), functools.partial(body, Plain), x, w)


def test_an_argument_can_be_read_along_two_axes():
    """Test a placed value, and a server value whose columns are aligned with participants."""
    x, w = normal(N, N), normal(N, N)

    def body(f, x, w):
        y = f.map(jnp.sin, x)
        return f.mean(y * w), jnp.sum((y * x).T * w, axis=1), f.mean((y.T * x).T)

    assert not reads_all(program_of(body), x, w)
    same(program_of(body), functools.partial(body, Plain), x, w)


def test_one_participant_is_a_participant_too():
    x, w = normal(1, 1, 6), normal(6, 6)

    def body(f, x, w):
        y = f.map(jnp.sin, x) @ w
        return f.mean(y), jnp.sort(y, axis=2).T, jnp.squeeze(y, 0), y.reshape(6, 1)

    same(program_of(body, 1), functools.partial(body, Plain), x, w)


CUBE = 4


def random_steps(rng):
    """Yields functions `(functions, y, w) -> y` on cubes [4, 4, 4], of 4 participants."""
    a, b = map(int, rng.choice(3, 2, replace=False))
    numbers = rng.permutation(CUBE)
    order = rng.permutation(3).tolist()
    yield lambda f, y, w: jnp.transpose(y, order)
    yield lambda f, y, w: jnp.sort(y, axis=a)
    yield lambda f, y, w: jnp.cumsum(y, axis=a) / 2
    yield lambda f, y, w: jnp.flip(y, axis=a)
    yield lambda f, y, w: jnp.swapaxes(jnp.swapaxes(y, a, 2) @ w, a, 2)
    yield lambda f, y, w: jnp.matmul(w, y)
    yield lambda f, y, w: jnp.tanh(y @ jnp.moveaxis(y, a, b))
    yield lambda f, y, w: y + jnp.expand_dims(w, a)
    yield lambda f, y, w: jnp.take(y, numbers, axis=a)
    yield lambda f, y, w: jnp.take_along_axis(y, jnp.argsort(y, axis=a), axis=a)
    yield lambda f, y, w: jax.nn.softmax(y, axis=a)
    yield lambda f, y, w: y - jnp.mean(y, axis=a, keepdims=True)
    yield lambda f, y, w: y.reshape(CUBE, -1).reshape(CUBE, CUBE, CUBE) * 2
    yield lambda f, y, w: y.reshape(-1, CUBE)[::-1].reshape(y.shape)
    yield lambda f, y, w: jnp.concatenate([y, jnp.sin(y)], a).take(numbers + a, a)
    yield lambda f, y, w: jax.lax.dynamic_update_slice_in_dim(y, y.take(numbers[:2], a), 1, a)
    yield lambda f, y, w: y.at[:, numbers[:2]].add(w[:2])
    yield lambda f, y, w: w[numbers][jnp.argmax(y, axis=a)]
    yield lambda f, y, w: jax.vmap(jnp.outer, (a % 2, None), b)(jnp.sum(y, a), w[0])
    yield lambda f, y, w: f.map(lambda z: jnp.sin(z) @ z.T, y)
    yield lambda f, y, w: y - f.mean(y)
    yield lambda f, y, w: jnp.einsum("abc,ade->bcd", y, y)[None, :, :, 0] * y
    yield lambda f, y, w: jnp.einsum("abc,cd,bd->adb", y, w, w)


def random_program(seed):
    rng = np.random.default_rng(seed)
    chosen = []
    for _ in range(rng.integers(2, 7)):
        steps = list(random_steps(rng))
        chosen.append(steps[rng.integers(len(steps))])
    axis = int(rng.integers(3))

    def body(f, x, w):
        y = f.map(jnp.sin, x)
        for step in chosen:
            y = jnp.tanh(step(f, y, w))
        return f.mean(y), jnp.max(y, axis), jnp.einsum("nij,nik->jk", y, x)

    return body


FAST_SEEDS = {3, 7}  # programs of six steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [s if s in FAST_SEEDS else pytest.param(s, marks=pytest.mark.slow) for s in range(80)]
)
def test_random_array_code(seed):
    """All axes are of one size, so that no shape tells the participants' axis from others."""
    x, w = normal(CUBE, CUBE, CUBE, seed=seed), normal(CUBE, CUBE, seed=seed)
    body = random_program(seed)
    federated = program_of(body, CUBE, chunk_size=(1, 3)[seed % 2])
    plain = functools.partial(body, Plain)

    def total(fn):
        def value(x, w):
            out = fn(x, w)
            return sum(jnp.sum(y) for y in out[::2]), out

        return jax.value_and_grad(value, argnums=(0, 1), has_aux=True)

    same(total(federated), total(plain), x, w, tolerance=1e-3)


ON_MESHES = {
    "slice and matmul": lambda y, w: y[:, 1:3] @ w,
    "einsum with a server value in front": lambda y, w: jnp.einsum("jk,nij->nik", w, y),
    "participants moved": lambda y, w: jnp.moveaxis(jnp.moveaxis(y, 0, 1) * w[0], 1, 0),
    "sort": lambda y, w: jnp.sort(y, axis=1),
    "take": lambda y, w: jnp.take(y, jnp.array([2, 0]), axis=1),
    "concatenate": lambda y, w: jnp.concatenate([y, y * w[0]], axis=1),
    "cumsum and pad": lambda y, w: jnp.pad(jnp.cumsum(y, axis=1), ((0, 0), (1, 0), (0, 0))),
}


@pytest.mark.parametrize(
    ("name", "current_mesh"),
    cases(
        ON_MESHES,
        MESHES,
        fast={
            *[(name, "explicit") for name in ON_MESHES],
            ("participants moved", "automatic"),
            ("concatenate", "automatic"),
        },
    ),
    indirect=["current_mesh"],
)
def test_array_code_on_every_mesh(name, current_mesh):
    x, w = normal(N, 4, 6), normal(6, 6)

    def body(f, x, w):
        y = f.map(jnp.sin, x)
        return f.mean(ON_MESHES[name](y, w)), jnp.einsum(
            "n...,n->...", ON_MESHES[name](y, w), x[:, 0, 0]
        )

    assert not reads_all(program_of(body), x, w)

    def total(fn):
        def value(w):
            out = fn(x, w)
            return sum(jnp.sum(jnp.sin(y)) for y in out), out

        return jax.value_and_grad(value, has_aux=True)

    same(total(program_of(body)), total(functools.partial(body, Plain)), w)

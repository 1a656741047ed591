"""Array code between a map and a reduction runs in the loop, whatever primitive it is."""

import functools
import operator

import chex
import jax
import jax.numpy as jnp
import pytest
from program_table import normal, together

import fedpax

lax = jax.lax


def take_top(y, w):
    values, where = lax.top_k(y, 2)
    return values * (1 + where)


def conv(y, w, spec):
    numbers = (spec, "HIO", spec)
    return lax.conv_general_dilated(y, w[None, :, :4], (1,), "SAME", dimension_numbers=numbers)


def with_eye(y):
    return y[:, :, :4] @ jnp.swapaxes(y[:, :, :4], 1, 2) + 5 * jnp.eye(4)


def window(y, init, fn):
    return lax.reduce_window(y, init, fn, (1, 2, 3), (1, 1, 2), ((0, 0), (1, 0), (0, 0)))


# y: the result of a map, [n, 4, 6]; w: a server value, [6, 6].
OPERATIONS = {
    "slice": lambda y, w: y[:, 1:3, ::2],
    "matmul": lambda y, w: y @ w,
    "einsum with a server value in front": lambda y, w: jnp.einsum("jk,nij->nik", w, y),
    "einsum of two mapped values": lambda y, w: jnp.einsum("nij,nkj->nik", y, jnp.sin(y)),
    "einsum that moves the participants": lambda y, w: jnp.einsum("nij,kj->kni", y, w).mean(0),
    "concatenate": lambda y, w: jnp.concatenate([y, y * y], axis=2),
    "concatenate with a broadcast value": lambda y, w: jnp.concatenate(
        [y, jnp.broadcast_to(jnp.sin(w), (len(y), 6, 6))], axis=1
    ),
    "stack": lambda y, w: jnp.stack([y, y + w[:4]], axis=1),
    "pad": lambda y, w: jnp.pad(y, ((0, 0), (1, 2), (0, 0)), constant_values=2.0),
    "rev": lambda y, w: y[:, ::-1] * y,
    "roll": lambda y, w: jnp.roll(y, 2, axis=2) * y,
    "cumsum": lambda y, w: jnp.cumsum(y, axis=1),
    "cumprod": lambda y, w: jnp.cumprod(y, axis=2),
    "cummax": lambda y, w: lax.cummax(y, axis=1),
    "cummin": lambda y, w: lax.cummin(y, axis=2, reverse=True),
    "cumlogsumexp": lambda y, w: lax.cumlogsumexp(y, axis=1),
    "sort": lambda y, w: jnp.sort(y, axis=1) * jnp.arange(6),
    "argsort": lambda y, w: jnp.argsort(y, axis=2) * y,
    "median": lambda y, w: jnp.median(y, axis=2),
    "top_k": take_top,
    "take": lambda y, w: jnp.take(y, jnp.array([2, 0, 2]), axis=2),
    "take along an axis": lambda y, w: jnp.take_along_axis(y, jnp.argsort(y, axis=1), axis=1),
    "rows of a server table": lambda y, w: jnp.sin(w)[jnp.argmax(y, axis=2)] * y,
    "index of a server value": lambda y, w: y[:, jnp.argmax(w[0]) // 2],
    "dynamic slice": lambda y, w: lax.dynamic_slice_in_dim(y, jnp.argmax(w[0]), 2, axis=2),
    "dynamic update": lambda y, w: lax.dynamic_update_slice(y, y[:, :, :2] ** 2, (0, 0, 3)),
    "scatter": lambda y, w: y.at[:, :, jnp.array([1, 3])].set(7.0),
    "scatter-add": lambda y, w: y.at[:, jnp.array([1, 1, 2])].add(jnp.cos(y[:, :3])),
    "scatter-max": lambda y, w: y.at[:, 1].max(w[0]),
    "reshape": lambda y, w: y.reshape(len(y), 3, 8) ** 2,
    "flatten": lambda y, w: y.reshape(len(y), -1) ** 2,
    "transpose": lambda y, w: jnp.transpose(y, (0, 2, 1)) @ w[:4],
    "participants moved and moved back": lambda y, w: (y.T * jnp.sum(w)).T,
    "broadcast": lambda y, w: jnp.broadcast_to(y[:, :, None], (len(y), 4, 2, 6)) ** 2,
    "expand and squeeze": lambda y, w: jnp.squeeze(
        jnp.expand_dims(y, (1, 3)) * y[:, None, :, None]
    ),
    "tile": lambda y, w: jnp.tile(y, (1, 2, 1)),
    "repeat": lambda y, w: jnp.repeat(y, 2, axis=1),
    "split": lambda y, w: operator.mul(*jnp.split(y, 2, axis=2)),
    "reductions": lambda y, w: y.sum(1) + y.max(1) + y.min(1),
    "product": lambda y, w: y.prod(1),
    "logsumexp": lambda y, w: jax.nn.logsumexp(y, axis=2),
    "softmax": lambda y, w: jax.nn.softmax(y @ w, axis=1),
    "variance": lambda y, w: jnp.var(y, axis=(1, 2)),
    "any and all": lambda y, w: jnp.any(y > 1, axis=1) * y[:, 0] + jnp.all(y > -1, axis=2)[:, :1],
    "argmax": lambda y, w: jnp.argmax(y, axis=1) * jnp.argmin(y, axis=1) * y[:, 0],
    "select": lambda y, w: jnp.where(y > w[0], y, w[:4]),
    "clamp": lambda y, w: jnp.clip(y, w[1, 1] - 1, w[0, 0] + 1),
    "conversion": lambda y, w: y.astype(jnp.bfloat16).astype(jnp.float32),
    "iota": lambda y, w: y * lax.broadcasted_iota(jnp.float32, y.shape, 1),
    "one-hot": lambda y, w: jax.nn.one_hot(jnp.argmax(y, axis=2), 6) @ w,
    "convolution": lambda y, w: conv(y, w, "NHC"),
    "convolution with channels first": lambda y, w: conv(jnp.swapaxes(y, 1, 2), w, "NCH"),
    "max pooling": lambda y, w: window(y, -jnp.inf, lax.max),
    "sum pooling": lambda y, w: window(y, 0.0, lax.add),
    "cholesky": lambda y, w: jnp.linalg.cholesky(with_eye(y)),
    "triangular solve": lambda y, w: lax.linalg.triangular_solve(
        with_eye(y), y, left_side=True, lower=True
    ),
    "svd": lambda y, w: jnp.linalg.svd(y, compute_uv=False),
    "eigh": lambda y, w: jnp.linalg.eigh(with_eye(y))[0],
    "qr": lambda y, w: jnp.linalg.qr(jnp.swapaxes(y, 1, 2))[1],
    "fft": lambda y, w: jnp.abs(jnp.fft.rfft(y, axis=2)),
    "bits": lambda y, w: y * (lax.bitcast_convert_type(y, jnp.int32) >> 23) % 3,
    "vmap": lambda y, w: jax.vmap(lambda row, w: row[:, ::-1] @ w, (1, None), 1)(y, w),
    "vmap in front": lambda y, w: jax.vmap(lambda row, w: jnp.sort(row * w, 1), (1, 0))(
        y, w[:4]
    ).sum(0),
}
# Their derivatives work on all participants at once: a scatter of the rows that participants read
# into the server's table, and JAX's derivative of a product, which flattens all other axes.
STORED_FOR_GRADIENT = {"rows of a server table", "product"}
# XLA copies the operand into another layout for LAPACK, inside a mapped function too.
COPIED_BY_XLA = {"triangular solve", "svd"}
SLOW = {
    *["cumprod", "cummin", "cumlogsumexp", "argsort", "median", "roll", "tile", "repeat", "split"],
    *["scatter", "scatter-max", "dynamic update", "sum pooling", "cholesky", "triangular solve"],
    *["svd", "eigh", "qr", "fft", "bits", "logsumexp", "variance", "one-hot", "conversion"],
    *["convolution with channels first", "vmap in front", "any and all", "softmax", "flatten"],
    *["einsum with a server value in front", "index of a server value", "product"],
    # These share the rule of `unstack_rules.py` with an operation that is fast.
    *["rev", "cummax", "clamp", "matmul", "broadcast", "concatenate", "take along an axis"],
}
FAST_MEMORY = {"cumsum", "einsum of two mapped values", "scatter-add", "max pooling"}


class Federated:
    """`fedpax` functions, the map under `jax.checkpoint`."""

    map = staticmethod(lambda fn, x: fedpax.federated_map(jax.checkpoint(fn), x))
    mean = staticmethod(fedpax.federated_mean)


class Plain:
    """The same in plain JAX."""

    map = staticmethod(lambda fn, x: jax.vmap(fn)(x))
    mean = staticmethod(lambda x: jnp.mean(x, 0))


def program(operation, functions, x, w):
    # Rounded once, so that values recomputed by another loop are equal: maxima compare them.
    y = functions.map(lambda x: x - w[:4], x)
    return functions.mean(jnp.float32(1) * operation(y, w))


def federated(operation, size, chunk_size=1):
    body = functools.partial(program, operation, Federated)
    return fedpax.program(clients=size, chunk_size=chunk_size)(body)


def total(fn):
    def value(w, x):
        out = fn(x, w)
        return jnp.sum(jnp.sin(out)), out

    return jax.value_and_grad(value, has_aux=True)


def compiled(operation, size):
    args = normal(6, 6), normal(size, 4, 6)
    return jax.jit(total(federated(operation, size))).lower(*args).compile()


def temporary_bytes(executable):
    return executable.memory_analysis().temp_size_in_bytes


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name


@pytest.mark.parametrize("name", [slow(name) for name in OPERATIONS])
def test_an_operation_runs_in_the_loop_with_its_gradient(name):
    """Nothing is stored for it, and plain JAX gives the same results."""
    operation = OPERATIONS[name]
    streamed, plain = federated(operation, 8), functools.partial(program, operation, Plain)
    w, x = normal(6, 6), normal(8, 4, 6)
    both = together(total(streamed), total(plain))
    chex.assert_trees_all_close(*both(w, x), rtol=2e-4, atol=2e-4)
    if name in STORED_FOR_GRADIENT:
        assert "stored for" not in fedpax.explain(streamed, x, w)
    else:  # the gradient runs the program too
        assert "stored for" not in fedpax.explain(both, w, x)


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST_MEMORY else pytest.param(name, marks=pytest.mark.slow)
        for name in OPERATIONS
        if name not in STORED_FOR_GRADIENT | COPIED_BY_XLA
    ],
)
def test_temporaries_do_not_grow_with_the_number_of_clients(name):
    few, many = (compiled(OPERATIONS[name], size) for size in (64, 512))
    assert temporary_bytes(many) <= temporary_bytes(few)

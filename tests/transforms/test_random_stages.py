"""Random programs in stages equal the programs, also of the participants that answer alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax import federated_broadcast, federated_map, federated_mean, federated_sum
from fedpax.deploy import run_local

N, LENGTH = 5, 3
PRESENT = np.array([0, 2, 3])


def random_program(seed, present):
    """Draw a program of up to three stages; it closes over an array of all participants."""
    rng = np.random.default_rng(seed)
    constant = rng.normal(size=(N, LENGTH)).astype(np.float32)[present]
    operations = rng.integers(12, size=rng.integers(4, 11))
    picks = rng.integers(1000, size=(len(operations), 3))

    @fedpax.program(clients=len(present))
    def program(w, personal, x, keys):
        servers, placed = [w], [personal, x]
        placed.append(federated_map(lambda k: jax.random.normal(k, (LENGTH,)), keys))
        placed.append(federated_map(jnp.add, x, jnp.asarray(constant)))
        for operation, (i, j, k) in zip(operations, picks, strict=True):
            s = servers[i % len(servers)]
            a, b = placed[j % len(placed)], placed[k % len(placed)]
            norms = jnp.sqrt(jnp.sum(a**2, axis=1) + 0.1)
            match operation:
                case 0:
                    placed.append(federated_map(lambda a, b, s=s: jnp.tanh(a * s + b), a, b))
                case 1:
                    placed.append(jnp.where(a > 0, a, 0.1 * b))
                case 2:
                    placed.append(a / norms[:, None] + s)
                case 3:
                    placed.append(jnp.sin(federated_broadcast(s)) * b)
                case 4:
                    servers.append(federated_mean(a))
                case 5:
                    servers.append(federated_mean(a, weights=norms))
                case 6:
                    servers.append(jnp.tanh(federated_sum(a * b)))
                case 7:
                    servers.append(fedpax.federated_max(a) - fedpax.federated_min(b))
                case 8:
                    servers.append(jnp.tanh(jnp.einsum("n,ni->i", norms, a)))
                case 9:
                    servers.append(jnp.tanh(s * servers[j % len(servers)]))
                case 10:
                    placed.append(federated_map(jax.checkpoint(lambda a, s=s: jnp.cos(a + s)), a))
                case 11:
                    placed.append(a * (norms / jnp.sum(norms))[:, None])
        new = federated_map(lambda a, b: a + 0.1 * b, personal, placed[-1])
        return servers[-1], new, federated_mean(placed[-2]), placed[-1]

    return program


def arguments(seed):
    rng = np.random.default_rng((seed, 1))
    personal, x = rng.normal(size=(2, N, LENGTH)).astype(np.float32)
    w = rng.normal(size=LENGTH).astype(np.float32)
    return w, personal, x, jax.random.split(jax.random.key(seed), N)


def close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        assert np.all(np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def of_all_and_few(program):
    """Compile a program of all participants and the one of those that are present, in one."""

    @jax.jit
    def run(w, *placed):
        few = [a[PRESENT] for a in placed]
        return program(np.arange(N))(w, *placed), program(PRESENT)(w, *few)

    return run


FEW = 2


@pytest.mark.parametrize(
    "seed", [s if s < FEW else pytest.param(s, marks=pytest.mark.slow) for s in range(60)]
)
def test_stages_equal_the_program(seed):
    everyone = np.arange(N)
    args = arguments(seed)
    stages = fedpax.stages(random_program(seed, everyone), *args)
    whole, few = of_all_and_few(functools.partial(random_program, seed))(*args)
    close(run_local(stages, *args), whole)
    server, new, mean, last = run_local(stages, *args, participants=PRESENT)
    close((server, new[PRESENT], mean, last[PRESENT]), few)
    absent = np.setdiff1d(everyone, PRESENT)
    np.testing.assert_array_equal(new[absent], args[1][absent])


@pytest.mark.parametrize(
    "seed", [s if s < 1 else pytest.param(s, marks=pytest.mark.slow) for s in range(20)]
)
def test_gradients_in_stages_equal_the_gradients(seed):
    def gradient(present):
        program = random_program(seed, present)

        def loss(w, *args):
            server, new, mean, last = program(w, *args)
            return jnp.sum(server**2) + jnp.sum(jnp.sin(new)) + jnp.sum(mean * w) + jnp.sum(last)

        return jax.grad(loss)

    args = arguments(seed)
    stages = fedpax.stages(gradient(np.arange(N)), *args)
    whole, few = of_all_and_few(gradient)(*args)
    close(run_local(stages, *args), whole)
    close(run_local(stages, *args, participants=PRESENT), few)

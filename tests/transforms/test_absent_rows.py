"""The server's work on rows of participants of which some do not answer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax import federated_map, federated_max, federated_mean
from fedpax.deploy import export_stages, load, run_local

N = 7
PRESENT = {"all": [*range(N)], "all but one": [0, 2, 3, 4, 5, 6], "half": [1, 4, 6]}
W = np.random.default_rng(0).normal(size=3).astype(np.float32)
X = np.random.default_rng(1).normal(size=(N, 3)).astype(np.float32)
WEIGHTS = np.random.default_rng(2).uniform(1, 3, size=N).astype(np.float32)


def softmax_mean(w, x, weights):
    """A weighted mean whose weights depend on a maximum."""
    updates, scores = federated_map(lambda x, k: (x * w, k * jnp.sum(x**2)), x, weights)
    return federated_mean(updates, weights=jnp.exp(scores - federated_max(scores)))


def softmax_of_arrays(w, x, weights):
    """The same by `jax.numpy` alone, contracted over the participants' axis."""
    updates, scores = federated_map(lambda x, k: (x * w, k * jnp.sum(x**2)), x, weights)
    return jnp.einsum("in,n->i", updates.T, jax.nn.softmax(scores))


def largest_of_a_code(w, x, weights):
    """A maximum of negative values, which rows of zeros would win."""
    updates = federated_map(lambda x: x * w, x)
    scores = -jnp.sum(updates**2, axis=1) - federated_max(weights)
    return jnp.max(scores), jnp.min(-scores)


def median_of_the_present(w, x, weights):
    """Absent ones are those of weight 0, as in `coordinate_median`."""
    updates = federated_map(lambda x: x * w, x)
    rows = jnp.sort(jnp.where((weights != 0)[:, None], updates, jnp.inf), axis=0)
    return rows[(jnp.sum(weights != 0) - 1) // 2]


def two_codes_of_one_value(w, x, weights):
    """Array code on the result of other array code, on another axis too."""
    updates = federated_map(lambda x, k: k * x * w, x, weights)
    norms = jnp.sum(updates**2, axis=1)
    shifted = jnp.where(norms > 0, norms, jnp.inf)
    doubled = jnp.where(updates.T == 0, jnp.inf, 2 * updates.T + w[:, None])
    return jnp.sort(shifted)[0], jnp.sort(1 / shifted)[-1], jnp.sort(doubled, axis=1)[:, 0]


PROGRAMS = {
    softmax_mean: (2, 0),
    softmax_of_arrays: (1, 3),
    largest_of_a_code: (1, 2),
    median_of_the_present: (1, 2),
    two_codes_of_one_value: (1, 4),
}


def rows_of(values, present):
    return [x[present] if x.shape[:1] == (N,) else x for x in values]


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.all(np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@functools.cache
def divided(program):
    """Divide a program once for all participants that can be present."""
    return fedpax.stages(fedpax.program(clients=N)(program), W, X, WEIGHTS)


@pytest.mark.each_value
@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("program", PROGRAMS)
def test_absent_participants_do_not_count(program, present):
    answer, args = PRESENT[present], (W, X, WEIGHTS)
    stages = divided(program)
    expected = jax.jit(fedpax.program(clients=len(answer))(program))(*rows_of(args, answer))
    assert_close(run_local(stages, *args, participants=answer), expected)
    assert PROGRAMS[program] == (len(stages), sum(len(stage.shown) for stage in stages))


def test_an_exported_server_leaves_them_out(tmp_path):
    @fedpax.program(clients=N)
    def program(w, x, weights):
        norms = federated_map(lambda x: jnp.sum((x * w) ** 2), x)
        return median_of_the_present(w, x, weights), jnp.argmax(norms)

    stages = fedpax.stages(program, W, X, WEIGHTS)
    export_stages(stages, tmp_path / "round")
    answer, own = PRESENT["half"], stages.own(W, X, WEIGHTS)
    server = load(tmp_path / "round").run({"w": W})
    request = next(server)
    replies = [
        stages.client(0)(i, request.shared, (), {name: rows[i] for name, rows in own.items()})
        for i in answer
    ]
    terms = stages.fold(0)(
        [jnp.stack(rows) for rows in zip(*(t for t, _, _ in replies), strict=True)]
    )
    shown = [jnp.stack(rows) for rows in zip(*(s for _, s, _ in replies), strict=True)]
    with pytest.raises(StopIteration) as end:
        server.send((terms, shown, answer))
    expected = run_local(stages, W, X, WEIGHTS, participants=answer)
    assert_close(list(end.value.value.values()), expected)
    assert expected[1] == answer[np.argmax(np.sum((X * W)[answer] ** 2, axis=1))]


@pytest.mark.parametrize("size", [3, 0])
def test_an_own_value_that_a_map_returns_is_shown(size):
    @fedpax.program(clients=N)
    def program(w, x, extra):
        doubled, same = federated_map(lambda x, e: (w * x, e), x, extra)
        return federated_mean(doubled), jnp.sort(same, axis=0), same

    args = jnp.float32(2), X, X[:, :size]
    stages = fedpax.stages(program, *args)
    assert [v.name for v in stages[0].shown] == ["<lambda>[1]"]
    found = run_local(stages, *args, participants=PRESENT["half"])
    np.testing.assert_array_equal(found[2][np.array(PRESENT["half"])], args[2][PRESENT["half"]])
    assert_close(run_local(stages, *args), jax.jit(program)(*args))

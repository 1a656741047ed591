"""Robust means: against NumPy, by their laws, with wrong updates, and in the compiled text."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_robust_means import (
    REFERENCES,
    SHAPES,
    draw,
    flat,
    unflat,
)

import fedpax
from fedpax.aggregators import (
    all_updates,
    bulyan,
    coordinate_median,
    geometric_median,
    krum,
    trimmed_mean,
)
from fedpax.algorithms import diloco, fedavg
from fedpax.hlo.collectives import collectives

N = 8
AGGREGATORS = {
    "coordinate_median": coordinate_median(),
    "trimmed_mean": trimmed_mean(0.25),
    "krum": krum(2),
    "multi_krum": krum(1, num_selected=4),
    "bulyan": bulyan(1),
    "geometric_median": geometric_median(),
}


@functools.cache
def compiled(name):
    aggregator = AGGREGATORS[name]

    @jax.jit
    @fedpax.program(clients=N)
    def combine(updates, weights):
        aggregated, _, metrics = aggregator.aggregate(aggregator.init(None), updates, weights)
        assert metrics == {}
        return aggregated

    return combine


def combine(name):
    """Make `(updates, weights=None) -> aggregate`, compiled once."""
    ones = np.ones(N, np.float32)
    return lambda updates, weights=None: compiled(name)(
        updates, ones if weights is None else weights
    )


def check(name, updates, weights=None, actual=None):
    x = flat(updates)
    present = np.ones(len(x)) if weights is None else weights
    expected = unflat(REFERENCES[name](x[present != 0], present[present != 0]))
    actual = combine(name)(updates, weights) if actual is None else actual
    tolerance = 1e-3 if name == "geometric_median" else 1e-5  # of eight iterations
    jax.tree.map(
        lambda f, e: np.testing.assert_allclose(f, e, rtol=tolerance, atol=tolerance),
        dict(actual),
        expected,
    )


@pytest.mark.parametrize("name", AGGREGATORS)
def test_equals_numpy(name):
    check(name, draw(1))


@pytest.mark.parametrize("name", AGGREGATORS)
def test_weight_zero_means_absent(name):
    """The values of absent participants have no effect, and all other weights matter for one."""
    updates, weights = draw(2), np.float32([1, 3, 0, 1, 2, 1, 0.5, 1])
    for poison in (1e30, np.nan):
        for x in updates.values():
            x[2] = poison
        check(name, updates, weights)
    none = combine(name)(draw(3), np.zeros(N, np.float32))
    assert all(not np.any(x) for x in jax.tree.leaves(none))


@pytest.mark.slow
@pytest.mark.parametrize("name", AGGREGATORS)
@hypothesis.given(order=st.permutations(range(N)), seed=st.integers(0, 99))
@hypothesis.settings(max_examples=5)
def test_the_order_of_participants_does_not_matter(name, order, seed):
    updates = draw(seed)
    permuted = {key: x[order] for key, x in updates.items()}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        combine(name)(updates),
        combine(name)(permuted),
    )


@pytest.mark.parametrize("name", AGGREGATORS)
def test_equal_updates_are_returned(name):
    update = draw(4, 1)
    updates = {key: np.repeat(x, N, 0) for key, x in update.items()}
    aggregate = combine(name)(updates)
    # The mean of equal numbers is rounded, a selected number is not.
    exact = name in ("coordinate_median", "krum")
    for key, x in update.items():
        if exact:
            np.testing.assert_array_equal(aggregate[key], x[0])
        np.testing.assert_allclose(aggregate[key], x[0], rtol=1e-6)


WRONG = {
    "zeros": lambda honest, rng: np.zeros_like(honest[0]),
    "far": lambda honest, rng: 1e3 * np.float32(rng.standard_normal(honest[0].shape)),
    "flipped": lambda honest, rng: -10 * honest.mean(0),
    "nan": lambda honest, rng: np.full_like(honest[0], np.nan),
    "infinity": lambda honest, rng: np.full_like(honest[0], -np.inf),
    "huge": lambda honest, rng: np.full_like(honest[0], 3e38),
}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_wrong_update_does_not_move_it_far(name):
    """The result is no farther from the honest mean than the farthest honest update."""
    for seed, (kind, wrong) in enumerate(WRONG.items()):
        updates = draw(seed)
        updates = {key: x + 3.0 for key, x in updates.items()}
        rng = np.random.default_rng(seed)
        for x in updates.values():
            x[1] = wrong(np.delete(x, 1, 0), rng)
        honest = np.delete(flat(updates), 1, 0)
        radius = np.linalg.norm(honest - honest.mean(0), axis=1).max()
        aggregate = flat({k: np.asarray(x)[None] for k, x in combine(name)(updates).items()})[0]
        assert np.linalg.norm(aggregate - honest.mean(0)) < 1.01 * radius, kind


@pytest.mark.parametrize("num_wrong", [2, 4])
def test_krum_selects_an_honest_update_within_its_bound_and_not_beyond(num_wrong):
    """8 updates tolerate 2 wrong ones; 4 that agree are closer to each other than the honest."""
    updates = draw(5)
    for x in updates.values():
        x[:num_wrong] = 100.0 + 1e-3 * x[:num_wrong]
    aggregate = combine("krum")(updates)
    matches = [
        i
        for i in range(N)
        if all(np.array_equal(aggregate[key], updates[key][i]) for key in SHAPES)
    ]
    assert len(matches) == 1
    assert (matches[0] >= num_wrong) == (num_wrong == 2)


def test_bfloat16_updates_are_combined_in_float32():
    updates = {key: x.astype(jnp.bfloat16) for key, x in draw(7).items()}
    wide = {key: np.float32(x) for key, x in updates.items()}
    aggregate = combine("bulyan")(updates)
    expected = combine("bulyan")(wide)
    for key in SHAPES:
        assert aggregate[key].dtype == jnp.bfloat16
        np.testing.assert_array_equal(aggregate[key], expected[key].astype(jnp.bfloat16))


@pytest.mark.parametrize("name", ["coordinate_median", "trimmed_mean", "bulyan"])
def test_blocks_of_coordinates_change_nothing(name, monkeypatch):
    """A block of 5 coordinates covers no leaf of `draw` in whole blocks."""
    updates, weights = draw(8), np.float32([1, 1, 0, 1, 1, 1, 1, 1])
    for x in updates.values():
        x[2] = np.nan
    monkeypatch.setattr(all_updates, "_BLOCK_SIZE", 5 * N)
    compiled.cache_clear()
    check(name, updates, weights)
    text = compiled(name).lower(updates, weights).compile().as_text()
    compiled.cache_clear()
    assert f"f32[{N},5]" in text


@pytest.mark.parametrize("seed", range(3))
def test_bulyan_takes_the_lower_of_two_values_that_are_equally_close(seed):
    rng = np.random.default_rng(seed)
    check("bulyan", {k: np.float32(rng.integers(0, 9, (N, *s))) for k, s in SHAPES.items()})


def test_blocks_of_coordinates_keep_float32_with_x64(monkeypatch):
    monkeypatch.setattr(all_updates, "_BLOCK_SIZE", 5 * N)
    updates = draw(9)["w"]
    with jax.enable_x64(True):
        combine = fedpax.program(clients=N)(
            lambda u: coordinate_median().aggregate(None, u, None)[0]
        )
        result = jax.jit(combine)(updates)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, np.median(updates, 0), rtol=1e-6)


# ---- memory and communication


def test_explain_tells_which_aggregators_need_all_updates():
    def explain(name):
        aggregator = AGGREGATORS[name]

        @fedpax.program(clients=N)
        def round(w, x):
            updates = fedpax.federated_map(lambda x: w * x, x)
            return aggregator.aggregate(aggregator.init(None), updates, None)[0]

        return fedpax.explain(round, jnp.ones(3), jnp.ones((N, 3)))

    stored = "stored for all participants:\n    float32[8,3]: the server reads it in "
    assert stored + "'cond'" in explain("coordinate_median")
    assert stored + "'cond'" in explain("trimmed_mean")
    assert stored + "'dot_general'" in explain("krum")
    assert stored + "'dot_general'" in explain("bulyan")
    stored = "stored for all participants:\n    float32[8]: the server reads it in 'sort'"
    assert stored in explain("geometric_median")  # the norms
    updates = "float32[8,3]: the server reads it in 'scan'"  # the loop of its iterations
    assert updates in explain("geometric_median")


KINDS = {
    "automatic": (AxisType.Auto,) * 2,
    "explicit": (AxisType.Explicit,) * 2,
    "mixed": (AxisType.Explicit, AxisType.Auto),
    "mixed_model": (AxisType.Auto, AxisType.Explicit),
}


FEW = ("coordinate_median", "krum")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param("automatic", FEW, marks=pytest.mark.slow),
        ("explicit", FEW),
        *[pytest.param(kind, AGGREGATORS, marks=pytest.mark.slow) for kind in KINDS],
    ],
)
def test_on_a_mesh_no_device_receives_all_updates(kind, names):
    """One all-to-all moves the updates; a gather returns aggregates alone."""
    mesh = jax.make_mesh((4, 2), ("clients", "fsdp"), axis_types=KINDS[kind])
    shapes = {"in": (16, 12), "s": ()}
    specs = {"in": ("fsdp", None), "s": ()}
    if names is AGGREGATORS:
        shapes |= {"out": (12, 16), "odd": (7, 6)}
        specs |= {"out": (None, "fsdp"), "odd": (None, "fsdp")}
    rng = np.random.default_rng(0)
    updates = {k: np.float32(rng.standard_normal((N, *s))) for k, s in shapes.items()}

    @jax.jit
    @fedpax.program(clients=N)
    def combine_all(updates):
        return {name: AGGREGATORS[name].aggregate(None, updates, None)[0] for name in names}

    expected = combine_all(updates)
    with jax.set_mesh(mesh):
        placed = {
            k: jax.device_put(x, NamedSharding(mesh, P("clients", *specs[k])))
            for k, x in updates.items()
        }
        compiled = combine_all.lower(placed).compile()
        communication = compiled(placed)
    for name, by_leaf in expected.items():
        for k, leaf in by_leaf.items():
            np.testing.assert_allclose(
                communication[name][k], leaf, rtol=1e-4, atol=1e-5, err_msg=name
            )
    largest = max(np.prod(s, dtype=int) for s in shapes.values())
    communication = [c for c in collectives(compiled.as_text(), mesh) if "clients" in c.axes]
    sizes: dict[str, list[int]] = {}
    for c in communication:
        for shape in c.shapes:
            numbers = shape.split("[")[1].split("]")[0]
            size = np.prod([int(n) for n in numbers.split(",") if n], dtype=int)
            sizes.setdefault(c.kind, []).append(size)
    assert "all-to-all" in sizes
    for kind, of_kind in sizes.items():
        assert kind == "all-to-all" or max(of_kind) <= max(largest, N * N), (kind, of_kind)


@pytest.mark.parametrize("method", ["fedavg", pytest.param("diloco", marks=pytest.mark.slow)])
def test_a_method_with_a_robust_mean_learns_in_spite_of_wrong_labels(method):
    truth = np.float32([1.0, -2.0, 3.0])
    x = np.float32(np.random.default_rng(0).standard_normal((N, 3, 16, 3)))
    y = x @ truth
    y[0] = -100 * y[0]  # labels of participant 0
    cohort = fedpax.Cohort({"x": x, "y": y}, num_examples=np.full(N, 48))

    def loss_fn(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2), {}

    def train(aggregator):
        if method == "fedavg":
            algorithm = fedavg(
                loss_fn, cohort_size=N, client_optimizer=optax.sgd(0.1), aggregator=aggregator
            )
        else:
            algorithm = diloco(
                loss_fn, islands=N, inner_optimizer=optax.sgd(0.1), aggregator=aggregator
            )
        state, step = algorithm.init(jnp.zeros(3)), jax.jit(algorithm.round)
        for _ in range(30):
            state, _ = step(state, cohort)
        return state.params

    assert np.linalg.norm(train(coordinate_median()) - truth) < 0.1
    assert np.linalg.norm(train(None) - truth) > 1


# ---- bad input


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: trimmed_mean(0.5),
            ValueError,
            r"0\.5, .* below 0\.5\. Use coordinate_median\(\)",
        ),
        (lambda: trimmed_mean(-0.1), ValueError, "-0.1, expected .* at least 0"),
        (lambda: trimmed_mean("0.1"), TypeError, "expected a number of at least 0 and below 0.5"),
        (lambda: krum(-1), ValueError, "num_byzantine is -1, expected an int of at least 0. Use 0"),
        (lambda: krum(1.0), TypeError, "num_byzantine is 1.0, expected an int"),
        (
            lambda: krum(1, num_selected=0),
            ValueError,
            "is 0, expected an int of at least 1. Use 1",
        ),
        (lambda: bulyan(True), TypeError, "num_byzantine is True, expected an int"),
        (lambda: geometric_median(num_iterations=0), ValueError, "of at least 1. Use 8"),
        (lambda: geometric_median(smoothing=0.0), ValueError, "expected a positive finite number"),
    ],
)
def test_bad_settings_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("aggregator", "words"),
    [
        (krum(3), r"8 participants are fewer than 2 \* num_byzantine \+ 3 = 9. Use at most 2"),
        (bulyan(2), r"8 participants are fewer than 4 \* num_byzantine \+ 3 = 11. Use at most 1"),
        (krum(2, num_selected=5), "num_selected is 5, expected at most .* = 4 .* Select fewer"),
    ],
)
def test_too_few_participants_raise(aggregator, words):
    @fedpax.program(clients=N)
    def combine(updates):
        return aggregator.aggregate(aggregator.init(None), updates, None)[0]

    with pytest.raises(ValueError, match=words):
        combine(np.ones((N, 2), np.float32))


@pytest.mark.parametrize("name", AGGREGATORS)
def test_an_empty_tree(name):
    assert combine(name)({}) == {}

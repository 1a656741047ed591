"""NoLoCo: what is sent, and to whom; how far islands spread."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from method_problem import PARTICIPANTS, random_params
from method_table import trainer

import fedpax
from fedpax import Cohort
from fedpax.algorithms import noloco
from fedpax.algorithms.parts.model_averaging import perfect_matchings, permute_islands
from fedpax.hlo.collectives import collectives
from fedpax.parallel.mesh import make_mesh

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("algorithms")


@settings(max_examples=40)
@given(st.integers(1, 17))
def test_every_two_islands_are_partners_once(n):
    matchings = perfect_matchings(n)
    assert len(matchings) == max(n - 1 + n % 2, 1)
    met = np.zeros((n, n), int)
    for partner in matchings:
        assert all(partner[partner[i]] == i for i in range(n))
        assert sum(partner[i] == i for i in range(n)) == n % 2
        met[np.arange(n), partner] += 1
    assert np.all(met[~np.eye(n, dtype=bool)] == 1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8 automatic", "8 explicit"])
def test_models_are_exchanged_without_an_all_reduce(mesh):
    """All that is reduced are the metrics."""
    compiled = trainer("NoLoCo", mesh)
    communication = [
        c for c in collectives(compiled.round.as_text(), compiled.mesh) if "islands" in c.axes
    ]
    assert {c.kind for c in communication} == {"all-reduce", "collective-permute"}
    reduced = [c for c in communication if c.kind == "all-reduce"]
    assert {shape for c in reduced for shape in c.shapes} == {"f32[]"}
    # phi and y of each parameter, in each of the seven matchings, one of which is taken.
    sent = [c for c in communication if c.kind == "collective-permute"]
    assert sum(len(c.shapes) for c in sent) == 7 * 2 * len(random_params())
    assert all(target != source for c in sent for source, target in c.groups)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shards_of_a_model_are_exchanged_in_place(kind):
    """Each device sends its own shard to the device of the partner that holds the same shard."""
    mesh = make_mesh(islands=4, fsdp=2, axis_types=kind)
    sharding = NamedSharding(mesh, PartitionSpec("islands", "fsdp"))
    matchings = perfect_matchings(4)
    with jax.set_mesh(mesh):
        x = jax.device_put(np.arange(24, dtype=np.float32).reshape(4, 6), sharding)
        run = fedpax.program(islands=4)(lambda x, c: permute_islands(x, matchings, c))
        step = jax.jit(run).lower(x, jnp.int32(1)).compile()
        exchanged = step(x, jnp.int32(1))
    communication = [c for c in collectives(step.as_text(), mesh) if "islands" in c.axes]
    assert [c.kind for c in communication] == ["collective-permute"] * len(matchings)
    # On explicit axes jax 0.10 makes the operands of a partly manual shard_map whole.
    whole = kind == AxisType.Explicit and jax.__version_info__ < (0, 11)
    assert {shape for c in communication for shape in c.shapes} <= {
        "f32[1,3]",
        *["f32[1,6]"] * whole,
    }
    np.testing.assert_array_equal(exchanged, np.asarray(x)[list(matchings[1])])


def test_an_exchange_takes_the_chosen_permutation():
    values = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    choices = [tuple(np.random.default_rng(s).permutation(5).tolist()) for s in (1, 2, 3)]
    run = jax.jit(fedpax.program(islands=5)(lambda x, c: permute_islands(x, choices, c)))
    for i, sources in enumerate(choices):
        np.testing.assert_array_equal(run(values, jnp.int32(i)), values[np.array(sources)])


@pytest.mark.slow
def test_the_pull_bounds_the_spread_of_the_islands():
    """Islands walk at random: without the pull apart, with it not."""

    def drift(w, batch):
        return jnp.sum(w * batch), {}  # the gradient is the batch: noise

    noise = np.random.default_rng(0).normal(size=(60, PARTICIPANTS, 1, 20)).astype(np.float32)
    spread = {}
    for pull in (0.0, 0.7):
        algorithm = noloco(
            drift, islands=PARTICIPANTS, inner_optimizer=optax.sgd(0.1), momentum=0.0, pull=pull
        )
        state = algorithm.init(jnp.zeros(20))
        step = jax.jit(lambda s, b, a=algorithm: a.round(s, Cohort(b)))
        for batch in noise:
            state, _ = step(state, batch)
        spread[pull] = float(jnp.std(state.local_params, axis=0).mean())
    assert spread[0.7] < 0.4 * spread[0.0]

"""A cohort keeps the values of its NumPy arrays, or names the one that JAX cannot hold."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax import Cohort
from fedpax.algorithms import data_parallel, fedavg
from fedpax.clients import check_cohort

TARGETS = np.array([2.0, 12.0, 12.0], np.float32)[:, None, None]  # clients, steps, batch


def loss_fn(w, batch):
    return jnp.mean((w - batch) ** 2) / 2, {}


def trained(cohort, run=jax.jit):
    """One step of size 1 leads to the weighted mean of the clients' targets."""
    algorithm = fedavg(loss_fn, cohort_size=3, client_optimizer=optax.sgd(1.0))
    return run(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)[0].params.item()


@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32", "float64", ">i8"])
def test_counts_beyond_int32_are_the_weights_that_they_are(dtype):
    cohort = Cohort(TARGETS, num_examples=np.array([3e9, 1e9, 1e9]).astype(dtype))
    assert trained(cohort) == 6.0
    if dtype == "int64":
        assert trained(cohort, run=lambda round: round) == 6.0
        assert trained(Cohort(TARGETS)._replace(num_examples=cohort.num_examples)) == 6.0


@pytest.mark.parametrize(
    ("counts", "num_steps"), [([-5, 1, 3], None), ([-5.0, 1.0, 3.0], np.array([1, 1, 1]))]
)
def test_a_negative_count_is_0(counts, num_steps):
    targets = TARGETS + np.array([0, 0, 4], np.float32)[:, None, None]
    assert trained(Cohort(targets, jnp.array(counts), num_steps)) == 15.0
    algorithm = data_parallel(loss_fn, optimizer=optax.sgd(1.0), islands=3)
    cohort = Cohort(targets, np.array(counts), num_steps)
    state, _ = jax.jit(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)
    assert state.params.item() == 15.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"client_ids": np.array([0, 1, 2**40])},
            r"client_ids has the value 1099511627776 \(int64",
        ),
        (
            {
                "num_steps": np.array([1, 1, 2**32 + 1]),
                "batches": np.broadcast_to(np.float32(0), (3, 2**33, 1)),
            },
            r"num_steps has the value 4294967297",
        ),
        ({"num_examples": np.array([1, 1, 1e300])}, r"num_examples has the value 1e\+300"),
        ({"batches": {"x": np.array([[2**31]])}}, r"batches\['x'\] has the value 2147483648"),
        ({"batches": {"x": np.array([[2**32]], np.uint64)}}, r"batches\['x'\].*4294967296"),
        ({"batches": [np.array([-1e39])]}, r"batches\[0\] has the value -1e\+39 \(float64\)"),
    ],
)
def test_a_value_that_jax_cannot_hold_is_named(fields, words):
    with pytest.raises(ValueError, match=rf"^cohort.{words}.*(preprocess|Scale)"):
        Cohort(**{"batches": TARGETS} | fields)
    with pytest.raises(ValueError, match=words):
        Cohort(TARGETS)._replace(**fields)
    with jax.enable_x64(True):
        assert Cohort(**{"batches": TARGETS} | fields)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (np.full(3, 2e38, np.float32), r"the sum 6e\+38, expected 0 or 1\.2e-38 to 3\.4e\+38"),
        (np.full(3, 1e-39, np.float32), r"the sum 3e-39, expected 0 or 1\.2e-38.*largest one"),
        (np.full(3, 1e-45), r"the sum 4\.2\d*e-45"),
        (np.float16([1, np.nan, 2]), "the value nan, expected finite numbers"),
        (np.float32([1, 2, np.inf]), "the value inf, expected finite numbers"),
    ],
)
def test_weights_that_a_jitted_mean_would_lose_are_named(counts, words):
    with pytest.raises(ValueError, match=rf"^cohort\.num_examples has {words}"):
        Cohort(TARGETS, counts)
    with pytest.raises(ValueError, match=words):
        Cohort(TARGETS)._replace(num_examples=counts)


@pytest.mark.parametrize(("client", "number"), [(2, 20), (0, -1)])
def test_a_number_of_steps_that_the_batches_do_not_have_is_named(client, number):
    num_steps = np.array([1, 0, 1])
    cohort = Cohort(TARGETS, num_steps=num_steps)
    wrong = np.where(np.arange(3) == client, number, num_steps)
    words = rf"num_steps\[{client}\] is {number}, expected from 0 to 1, the number of steps"
    with pytest.raises(ValueError, match=words):
        Cohort({"x": TARGETS}, num_steps=wrong)
    with pytest.raises(ValueError, match=words):
        cohort._replace(num_steps=wrong)
    rounds = jax.tree.map(lambda x: np.stack([x] * 2), cohort)  # its axis 1 is the clients
    assert rounds.num_steps.shape == (2, 3)


def test_weights_near_the_ends_of_the_range_are_used():
    for scale in (2e-38, 1e37):
        assert trained(Cohort(TARGETS, np.float32([3, 1, 1]) * np.float32(scale))) == (
            pytest.approx(6.0, rel=1e-5)
        )
    assert trained(Cohort(TARGETS, np.float32([0, 0, -1e38]))) == 0.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array([["cat"]]), r"dtype <U3 and values such as 'cat'.*np\.unique"),
        (np.array([[None]]), r"dtype object and values such as None.*\.astype\(np\.float32\)"),
    ],
)
def test_arrays_that_are_not_numbers_name_the_conversion(values, words):
    with pytest.raises(TypeError, match=rf"^cohort\.batches\['y'\] has {words}"):
        Cohort({"y": values})


def test_other_byte_orders_are_converted_and_other_leaves_are_left_alone():
    big = Cohort({"x": TARGETS.astype(">f4")}, client_ids=np.array([0, 1, 2], ">i8"))
    assert big.batches["x"].dtype == np.float32 and big.client_ids.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(big.batches["x"], TARGETS)
    cohort = Cohort({"x": TARGETS}, np.array([1, 2, 3]), client_ids=np.arange(3, dtype=np.int32))
    assert cohort.batches["x"] is TARGETS
    copies = pickle.loads(pickle.dumps(cohort)), jax.tree.map(lambda x: x, cohort)
    assert all(type(copy) is Cohort and copy._fields == Cohort._fields for copy in copies)
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cohort)
    assert specs.num_examples.shape == (3,)


def test_a_step_can_have_one_random_key():
    keys = jax.random.split(jax.random.key(0), (3, 2))
    check_cohort("fedavg", Cohort({"x": np.ones((3, 2, 4)), "key": keys}), 3)
    with pytest.raises(ValueError, match=r"batches\['y'\] has shape \[3, 2\].*axis of steps"):
        check_cohort("fedavg", Cohort({"x": np.ones((3, 2, 4)), "y": np.ones((3, 2))}), 3)

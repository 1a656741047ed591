"""Tests of the check for numbers that are not finite: on the host, and compiled."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.training import spikes
from fedpax.training.spikes import FiniteCheck, report_update_norm, turned_non_finite


class State(NamedTuple):
    params: Any
    moments: Any


class Computed(NamedTuple):
    half: Any

    @property
    def params(self) -> Any:
        return jax.tree.map(lambda x: 2 * x, self.half)


@given(st.lists(st.sampled_from([0.5, -3.0, np.inf, -np.inf, np.nan]), min_size=1, max_size=5))
def test_host_and_compiled_check_agree(values: list[float]) -> None:
    array = np.array(values, np.float32)
    state = State(
        {"a": jnp.asarray(array), "b": jnp.asarray(array[:1], jnp.bfloat16)},
        [jnp.asarray(array[::-1]), np.float32(values[-1]), jnp.arange(3), jax.random.key(0)],
    )
    compiled = jax.jit(spikes._finite_leaves)(state)
    assert spikes._finite_leaves_on_host(state) == jax.tree.map(bool, compiled)
    assert compiled.keys() == {".params['a']", ".params['b']", ".moments[0]", ".moments[1]"}


@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec()])
def test_every_shard_is_checked_in_pieces(spec: PartitionSpec) -> None:
    mesh = jax.make_mesh((4,), ("x",))
    good = np.random.default_rng(0).normal(size=(8, 2**19)).astype(np.float32)
    for row, column in ((0, 0), (3, 5), (7, 2**19 - 1)):
        bad = good.copy()
        bad[row, column] = np.nan
        states = (State(jax.device_put(x, NamedSharding(mesh, spec)), ()) for x in (good, bad))
        check = FiniteCheck(next(states))
        assert check.find(next(states)) == ".params"


def test_nothing_is_compiled_for_arrays_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "jit", lambda *_, **__: pytest.fail("compiled"))
    check = FiniteCheck(State(jnp.ones(3), jnp.zeros(2)))
    assert check.find(State(jnp.ones(3), jnp.array([1.0, jnp.inf]))) == ".moments"


def test_a_computed_model_is_checked_in_one_program() -> None:
    check = FiniteCheck(Computed(jnp.ones(3)))
    assert check.find(Computed(jnp.full(3, 3e38))) == ".params"  # twice is infinite
    assert check.find(Computed(jnp.full(3, 1e38))) is None


def test_the_check_does_not_keep_a_round_from_reusing_the_state() -> None:
    double = jax.jit(lambda state: jax.tree.map(lambda x: 2 * x, state), donate_argnums=0)
    state = double(State(jnp.ones((100, 1000)), ()))
    check = FiniteCheck(state)
    address = state.params.unsafe_buffer_pointer()
    state = double(state)
    assert check.find(state) is None and state.params.unsafe_buffer_pointer() == address


def test_an_infinity_that_was_there_is_allowed() -> None:
    before = {"params": jnp.zeros(2), "least": jnp.inf}
    assert not turned_non_finite(before, before | {"params": jnp.ones(2)})
    assert turned_non_finite(before, before | {"params": jnp.array([1.0, jnp.nan])})


def test_a_round_reports_the_norm_of_its_update() -> None:
    class State(NamedTuple):
        params: jax.Array

    round = report_update_norm(lambda state, x: (State(state.params - x), {"loss": x[0]}))
    assert round(State(jnp.ones(2)), jnp.array([3.0, 4.0]))[1]["update_norm"].item() == 5.0

"""Tests of how many clients a device runs at once, in experiments with cohort.chunk_size="auto"."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from test_image_experiments import small

import fedpax
from fedpax.experiments import fedavg_images as module
from fedpax.primitives import participant_loop
from fedpax.settings import cohort_settings
from fedpax.settings.cohort_settings import CohortConfig


def seen_as(mesh, platform, device_kind, clients=1):
    """Make a mesh that has the devices of another platform, which only their names tell."""
    device = SimpleNamespace(platform=platform, device_kind=device_kind)
    return SimpleNamespace(
        devices=np.array([device]), shape={"clients": clients}, abstract_mesh=mesh.abstract_mesh
    )


@pytest.fixture(scope="module")
def experiment():
    return small(module.fedavg_digits(), rounds=2, size=10, max_steps=2)


@pytest.mark.parametrize(
    ("chunk_size", "platform", "clients_that_fit", "devices", "at_once"),
    [
        ("auto", "cpu", 100, 1, 1),
        ("auto", "gpu", 100, 1, 10),
        ("auto", "gpu", 100, 4, 3),  # three on each device
        ("auto", "gpu", 9, 1, 5),  # two equal chunks
        ("auto", "tpu", 4, 1, 4),
        ("auto", "gpu", 0, 1, 1),
        (7, "gpu", 100, 1, 7),
    ],
)
def test_as_many_clients_as_fit_on_an_accelerator_train_at_once(
    experiment, monkeypatch, chunk_size, platform, clients_that_fit, devices, at_once
):
    run = experiment.build()
    params = jax.eval_shape(run.init, jax.random.key(0))
    batches = run.cohort_shapes.batches
    loss_fn = experiment.make_loss(experiment.make_model())
    cohort = dataclasses.replace(experiment.cohort, chunk_size=chunk_size)
    peaks = []
    measured = participant_loop.peak_live_bytes
    monkeypatch.setattr(
        participant_loop,
        "peak_live_bytes",
        lambda jaxpr: peaks.append(measured(jaxpr)) or peaks[-1],
    )
    shared = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))

    def fit():
        mesh = seen_as(run.mesh, platform, "unknown", devices)
        return cohort.fit(mesh, loss_fn, params, batches).at_once

    fit()
    if peaks:
        limit = clients_that_fit * (peaks[0] - shared)
        monkeypatch.setattr(participant_loop, "AUTO_CHUNK_BYTES", limit)
    assert fit() == at_once
    assert bool(peaks) == (chunk_size == "auto" and platform != "cpu")


def test_the_cohorts_and_the_method_have_the_chunks_that_fit(experiment, monkeypatch):
    one_by_one = experiment.build()
    monkeypatch.setattr(
        CohortConfig, "fit", lambda cohort, *_: dataclasses.replace(cohort, chunk_size=3)
    )
    made, make = [], cohort_settings.cohort_rounds
    counted = lambda *args, **named: made.append(1) or make(*args, **named)
    monkeypatch.setattr(cohort_settings, "cohort_rounds", counted)
    run = experiment.build()
    assert len(made) == 1, "populations of millions take a second"
    chosen = dataclasses.replace(experiment.cohort, chunk_size=3)
    stated = dataclasses.replace(experiment, cohort=chosen).build()
    states = {}
    for name, own in {"fitted": run, "stated": stated, "one": one_by_one}.items():
        cohort = next(own.cohorts)
        with jax.set_mesh(own.mesh):
            params = own.init(jax.random.key(0))
            state = own.algorithm.init(params)
            text = fedpax.explain(own.algorithm.round, state, cohort)
            states[name] = cohort.client_ids, jax.jit(own.algorithm.round)(state, cohort)
        assert ("chunk_size=3" in str(text)) == (name != "one")
    np.testing.assert_array_equal(states["fitted"][0], states["stated"][0])
    assert sorted(states["fitted"][0]) == sorted(states["one"][0])
    for other in ("stated", "one"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            states["fitted"][1],
            states[other][1],
        )

"""An evaluation in batch jobs equals that in one process."""

import functools

import jax
import numpy as np
import pytest
from batch_rounds import run_in_a_loop
from hospital_files import write_hospitals

from fedpax.commands.parts.options import configure
from fedpax.deploy.batch_training import evaluate_in_batches, open_heldout


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_hospitals(tmp_path_factory.mktemp("hospitals"))[1]


def random_params(run, seed):
    params = jax.eval_shape(run.init, jax.random.key(0))
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.float32(random.normal(size=x.shape) * 0.3), params)


@pytest.mark.parametrize("label", ["outcome", "score"])
def test_metrics_equal_those_of_one_process(label, files):
    experiment = configure(
        "fedavg_table",
        [files, f"--data.label={label}", "--data.heldout_clients=0.3", "--heldout_batch_size=4"],
        None,
    )
    run = experiment.build()
    params = random_params(run, seed=1)
    result, by_client = evaluate_in_batches(
        experiment.open_heldout_clients(),
        params,
        run_in_a_loop,
        functools.partial(open_heldout, experiment),
        by_client=True,
    )
    expected = run.evaluate(params)
    assert result.keys() == expected.keys()
    assert any("new_clients" in name for name in result)
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-6)
    every = run.evaluate_clients(params)
    places = [list(every.names).index(name) for name in by_client.names]
    np.testing.assert_array_equal(by_client.num_examples, every.num_examples[places])
    for name in by_client.metrics.keys() & every.metrics.keys():
        np.testing.assert_allclose(
            by_client.metrics[name], every.metrics[name][places], rtol=1e-4, atol=1e-5
        )
    assert by_client.metrics.keys() & every.metrics.keys() >= (
        {"rmse", "r2"} if label == "score" else {"loss", "accuracy"}
    )


def test_without_by_client_no_metrics_of_a_client_leave_the_workers(files):
    experiment = configure("fedavg_table", [files, "--data.label=outcome"], None)
    heldout = experiment.open_heldout_clients()
    results = []

    def run_rounds(*args, **settings):
        results.append(run_in_a_loop(*args, **settings))
        return results[-1]

    params = random_params(experiment.build(), seed=2)
    _, by_client = evaluate_in_batches(heldout, params, run_rounds, lambda: heldout.clients)
    assert by_client is None
    assert {leaf.shape for leaf in jax.tree.leaves(results)} == {(2,)}


def test_experiments_without_heldout_clients_are_told():
    with pytest.raises(ValueError, match="no held-out data by client for batch jobs"):
        configure("fedavg_digits", [], None).open_heldout_clients()

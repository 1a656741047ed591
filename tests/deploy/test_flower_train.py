"""The loop of a run on Flower, without Flower: its files, and a run that is continued."""

import json

import numpy as np
import pytest
from deploy import nodes
from deploy.nodes import SETTINGS, LocalNetwork, N

from fedpax.deploy.flower.app import METRICS_FILE, POSITION_FILE, STATE_FILE, train
from fedpax.errors import ConfigurationError


@pytest.fixture(scope="module")
def program():
    return nodes.program_of("scaffold")


def settings_of(out, **others):
    return {"out": str(out), "seed": SETTINGS.seed, "wait": 0.0, **others}


def test_a_run_writes_its_state_and_its_metrics(program, tmp_path):
    train(LocalNetwork(program, tmp_path), program, "run1", settings_of(tmp_path / "out"))
    expected = nodes.by_jit("scaffold")[-1]
    loaded = np.load(tmp_path / "out" / STATE_FILE)
    np.testing.assert_allclose(loaded["state.params['w']"], expected.params["w"], rtol=0, atol=1e-6)
    lines = (tmp_path / "out" / METRICS_FILE).read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [m["round"] for m in metrics] == [1, 2, 3]
    assert all(m["participants"] == N and m["loss"] > 0 for m in metrics)


def test_a_run_that_another_server_continues_has_the_same_bits(program, tmp_path):
    whole = train(
        LocalNetwork(program, tmp_path / "a"), program, "run1", settings_of(tmp_path / "x")
    )
    out = tmp_path / "out"
    network = LocalNetwork(program, tmp_path / "b")
    train(network, program, "run2", settings_of(out, rounds=2))
    # Flower gives the second run another name; a node may have begun the next round already.
    network = LocalNetwork(program, tmp_path / "b", lost=lambda values, node: None)
    result = train(network, program, "run3", settings_of(out, resume=True))
    for name, value in whole.items():
        np.testing.assert_array_equal(value, result[name])
    assert {p.values["run"] for _, p in network.log if "run" in p.values} == {"run2"}
    lines = (out / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]


def test_a_run_without_a_position_begins(program, tmp_path):
    network = LocalNetwork(program, tmp_path)
    train(network, program, "run1", settings_of(tmp_path / "out", resume=True, rounds=1))
    assert (tmp_path / "out" / POSITION_FILE).exists()


def test_positions_that_do_not_fit_are_told(program, tmp_path):
    settings = settings_of(tmp_path / "out", rounds=1, resume=True)
    train(LocalNetwork(program, tmp_path), program, "run1", settings)
    other = nodes.program_of("fedavg")
    with pytest.raises(ConfigurationError, match=r"is of program \w+, and this app has \w+"):
        train(LocalNetwork(other, tmp_path), other, "run1", settings)
    path = tmp_path / "out" / POSITION_FILE
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ConfigurationError, match=r"cannot be read .*damaged.*Restore it"):
        train(LocalNetwork(program, tmp_path), program, "run1", settings)

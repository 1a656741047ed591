"""Tests of the benchmark that compiles a round for pods of several sizes."""

import dataclasses
import json

import pytest

from fedpax.experiments.benchmarks import topologies

pytestmark = pytest.mark.slow


def run(capsys, *arguments):
    """Run the command and return its exit status, its conclusion and its rows."""
    status = topologies.main(["--batch_size=2", "--local_steps=2", *arguments])
    *_, conclusion, content = capsys.readouterr().out.splitlines()
    return status, conclusion, json.loads(content)["rows"]


def check_rows(rows, devices, clients_per_device):
    """Check that the round all-reduces updates and metrics, after the loop over clients."""
    assert [row["devices"] for row in rows] == devices
    assert [row["clients"] for row in rows] == [clients_per_device * n for n in devices]
    for row in rows:
        assert row["collective_bytes"] >= 4 * 159_010  # parameters of the MLP
        assert row["argument_bytes"] > row["collective_bytes"]
        assert {kind for kind, _, _ in row["collectives"]} == {"all-reduce"}
        assert not any(in_loop for _, _, in_loop in row["collectives"])


@pytest.mark.parametrize("chunk_size", [pytest.param("auto", marks=pytest.mark.slow), "1"])
def test_the_round_is_the_same_on_any_number_of_simulated_devices(capsys, chunk_size):
    arguments = ["--topologies=cpu:2,cpu:4,cpu:8", "--clients_per_device=4"]
    status, conclusion, rows = run(capsys, *arguments, f"--chunk_size={chunk_size}")
    assert status == 0 and conclusion == "All pods have the same collectives and memory."
    check_rows(rows, [2, 4, 8], 4)
    assert len({row["temporary_bytes"] for row in rows}) == 1 and rows[0]["temporary_bytes"] > 0


def test_a_difference_between_pods_gives_status_1(capsys, monkeypatch):
    compile_for = topologies.compile_for

    def more_clients_each(topology, settings):
        more = settings.clients_per_device * (2 if topology == "cpu:4" else 1)
        return compile_for(topology, dataclasses.replace(settings, clients_per_device=more))

    monkeypatch.setattr(topologies, "compile_for", more_clients_each)
    status, conclusion, _ = run(capsys, "--topologies=cpu:2,cpu:4", "--clients_per_device=2")
    assert status == 1 and "differ" in conclusion


def test_the_round_is_the_same_on_tpu_pods(capsys):
    pytest.importorskip("libtpu")
    status, conclusion, rows = run(capsys, "--topologies=v5e:4x4,v5e:8x8", "--clients_per_device=8")
    assert status == 0, conclusion
    check_rows(rows, [16, 64], 8)

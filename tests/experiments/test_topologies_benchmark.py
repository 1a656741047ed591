"""With the clients of a device fixed, a round is the same on it whatever the number of devices."""

import json

import pytest

from fedpax.experiments.benchmarks import topologies


def run(capsys, *arguments):
    """The command's exit status, its verdict and its rows."""
    status = topologies.main(["--batch=2", "--local_steps=2", *arguments])
    *_, verdict, figures = capsys.readouterr().out.splitlines()
    return status, verdict, json.loads(figures)["rows"]


def check_rows(rows, devices, clients_per_device):
    """There is one sum of the parameters' changes and the metrics, behind the clients' loop."""
    assert [row["devices"] for row in rows] == devices
    assert [row["clients"] for row in rows] == [clients_per_device * n for n in devices]
    for row in rows:
        assert row["collective_bytes"] >= 4 * 159_010  # parameters of the MLP
        assert row["argument_bytes"] > row["collective_bytes"]
        assert {kind for kind, _, _ in row["collectives"]} == {"all-reduce"}
        assert not any(in_loop for _, _, in_loop in row["collectives"])


@pytest.mark.parametrize("chunk_size", ["auto", "1"])
def test_the_round_on_simulated_devices(capsys, chunk_size):
    arguments = ["--topologies=cpu:2,cpu:4,cpu:8", "--clients_per_device=4"]
    status, verdict, rows = run(capsys, *arguments, f"--chunk_size={chunk_size}")
    assert status == 0 and verdict == "The same on every pod."
    check_rows(rows, [2, 4, 8], 4)
    assert len({row["temporary_bytes"] for row in rows}) == 1 and rows[0]["temporary_bytes"] > 0


def test_a_difference_is_a_failure(capsys, monkeypatch):
    compile_for = topologies.compile_for

    def more_clients_each(topology, clients_per_device, **options):
        more = 2 * clients_per_device if topology == "cpu:4" else clients_per_device
        return compile_for(topology, clients_per_device=more, **options)

    monkeypatch.setattr(topologies, "compile_for", more_clients_each)
    status, verdict, _ = run(capsys, "--topologies=cpu:2,cpu:4", "--clients_per_device=2")
    assert status == 1 and "differ" in verdict


@pytest.mark.slow
def test_the_round_on_pods_that_are_not_there(capsys):
    pytest.importorskip("libtpu")
    status, verdict, rows = run(capsys, "--topologies=v5e:4x4,v5e:8x8", "--clients_per_device=8")
    assert status == 0, verdict
    check_rows(rows, [16, 64], 8)

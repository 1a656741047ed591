"""The comparison over virtual time: its rows, its picture, and what it shows."""

import numpy as np
import pytest

from fedpax.experiments.benchmarks import virtual_time
from fedpax.experiments.benchmarks.virtual_time import VirtualTime

pytestmark = pytest.mark.slow


def test_fedbuff_reaches_a_loss_sooner_than_fedavg():
    fedavg, fedbuff, fedasync = VirtualTime(seconds=200.0).measure()
    assert [c.method for c in (fedavg, fedbuff, fedasync)] == ["FedAvg", "FedBuff", "FedAsync"]
    assert fedavg.megabytes[-1] == pytest.approx(fedbuff.megabytes[-1], rel=0.05)
    assert fedavg.seconds[-1] > 3 * fedbuff.seconds[-1]
    worst = max(fedavg.loss[-1], fedbuff.loss[-1])
    reached = [
        np.array(c.seconds)[np.flatnonzero(np.array(c.loss) <= worst)[0]] for c in (fedavg, fedbuff)
    ]
    assert reached[1] < reached[0] / 2
    assert fedbuff.mean_staleness == pytest.approx(30 / 10, rel=0.2)


def test_it_prints_writes_and_draws(tmp_path, capsys):
    picture, rows = tmp_path / "curves.png", tmp_path / "curves.json"
    argv = ["--clients=12", "--busy=6", "--buffer=3", "--seconds=20", f"--out={picture}"]
    assert virtual_time.main([*argv, f"--json={rows}"]) == 0
    printed = capsys.readouterr().out
    assert all(method in printed for method in ("FedAvg", "FedBuff", "FedAsync"))
    assert picture.read_bytes()[1:4] == b"PNG" and '"megabytes"' in rows.read_text()

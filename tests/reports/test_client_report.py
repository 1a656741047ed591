"""Tables and pictures of metrics by client."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from fedpax.reports.client_report import (
    clients_json,
    format_clients,
    plot_clients,
    spread_of,
    worst_first,
)
from fedpax.training.client_metrics import ClientMetrics

RNG = np.random.default_rng(0)


def made(count: int) -> ClientMetrics:
    metrics = {
        "loss": RNG.gamma(2, 0.3, count),
        "auc": np.where(RNG.random(count) < 0.3, np.nan, RNG.random(count)),
        "r2": np.full(count, np.nan),
    }
    return ClientMetrics([f"Clínica {k} $x" for k in range(count)], np.arange(count), metrics)


@pytest.mark.parametrize("name", ["loss", "accuracy"])
def test_the_spread_of_a_metric(name: str) -> None:
    values = RNG.random(50)
    values[7] = np.nan
    known = np.delete(values, 7)
    spread = spread_of(name, values)
    worst, best = (np.nanargmax, np.nanargmin) if name == "loss" else (np.nanargmin, np.nanargmax)
    assert (spread.worst, spread.best, spread.defined) == (worst(values), best(values), 49)
    share = (known > spread.percentile if name == "loss" else known < spread.percentile).mean()
    assert share == pytest.approx(0.1, abs=0.02)
    assert spread.mean == pytest.approx(known.mean())


def test_the_worst_clients_are_listed_first() -> None:
    result = made(30)
    text = format_clients(result)
    worst = int(np.argmax(result.metrics["loss"]))
    assert text.splitlines()[8].startswith(f"| Clínica {worst} $x ")
    assert text.endswith("10 more clients; --json=FILE has all of them.")
    assert "| r2     | " in text and "0 of 30 |" in text
    assert sorted(worst_first(result)) == list(range(30))
    values = clients_json(result)
    assert [line["client"] for line in values] == list(result.names)
    assert all(line["r2"] is None for line in values)
    of_text = result._replace(unit="tokens")
    assert "| client " in text and "| examples |" in text
    assert "| tokens" in format_clients(of_text) and "examples" not in format_clients(of_text)
    assert "tokens" in clients_json(of_text)[0]


@pytest.mark.parametrize("count", [1, 20, 21, 300])
def test_pictures_of_any_number_of_clients(tmp_path: Path, count: int) -> None:
    plot_clients(made(count), tmp_path / "clients.png")
    picture = imread(tmp_path / "clients.png")
    assert picture.shape[0] > 300 and picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.01

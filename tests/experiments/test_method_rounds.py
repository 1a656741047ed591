"""Tests of the benchmark of the federated methods' rounds."""

import jax
import jax.numpy as jnp
import pytest

from fedpax.experiments.benchmarks import method_rounds, store_rounds, timing
from fedpax.experiments.benchmarks.workloads import WORKLOADS, Workload
from fedpax.models.classifiers import MLPConfig, mlp


@pytest.fixture
def tiny(monkeypatch):
    """Add a tiny model, and measure on this process's devices."""
    tiny = Workload(mlp(MLPConfig(layer_sizes=(6, 5, 3))), (6,), 3)
    monkeypatch.setitem(WORKLOADS, "tiny", lambda: tiny)
    monkeypatch.setattr(timing, "on_devices", lambda _, fn, *args: fn(*args))


@pytest.mark.slow
def test_every_method_has_a_row_that_is_paired_with_fedavg(tiny, capsys, tmp_path):
    arguments = ["--model=tiny", "--clients=8", f"--json={tmp_path / 'rows.json'}"]
    rows = method_rounds.main.run([*arguments, "--repetitions=2"])
    table = capsys.readouterr().out.splitlines()
    by_name = {row.name: row for row in rows}
    assert len(table) == 2 + len(rows) == 2 + len(by_name)
    for line, row in zip(table[2:], rows, strict=True):
        assert line.startswith(f"| {row.name}")
        assert row.ratio == timing.paired_ratio(row.seconds, by_name["FedAvg"].seconds)
    assert by_name["FedAvg"].ratio == 1 and by_name["Mime"].passes == 3


@pytest.mark.slow
def test_the_chosen_methods_are_timed_beside_fedavg(tiny):
    sizes = ["--model=tiny", "--clients=8", "--repetitions=1", "--clock=cpu"]
    rows = method_rounds.main.run([*sizes, "--methods=SCAFFOLD II"])
    assert [row.name for row in rows] == ["FedAvg", "SCAFFOLD II"]
    assert rows[1].seconds[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_hand_written_rounds_of_methods_with_stores_have_the_states_of_fedpax(tiny, devices):
    """The benchmark raises if they differ."""
    sizes = ["--model=tiny", "--clients=8", "--population=50", f"--devices={devices}"]
    rows = store_rounds.main.run([*sizes, "--repetitions=1"])
    by_name = {row.name: row for row in rows}
    assert by_name["FedAvg by hand"].ratio == 1
    for name in store_rounds.BY_HAND:
        own, by_hand = by_name[name], by_name[f"{name} by hand"]
        assert by_hand.to_hand == 1
        assert own.to_hand == timing.paired_ratio(own.seconds, by_hand.seconds)


def test_an_unknown_method_is_refused(capsys):
    with pytest.raises(SystemExit):
        method_rounds.main(["--methods=FedAvg,fedprox"])
    assert "unknown methods ['fedprox']; choose from FedAvg, FedProx" in capsys.readouterr().err


def test_a_repeated_round_starts_from_the_last_state_and_takes_over_its_memory():
    step = jax.jit(lambda state, cohort: (state + cohort, {}), donate_argnums=0)
    start = jnp.arange(3.0)
    run = timing.repeated(step, start, jnp.float32(2))
    first, _ = run()
    second, _ = run()
    assert first.is_deleted() and not start.is_deleted()
    assert second.tolist() == [4.0, 5.0, 6.0]

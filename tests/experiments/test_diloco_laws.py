"""Tests of the benchmark of DiLoCo's loss over its settings."""

import os
import signal
import threading
import time
from pathlib import Path

import jax
import pytest

from fedpax.experiments.benchmarks.diloco_laws import (
    Result,
    Setting,
    best_results,
    common_start,
    draw,
    measure,
    settings,
    table,
)
from fedpax.experiments.diloco_text import DataParallelText, DiLoCoText
from fedpax.experiments.streaming_diloco_text import StreamingDiLoCoText
from fedpax.parallel.mesh import default_devices
from fedpax.run_files.metrics import read_metrics, select

TOKENS = 2_000_000


@pytest.mark.parametrize("rows", [None, 64])
def test_all_runs_have_the_same_tokens_per_step_and_nearly_the_same_tokens(
    rows: int | None,
) -> None:
    runs = [setting for group in settings(3, rows).values() for setting in group]
    tokens_per_step = 64 * (rows or 16)
    assert len({setting.folder for setting in runs}) == len(set(runs))
    for setting in runs:
        experiment = setting.experiment(TOKENS)
        data, mesh = experiment.data, experiment.mesh
        assert experiment.islands * data.batch_size * data.seq_len == tokens_per_step
        per_round = data.local_steps * tokens_per_step
        assert TOKENS - per_round < experiment.training.rounds * per_round <= TOKENS
        assert mesh.islands * mesh.fsdp == 4 and experiment.islands % mesh.islands == 0
        assert experiment.data.seed == experiment.training.seed == setting.seed
        assert experiment.optimizer.learning_rate == setting.learning_rate
        assert experiment.optimizer.weight_decay == setting.weight_decay == 0.1
        decayed = setting._replace(weight_decay=0.01)
        assert decayed.experiment(TOKENS).optimizer.weight_decay == 0.01
        assert decayed.folder != setting.folder


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_outer_momentum_is_that_of_the_setting(momentum: float) -> None:
    diloco = Setting("DiLoCo", 18, 4, "4 bits", 16, outer_momentum=momentum).experiment(TOKENS)
    assert isinstance(diloco, DiLoCoText) and diloco.outer.momentum == momentum
    assert diloco.outer.num_levels == 16
    streaming = Setting("Streaming DiLoCo", 18, 4, "4 bits", 16, outer_momentum=momentum)
    text = streaming.experiment(TOKENS)
    one_step = streaming._replace(local_steps=3).experiment(TOKENS)
    assert isinstance(one_step, StreamingDiLoCoText) and one_step.streaming.delay == 0
    assert one_step.streaming.fragments == 3
    assert isinstance(text, StreamingDiLoCoText) and text.streaming.momentum == momentum
    assert text.streaming.delay == 1


@pytest.mark.parametrize(
    ("setting", "num_tokens", "words"),
    [
        (Setting("DiLoCo", 18, 3, "4 bits", 16), TOKENS, "3 islands do not divide .* 16 rows"),
        (Setting("DiLoCo", 18, 4, "4 bits", 16), 1000, r"fill no round .* Pass more --tokens"),
        (Setting("DiLoCo", 18, 4, "4 bits", 16, 0, -0.1), TOKENS, "optimizer.learning_rate"),
        (Setting("DiLoCo", 18, 4, "4 bits", 16, outer_momentum=1.5), TOKENS, "outer.momentum"),
        (Setting("DiLoCo", 18, 4, "4 bits", 16, weight_decay=-1.0), TOKENS, "weight_decay"),
    ],
)
def test_settings_that_do_not_fit_raise(setting: Setting, num_tokens: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        setting.experiment(num_tokens)


def test_a_common_start_takes_a_fraction_of_the_rounds() -> None:
    setting = Setting("DiLoCo", 18, 4, "4 bits", 16, common_start=0.25)
    start, whole = common_start(setting, TOKENS), setting.experiment(TOKENS)
    assert isinstance(start, DataParallelText) and start.optimizer.schedule == "constant"
    assert start.training.rounds == round(0.25 * whole.training.rounds)
    streaming = setting._replace(method="Streaming DiLoCo", outer_momentum=0.5)
    assert common_start(streaming, TOKENS) == start
    for fraction in (-0.5, 0.001, 1.0):
        with pytest.raises(ValueError, match="Pass a fraction between 0 and 1, or more --tokens"):
            common_start(setting._replace(common_start=fraction), TOKENS)


@pytest.mark.slow
def test_a_run_continues_its_common_start(tmp_path: Path) -> None:
    num_tokens = 4 * 18 * 16 * 64
    setting = Setting("DiLoCo", 18, 4, "4 bits", 16, common_start=0.5)
    with default_devices(jax.devices()[:4]):
        result = measure(setting, num_tokens, tmp_path)
        alone = measure(setting._replace(common_start=0.0), num_tokens, tmp_path)
        parallel = Setting("data parallelism", 18, 4, "float32", 16)
        together = measure(parallel, num_tokens, tmp_path)
    assert result.loss < 5
    mean = (alone.bytes_sent + together.bytes_sent) / 2
    assert result.bytes_sent == pytest.approx(mean)
    runs = {path.name: read_metrics(path) for path in (tmp_path / f"{num_tokens}").iterdir()}
    (start,) = (lines for name, lines in runs.items() if name.startswith("start-"))
    first = select(runs[setting.folder], "training")
    # The run begins where its common start ended.
    assert len(first) == 2 and first[0]["loss"] < select(start, "training")[-1]["loss"]


def test_seeds_are_averaged_and_compared_with_data_parallelism() -> None:
    base = Setting("DiLoCo", 18, 4, "4 bits", 16)
    results = [Result(base._replace(seed=k), loss, 2e6) for k, loss in enumerate((1.5, 1.6, 1.55))]
    text = table(results, ["method", "bits"], baseline=1.5)
    assert "1.5500 ± 0.0500" in text and "+3.33%" in text and "2.0 MB" in text
    assert text.count("DiLoCo") == 1


def test_data_parallelism_has_no_outer_momentum_in_the_table() -> None:
    names = ("data parallelism", "DiLoCo")
    results = [Result(Setting(name, 18, 4, "4 bits", 16), 1.5, 2e6) for name in names]
    rows = table(results, ["method", "outer_momentum"], baseline=1.5).splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[1] for row in cells] == ["", "0.7"]


def test_each_method_and_number_of_local_steps_has_its_own_best_learning_rate() -> None:
    losses = {
        ("data parallelism", 18): (1.5, 1.4, 1.6),
        ("DiLoCo", 18): (1.7, 1.6, 1.5),
        ("DiLoCo", 6): (1.4, 1.6, 1.5),
    }
    results = [
        Result(Setting(method, steps, 4, "4 bits", 16, 0, rate), loss, 2e6)
        for (method, steps), tried in losses.items()
        for rate, loss in zip((0.004, 0.008, 0.016), tried, strict=True)
    ]
    best = best_results(results)
    assert {tuned: result.setting.learning_rate for tuned, result in best.items()} == {
        ("data parallelism", 18): 0.008,
        ("DiLoCo", 18): 0.016,
        ("DiLoCo", 6): 0.004,
    }
    assert len({result.setting.folder for result in results}) == len(results)


def test_local_steps_are_those_of_all_tables_but_one() -> None:
    groups = settings(2, local_steps=6, bits="float32")
    assert [run.bits for run in groups["methods"]] == 4 * ["float32"] + 2 * ["4 bits"]
    assert {run.local_steps for run in groups.pop("local_steps")} == {1, 6, 18, 54, 162}
    assert {run.local_steps for group in groups.values() for run in group} == {6}


def test_the_picture_has_a_panel_per_setting() -> None:
    groups = {
        name: [Result(setting, 1.5, 1e6) for setting in group]
        for name, group in settings(1).items()
    }
    figure = draw(groups, 1.4)
    assert [axes.get_xlabel() for axes in figure.axes] == ["local steps", "islands", "bits"]
    assert all(len(axes.lines) == 2 for axes in figure.axes)


@pytest.mark.slow
def test_a_stopped_run_continues(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    setting, rounds = Setting("data parallelism", 18, 4, "float32", 4), 20
    num_tokens = rounds * 18 * 4 * 64
    folder = tmp_path / f"{num_tokens}" / setting.folder

    def interrupt_after_a_round() -> None:
        while not select(read_metrics(folder), "training"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_after_a_round, daemon=True).start()
    with default_devices(jax.devices()[:4]), pytest.raises(SystemExit) as stopped:
        measure(setting, num_tokens, tmp_path)
    assert stopped.value.code == 128 + signal.SIGINT
    assert "SIGINT: saved. Run the same command again to continue." in capsys.readouterr().err
    trained = len(select(read_metrics(folder), "training"))
    assert trained < rounds

    with default_devices(jax.devices()[:4]):
        assert 0 < measure(setting, num_tokens, tmp_path).loss < 5
    assert len(select(read_metrics(folder), "training")) == rounds

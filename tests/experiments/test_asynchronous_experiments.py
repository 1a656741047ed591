"""Tests of the experiments in virtual time: their traces, schedules, metrics and resumption."""

import dataclasses
import json

import chex
import numpy as np
import pytest

from fedpax.aggregators import codecs
from fedpax.clients import Cohort
from fedpax.data.rounds.scheduled_rounds import ScheduledRounds
from fedpax.experiments import async_diloco_text as text
from fedpax.experiments import fedbuff_images as images
from fedpax.experiments import halos_text as regional
from fedpax.models.classifiers import CNNConfig
from fedpax.models.transformer import TransformerConfig
from fedpax.parallel.mesh import MeshConfig
from fedpax.run_files.metrics import read_metrics, select
from fedpax.settings.trace_settings import TraceConfig
from fedpax.simulation import Trace, save_trace
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

EIGHT_DEVICES = MeshConfig(islands=4, fsdp=2)
TINY = TransformerConfig(
    vocab_size=256, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, mlp_dim=24
)


def small_text(make=text.async_diloco_text, rounds=5, **changes):
    base = make()
    data = dataclasses.replace(
        base.data, local_steps=4, batch_size=2, seq_len=8, heldout_tokens=256
    )
    training = TrainingConfig(rounds=rounds, evaluate_every=0, checkpoint_every=0)
    settings = {"model": TINY, "data": data, "training": training, "mesh": EIGHT_DEVICES}
    return dataclasses.replace(base, **settings | changes)


def small_images(rounds=6, **changes):
    base = images.fedbuff_digits()
    model = CNNConfig(image_height=8, image_width=8, filters=(4, 4), hidden_dim=8)
    training = TrainingConfig(rounds=rounds, evaluate_every=0, checkpoint_every=0)
    return dataclasses.replace(base, model=model, training=training, **changes)


@pytest.mark.slow
def test_async_diloco_trains_over_virtual_time(tmp_path):
    experiment = small_text()
    order = experiment.order()
    assert train(experiment, tmp_path).finished
    lines = select(read_metrics(tmp_path), "training")
    ends = [seconds[np.isfinite(seconds)].max() for seconds in order.seconds]
    np.testing.assert_allclose([line["virtual_seconds"] for line in lines], ends, rtol=1e-6)
    arrivals = (order.num_steps > 0).sum(axis=1)
    assert [line["arrivals"] for line in lines] == arrivals.tolist()
    assert all(0 < line["loss"] < 7 for line in lines)
    size = 4 * experiment.model.num_params()
    assert [line["uploaded_bytes"] for line in lines] == (size * arrivals).tolist()
    assert [line["broadcast_bytes"] for line in lines] == (
        size * (order.position >= 0).sum(axis=1)
    ).tolist()
    # Of the four islands, what one sends on average, as an all-reduce's operand.
    np.testing.assert_allclose(
        [line["bytes_across_placement"] for line in lines], size * np.cumsum(arrivals) / 4
    )


@pytest.mark.slow
def test_halos_trains_over_virtual_time(tmp_path):
    experiment = small_text(regional.halos_text, rounds=8)
    order = experiment.order()
    assert train(experiment, tmp_path).finished
    lines = select(read_metrics(tmp_path), "training")
    np.testing.assert_allclose(
        [line["virtual_seconds"] for line in lines], order.seconds, rtol=1e-6
    )
    arrivals, exchanges = (order.num_steps > 0).sum(axis=1), (order.applies >= 0).sum(axis=1)
    assert exchanges.sum() > 0
    size = 4 * experiment.model.num_params()
    assert [line["uploaded_bytes"] for line in lines] == (size * arrivals).tolist()
    assert [line["exchanged_bytes"] for line in lines] == (2 * size * exchanges).tolist()
    losses = [line["loss"] for line in lines]
    assert losses[-1] < losses[0]


def test_a_cohort_of_regions_has_the_schedule_of_its_round():
    experiment = small_text(regional.halos_text, rounds=8)
    run, order = experiment.build(), experiment.order()
    for r in range(3):
        cohort = next(run.cohorts)
        np.testing.assert_array_equal(
            cohort.schedule.schedule.merges, order.merges[r, [0, 0, 1, 1]]
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(
            (cohort.num_steps, cohort.schedule),
            (run.cohort_shapes.num_steps, run.cohort_shapes.schedule),
        )


def test_regions_of_other_numbers_of_islands_raise():
    regions = regional.RegionsConfig(islands=(3, 2))
    with pytest.raises(ValueError, match=r"are 5 islands, expected islands=4. Set --islands"):
        small_text(regional.halos_text, regions=regions)
    with pytest.raises(ValueError, match="expected a positive number for each region"):
        regional.RegionsConfig(islands=(4, 0))


def test_fast_islands_take_more_steps_and_waiting_islands_equally_many():
    reliable = TraceConfig(sigma=0.7)
    order = small_text(trace=reliable).order()
    assert len(set(order.num_steps.max(axis=0))) > 1
    waiting = small_text(text.waiting_diloco_text, trace=reliable).order()
    assert np.all(waiting.position == 0) and np.all(waiting.num_steps == 4)
    slowest = reliable.make(4).seconds_per_step.max()
    np.testing.assert_allclose(waiting.seconds[:, 0], 4 * slowest * np.arange(1, 6))


def test_a_cohort_of_islands_has_the_schedule_of_its_round():
    experiment = small_text()
    run, order = experiment.build(), experiment.order()
    for r in range(3):
        cohort = next(run.cohorts)
        np.testing.assert_array_equal(cohort.num_steps, order.num_steps[r])
        np.testing.assert_array_equal(cohort.schedule.schedule.position, order.position[r])
        chex.assert_trees_all_equal_shapes_and_dtypes(
            (cohort.num_steps, cohort.schedule),
            (run.cohort_shapes.num_steps, run.cohort_shapes.schedule),
        )
    resumed = experiment.build().cohorts
    resumed.set_state(json.loads(json.dumps(run.cohorts.get_state())))
    chex.assert_trees_all_equal(next(run.cohorts).schedule, next(resumed).schedule)
    steps = order.num_steps.sum() / len(order.num_steps)
    assert run.items_per_round == round(steps * 2 * 8)


def test_a_compressed_update_has_the_bytes_of_its_codes():
    params = {"w": np.zeros((2048, 512), np.float32)}
    assert text._encoded_bytes(codecs.e3m0(), params) == 2048 * 512 * (4 + 32 / 1024) / 8


def test_compressed_updates_have_residuals():
    experiment = small_text(asynchronous=text.AsyncConfig(compression="sign"))
    run = experiment.build()
    state = run.algorithm.init({"w": np.zeros((3, 2), np.float32)})
    assert state.aggregator_state.residual["w"].shape == (4, 3, 2)


@pytest.mark.slow
def test_fedbuff_trains_over_virtual_time(tmp_path):
    experiment = small_images()
    population, _ = experiment.read_population()
    order = experiment.order(population)
    assert order.num_failed == 0 and order.max_staleness > 1
    assert train(experiment, tmp_path).finished
    lines = select(read_metrics(tmp_path), "training")
    np.testing.assert_allclose(
        [line["virtual_seconds"] for line in lines], order.seconds[:, -1], rtol=1e-6
    )
    np.testing.assert_allclose(
        [line["staleness"] for line in lines], order.staleness.mean(axis=1), rtol=1e-5
    )
    size = 4 * experiment.model.num_params()
    assert all(line["uploaded_bytes"] == line["broadcast_bytes"] == 10 * size for line in lines)


def test_each_row_of_a_cohort_has_the_staleness_of_its_client():
    experiment = small_images()
    population, _ = experiment.read_population()
    order = experiment.order(population)
    run = experiment.build()
    for r in range(6):
        cohort = next(run.cohorts)
        result = zip(cohort.client_ids, cohort.schedule.schedule.staleness, strict=True)
        wanted = zip(order.client_ids[r], order.staleness[r], strict=True)
        assert sorted(result) == sorted(wanted)
        # A client's duration is the time of the steps that it takes.
        steps = [2 * -(-len(population[k]) // 10) for k in cohort.client_ids]
        assert cohort.num_steps.tolist() == steps
    chex.assert_trees_all_equal_shapes_and_dtypes(cohort, run.cohort_shapes)


def test_more_clients_at_a_time_than_there_are_raise():
    experiment = small_images(buffer=images.BufferConfig(concurrency=31))
    with pytest.raises(ValueError, match=r"the population has 30 clients.*Lower --buffer"):
        experiment.build()


def test_a_trace_is_read_from_a_file(tmp_path):
    down = np.full((4, 1, 2), np.inf)
    down[2, 0] = 5.0, 9.0
    save_trace(Trace(np.arange(1.0, 5.0), downtimes=down), tmp_path / "trace.jsonl")
    config = TraceConfig(file=str(tmp_path / "trace.jsonl"), sigma=3.0)
    trace = config.make(4)
    assert trace.seconds_per_step.tolist() == [1.0, 2.0, 3.0, 4.0]
    np.testing.assert_array_equal(trace.downtimes, down)
    with pytest.raises(ValueError, match=r"has 4 participants, expected 5.*another file"):
        config.make(5)
    with pytest.raises(ValueError, match=r"cannot be read \(No such file.*Set --trace\.file"):
        TraceConfig(file=str(tmp_path / "other.jsonl")).make(4)


def test_a_drawn_trace_has_its_distributions():
    config = TraceConfig(
        seconds_per_step=2.0,
        sigma=0.3,
        megabytes=8.0,
        megabytes_per_second=4.0,
        bandwidth_sigma=0.0,
        seconds_to_failure=100.0,
        seconds_to_return=50.0,
        seconds_to_arrival=10.0,
        seed=3,
    )
    trace = config.make(4000)
    logs = np.log(trace.seconds_per_step / 2.0)
    np.testing.assert_allclose([logs.mean(), logs.std()], [0.0, 0.3], atol=0.02)
    np.testing.assert_allclose(trace.seconds_to_send, 2.0)
    np.testing.assert_allclose(trace.downtimes[:, 0, 1].mean(), 10.0, rtol=0.1)
    np.testing.assert_allclose(trace.is_up(5000.0).mean(), 100 / 150, atol=0.03)
    np.testing.assert_array_equal(trace.downtimes, config.make(4000).downtimes)
    assert (
        not dataclasses.replace(config, seconds_to_failure=None, seconds_to_return=None)
        .make(9)
        .downtimes[:, 1:]
        .size
    )


def test_returns_without_failures_and_a_run_beyond_the_horizon_raise():
    with pytest.raises(ValueError, match=r"Set --trace\.seconds_to_failure, or leave out"):
        TraceConfig(seconds_to_return=5.0)
    brief = TraceConfig(seconds_to_failure=1e4, seconds_to_return=1.0, horizon=3.0)
    with pytest.raises(ValueError, match=r"trace.horizon=3, but the run lasts .*Raise --trace"):
        small_text(trace=brief).order()
    with pytest.raises(ValueError, match="down for good"):
        small_text(trace=TraceConfig(seconds_to_failure=2.0), rounds=90).order()


def test_the_schedule_follows_a_stream_that_is_moved():
    """A stream that restarts at a round, because its settings were changed, keeps its schedule."""

    class Counter:
        def __init__(self):
            self.round = 0

        def __next__(self):
            self.round += 1
            return Cohort(np.full(1, self.round - 1))

        def get_state(self):
            return {"round": self.round}

        def set_state(self, state):
            self.round = state["round"]

    stream = ScheduledRounds(Counter(), lambda c, r: c._replace(num_steps=np.array([r])))
    stream.set_state({"round": 7, "cohorts": {"round": 0}})
    cohort = next(stream)
    assert cohort.num_steps.item() == 7 and cohort.batches.item() == 7

"""Several processes train one run, as on several hosts: same result, one writer, one end."""

import contextlib
import dataclasses
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from several_processes import finish, start, wait_for_rounds
from small_disk import small_disk_at
from small_regression import RandomRounds, Regression, regression
from test_resume_on_other_islands import streaming_islands

from fedpax.checkpoints import checkpoint
from fedpax.checkpoints.saved_state import load_params
from fedpax.processes import communication
from fedpax.run_files.metrics import read_metrics, select
from fedpax.run_files.paths import complete_rounds, latest_round
from fedpax.training.agreement import describe_difference
from fedpax.training.experiment import Run
from fedpax.training.trainer import train

ENDLESS = ("--pause=0.1", "--training.rounds=100000", "--training.checkpoint_every=0")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same run in one process."""
    folder = tmp_path_factory.mktemp("one")
    train(regression(), folder)
    return folder


def check_equal(folder: Path, single: Path) -> None:
    """Check parameters and losses: collectives between processes add in another order."""
    chex.assert_trees_all_close(load_params(folder), load_params(single), rtol=0, atol=1e-6)
    losses = [
        [line["loss"] for line in select(read_metrics(path), "training")]
        for path in (folder, single)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_two_processes_give_the_result_of_one_and_only_process_0_prints(
    tmp_path: Path, single: Path
) -> None:
    (status, output, errors), other = finish(start(2, tmp_path))
    assert status == 0, errors
    assert re.fullmatch(r"Finished 12 of 12 rounds in .*: held-out loss \d\.\d+\.\n", output)
    assert "8 cpu devices, mesh clients=4, fsdp=2" in errors
    # On a slow disk, Orbax warns in every process that a save waits for the one before.
    warnings = r"(WARNING:absl:Waiting for previous save to complete.*\n)*"
    assert other[:2] == (0, "") and re.fullmatch(warnings, other[2])
    check_equal(tmp_path, single)


@pytest.mark.slow
def test_two_processes_stream_as_one_and_resume_what_one_began(tmp_path: Path) -> None:
    """Streaming DiLoCo in three fragments of 4 bits, two islands in each process."""
    whole = streaming_islands()
    train(whole, tmp_path / "one")
    started = dataclasses.replace(whole.training, rounds=3)
    train(dataclasses.replace(whole, training=started), tmp_path / "resumed")
    exp = "test_resume_on_other_islands:streaming_islands"
    for name in ("two", "resumed"):
        (status, _, errors), other = finish(start(2, tmp_path / name, exp=exp))
        assert (status, other[0]) == (0, 0), errors
        check_equal(tmp_path / name, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ditto", "hypcluster"])
def test_two_processes_evaluate_the_models_of_clients_as_one(tmp_path: Path, method: str) -> None:
    short = ("--training.rounds=2", "--training.evaluate_every=2")
    evaluations = []
    for count in (1, 2):
        ended = finish(start(count, tmp_path / str(count), *short, exp=f"personal_digits:{method}"))
        assert [status for status, _, _ in ended] == [0] * count, ended[0][2]
        (evaluation,) = select(read_metrics(tmp_path / str(count)), "evaluation")
        evaluations.append({k: evaluation[k] for k in ("personal_accuracy", "personal_loss")})
    chex.assert_trees_all_close(*evaluations, rtol=1e-5)


@pytest.mark.slow
def test_killed_and_resumed_with_fewer_processes(tmp_path: Path, single: Path) -> None:
    for count, rounds in [(4, 5), (2, 8)]:
        processes = start(count, tmp_path, "--pause=0.3", "--allow_config_change=pause")
        wait_for_rounds(tmp_path, rounds, processes)
        for process in processes:
            process.kill()
        assert {status for status, _, _ in finish(processes)} == {-signal.SIGKILL}
    assert 3 <= (latest_round(tmp_path) or 0) < 12
    allowed = dataclasses.replace(regression(), pause=0.0)
    train(allowed, tmp_path, allow_config_change="pause")
    check_equal(tmp_path, single)


@pytest.mark.slow
def test_four_processes_resume_what_one_began(tmp_path: Path, single: Path) -> None:
    training = dataclasses.replace(regression().training, rounds=6)
    train(dataclasses.replace(regression(), training=training), tmp_path)
    (status, output, errors), *others = finish(start(4, tmp_path))
    assert status == 0 and output.startswith("Finished 12 of 12 rounds"), errors
    assert others == [(0, "", "")] * 3
    check_equal(tmp_path, single)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to"), [(signal.SIGTERM, [1]), (signal.SIGTERM, [0, 1]), (signal.SIGINT, [1])]
)
def test_a_signal_makes_all_save_the_same_round_once(
    tmp_path: Path, number: signal.Signals, to: list[int]
) -> None:
    processes = start(2, tmp_path, *ENDLESS)
    wait_for_rounds(tmp_path, 5, processes)
    for process in to:
        processes[process].send_signal(number)
    (status, output, errors), other = finish(processes)
    saved = latest_round(tmp_path)
    assert complete_rounds(tmp_path / "checkpoints") == [saved]
    assert read_metrics(tmp_path)[-1]["round"] == saved
    assert status == 143, errors
    assert f"SIGTERM: saved {saved} of 100,000 rounds" in output
    assert other[:2] == (128 + (number if to == [1] else signal.SIGTERM), "")


@pytest.mark.slow
def test_a_signal_before_the_first_round_stops_a_resumed_run(tmp_path: Path) -> None:
    training = dataclasses.replace(regression().training, rounds=6)
    train(dataclasses.replace(regression(), training=training), tmp_path)
    processes = start(2, tmp_path, *ENDLESS, "--allow_config_change=pause,training")
    for line in processes[0].stderr:
        if "compiling" in line:
            break
    for process in processes:
        process.send_signal(signal.SIGTERM)
    (status, output, errors), other = finish(processes)
    assert status == other[0] == 143, errors
    assert 6 <= (latest_round(tmp_path) or 0) <= 8 and "SIGTERM: saved" in output


@pytest.mark.slow
def test_a_killed_process_ends_the_job_which_the_same_command_resumes(
    tmp_path: Path, single: Path
) -> None:
    processes = start(4, tmp_path, "--pause=0.3")
    while latest_round(tmp_path) is None:
        assert processes[0].poll() is None
        time.sleep(0.1)
    processes[3].kill()
    killed = time.monotonic()
    *survivors, _ = finish(processes)
    assert time.monotonic() - killed < 30  # and not the 100 s of JAX
    for status, output, errors in survivors:
        assert status == 75 and "Finished" not in output
        assert re.search(r"fedpax: process 3 on \S+ has ended\. Without it the job cannot", errors)
        assert re.search(r"the run resumes from its checkpoint of round [369]\.\n$", errors)
        assert "Traceback" not in errors
    assert [status for status, _, _ in finish(start(2, tmp_path, "--pause=0.3"))] == [0, 0]
    check_equal(tmp_path, single)


@pytest.mark.slow
def test_a_frozen_process_ends_the_job(tmp_path: Path) -> None:
    processes = start(2, tmp_path, *ENDLESS, "--heartbeat_timeout=40")
    wait_for_rounds(tmp_path, 5, processes)
    processes[1].send_signal(signal.SIGSTOP)
    status = processes[0].wait(60)
    processes[1].kill()
    (_, _, errors), _ = finish(processes)
    assert status == 75 and re.search(r"process 1 on \S+ has sent nothing for 16 s\.", errors)
    assert "Start all processes again: the run resumes from its beginning." in errors


@pytest.mark.slow
def test_processes_that_cannot_connect_with_each_other_train_nevertheless(tmp_path: Path) -> None:
    exp = "test_several_processes:without_channel"
    (status, _, errors), other = finish(start(2, tmp_path, exp=exp))
    assert (status, other[0]) == (0, 0)
    assert "processes [1] did not connect to process 0" in errors
    assert "Until then, JAX alone notices the end of a process." in errors


def without_channel() -> Regression:
    """Local SGD on hosts whose names do not resolve."""
    communication._own_names = lambda: []
    communication.SECONDS_TO_CONNECT = 3.0
    return regression()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system of its own."""
    with small_disk_at(tmp_path, "2m"):
        yield tmp_path


@pytest.mark.slow
def test_a_full_disk_ends_all_processes_with_the_reason(small_disk: Path) -> None:
    processes = start(2, small_disk, exp="test_several_processes:full_disk")
    began = time.monotonic()
    (status, _, errors), (other, _, errors_of_1) = finish(processes)
    assert (status, other) == (1, 75) and time.monotonic() - began < 120
    reason = "stopped: No space left on device. The checkpoint of round 3 is kept in "
    assert reason in errors and "Make room on the disk" in errors
    assert re.search(r"fedpax: process 0 on \S+ has failed: ", errors_of_1)
    assert reason in errors_of_1 and "Make room on the disk" in errors_of_1
    assert "Traceback" not in errors + errors_of_1


def full_disk() -> Regression:
    """Local SGD whose disk is full when process 0 alone completes the checkpoint of round 6."""
    write = checkpoint.write_checksums

    def write_when_full(draft: Path) -> None:
        filler = draft.parent.parent / "filler"
        if draft.name.startswith("6."):
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        write(draft)

    checkpoint.write_checksums = write_when_full
    return regression()


@pytest.mark.slow
def test_a_process_that_fails_alone_ends_the_job(tmp_path: Path) -> None:
    began = time.monotonic()
    exp = "test_several_processes:broken_shard"
    processes = start(2, tmp_path, "--heartbeat_timeout=10", exp=exp)
    (status, _, errors_of_0), (other, _, errors) = finish(processes)
    assert "the shard of process 1 is broken" in errors
    assert "has failed: RuntimeError: the shard of process 1 is broken. Without it" in errors_of_0
    assert (status, other) == (75, 1)
    assert time.monotonic() - began < 120  # and not the 300 s for which JAX waits at exit


class BrokenRounds(RandomRounds):
    def __next__(self) -> dict[str, np.ndarray]:
        if self.round == 5 and jax.process_index() == 1:
            raise RuntimeError("the shard of process 1 is broken")
        return super().__next__()


class BrokenShard(Regression):
    """A run whose data end in process 1."""

    def build(self) -> Run:
        run = super().build()
        run.cohorts.__class__ = BrokenRounds
        return run


def broken_shard() -> BrokenShard:
    """Local SGD whose data end in process 1."""
    return BrokenShard(training=regression().training, mesh=regression().mesh)


@pytest.mark.slow
def test_processes_that_differ_say_so(tmp_path: Path) -> None:
    ends = finish(start(2, tmp_path / "a", of_one=["--learning_rate=0.5"]))
    for status, _, errors in ends:
        assert status == 2
        assert "process 1 on " in errors and "--learning_rate is 0.5" in errors
        assert "it is 0.01" in errors and "Start every process with the same command" in errors
    ends = finish(start(2, tmp_path / "b", of_one=[f"--job_log_dir={tmp_path / 'c'}"]))
    for status, _, errors in ends:
        assert status == 2
        assert "what process 0 writes into --job_log_dir is missing" in errors
        assert "Set a --job_log_dir on a file system that all hosts share." in errors
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["JAX_ENABLE_X64", "JAX_THREEFRY_PARTITIONABLE"])
def test_processes_with_other_settings_of_jax_say_so(tmp_path: Path, name: str) -> None:
    value = str(not getattr(jax.config, name.lower()))
    for status, _, errors in finish(start(2, tmp_path, variables_of_one={name: value})):
        assert status == 2
        assert f"{name} is {value}, in process 0" in errors and "environment variables" in errors


@pytest.mark.slow
def test_processes_with_unequal_numbers_of_devices_say_so(tmp_path: Path) -> None:
    fewer = {"JAX_NUM_CPU_DEVICES": "3"}
    for status, _, errors in finish(start(2, tmp_path / "run", variables_of_one=fewer)):
        assert status == 2
        assert "process 1 has 3 devices, process 0 has 4, expected the same number" in errors
        assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaleCode(Regression):
    """A run whose code differs between hosts: a variable stands for another file."""

    def build(self) -> Run:
        stale = os.environ.get("STALE")
        rate = 0.5 if stale == "round" else self.learning_rate
        run = dataclasses.replace(self, learning_rate=rate).build_regression()
        shift = 1.0 if stale == "init" else 0.0
        init = run.init
        return run._replace(init=lambda key: jax.tree.map(lambda x: x + shift, init(key)))

    build_regression = Regression.build


def stale_code() -> StaleCode:
    """Local SGD by other code in process 1."""
    return StaleCode(training=regression().training, mesh=regression().mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stale", "message"),
    [
        ("round", "the hash of the round's program is "),
        ("init", "The state of round 0 differs between process 0 and process 1"),
    ],
)
def test_processes_with_other_code_say_so(tmp_path: Path, stale: str, message: str) -> None:
    exp = "test_several_processes:stale_code"
    for status, _, errors in finish(start(2, tmp_path, exp=exp, variables_of_one={"STALE": stale})):
        assert status == 2
        assert message in errors and "Give all hosts the same files of code" in errors
    assert not (tmp_path / "metrics.jsonl").exists()


def test_differences_are_listed_up_to_ten() -> None:
    random = np.random.default_rng(0)
    settings = {f"--{i}": str(random.integers(100)) for i in range(30)}
    alike = [{**settings, "host": name} for name in "abc"]
    assert describe_difference(alike) is None
    changed = {**settings, **{f"--{i}": "x" for i in random.choice(30, 13, replace=False)}}
    text = describe_difference([*alike, {**changed, "host": "d"}]) or ""
    assert text.count("process 3 on d: --") == 10 and "and 3 more differences" in text

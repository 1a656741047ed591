"""Several processes each read their own rows of a text, and resume with another number."""

import json
from pathlib import Path

import chex
import jax
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from safetensors.numpy import load_file
from several_processes import environment, finish, free_port, start, start_one

from fedpax.checkpoints import load_params
from fedpax.commands.parts.options import configure
from fedpax.parallel.mesh import default_devices
from fedpax.run_files.metrics import read_metrics, select
from fedpax.training.trainer import train

pytestmark = pytest.mark.slow

ARGUMENTS = (
    "--islands=2",
    "--mesh.islands=2",
    "--mesh.fsdp=2",
    "--data.batch_size=4",
    "--data.seq_len=16",
    "--data.heldout_tokens=1024",
    "--data.heldout_batch_size=4",
    "--data.mixture",
    "stdlib_text=2",
    "stdlib_text:1.0.0=1",
    "--model.num_layers=1",
    "--model.embed_dim=16",
    "--model.mlp_dim=32",
    "--outer.num_levels=None",
    "--optimizer.schedule=constant",  # so that rounds do not depend on their number
    "--training.evaluate_every=0",
    "--training.checkpoint_every=0",
    "--training.export_every=2",
)


def arguments(rounds: int) -> list[str]:
    return [*ARGUMENTS, f"--training.rounds={rounds}"]


def train_alone(rounds: int, folder: Path) -> None:
    """Train in this process, on as many devices as the processes have together."""
    with default_devices(jax.devices()[:4]):
        train(configure("diloco_text", arguments(rounds)), folder, exp="diloco_text")


def stream_of(folder: Path, round_number: int) -> dict:
    """Return the stream's position in a checkpoint."""
    (path,) = (folder / "checkpoints" / str(round_number)).glob("progress/metadata")
    return json.loads(path.read_text())["stream"]


def test_processes_read_the_rows_of_one_process_and_resume_each_other(tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    train_alone(6, one)
    for processes, rounds in ((2, 2), (1, 4), (2, 6)):
        if processes == 1:
            train_alone(rounds, several)
            continue
        ends = finish(start(processes, several, *arguments(rounds), exp="diloco_text"))
        assert [status for status, _, _ in ends] == [0] * processes, ends
        known = stream_of(several, rounds)["shards"]
        assert all(None not in positions for positions in known.values())
    assert stream_of(several, 6) == stream_of(one, 6)
    # Collectives between processes add in another order. Each tokenizes a part of the held-out set.
    losses = [select(read_metrics(folder), "evaluation")[-1]["loss"] for folder in (one, several)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    exports = several / "exports"
    for number in (2, 4, 6):  # exported by two processes, by one, and by two again
        exported = load_file(exports / f"{number}" / "model.safetensors")
    experiment = configure("diloco_text", arguments(6))
    experiment.write_model(tmp_path / "again", load_params(several), "diloco_text")
    chex.assert_trees_all_equal(exported, load_file(tmp_path / "again" / "model.safetensors"))
    chex.assert_trees_all_close(load_params(several), load_params(one), rtol=0, atol=1e-5)


def test_processes_with_other_files_of_one_name_are_refused(tmp_path: Path) -> None:
    """Each would leave out half of its own documents."""
    dataset = ("--data.dataset=corpus-{split}.array_record",)
    others = [argument for argument in ARGUMENTS if "stdlib" not in argument]
    others.remove("--data.mixture")
    command = ["train", "--exp=diloco_text", f"--job_log_dir={tmp_path / 'run'}", "--multihost"]
    port, processes = free_port(), []
    for number in range(2):
        host = tmp_path / f"host{number}"
        host.mkdir()
        for split in ("train", "heldout"):
            writer = ArrayRecordWriter(f"{host}/corpus-{split}.array_record", "group_size:1")
            for k in range(200):
                writer.write(f"document {k} of host {number}".encode())
            writer.close()
        whole = [*command, *others, *dataset, "--training.rounds=1"]
        processes.append(start_one(whole, environment(number, 2, port), host))
    for status, _, errors in finish(processes):
        assert status == 2, errors
        assert "the data set corpus-train.array_record is 200 documents, sample" in errors
        assert "Give all hosts the same files" in errors


@pytest.mark.parametrize("exp", ["diloco_text", "fedavg_lora_text"])
def test_processes_with_other_heldout_data_say_so(tmp_path: Path, exp: str) -> None:
    port = free_port()
    rows = [{"text": f"line {i} " * 20, "user": i % 8} for i in range(64)]
    processes = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        for split in ("train", "heldout"):
            changed = {"text": "z" * 140} if number and split == "heldout" else {}
            lines = [json.dumps(row | changed) + "\n" for row in rows]
            (folder / f"{split}.jsonl").write_text("".join(lines))
        own = {
            "diloco_text": ["--islands=2", "--mesh.islands=2", "--mesh.fsdp=2"],
            "fedavg_lora_text": ["--data.client_field=user", "--cohort.size=4", "--mesh.clients=4"],
        }[exp]
        command = ["train", f"--exp={exp}", f"--job_log_dir={tmp_path / 'run'}", "--multihost"]
        command += [*own, "--data.dataset={split}.jsonl", "--data.seq_len=16"]
        processes.append(start_one(command, environment(number, 2, port), cwd=folder))
    for status, _, errors in finish(processes):
        assert status == 2, errors
        assert "the data set of the run, held out is " in errors
        assert "Give all hosts the same files" in errors
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

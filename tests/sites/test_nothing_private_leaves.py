"""Canaries in the data of two sites: on no wire, and in no folder of another party.

The sites and the coordinator are commands, without certificates, so a proxy between them sees what
TLS would hide.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from site_processes import Processes, free_port

from fedpax.checkpoints import load_params
from fedpax.sites.site_files import read_federation
from sites.recording_proxy import RecordingProxy
from sites.test_documents import write_model

pytestmark = pytest.mark.slow
pytest.importorskip("grpc")

SITES = ("oslo", "lyon")


class Trial:
    """A coordinator and two sites, each behind a proxy of its own."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.processes, self.port = Processes(self.runs), free_port()
        self.wires: dict[str, RecordingProxy] = {}

    def run(self, exp: str, common: Sequence[str], own: Mapping[str, Sequence[str]]) -> None:
        """Run the commands to their end."""
        self.processes.exp, self.processes.address = exp, f"127.0.0.1:{self.port}"
        started = [self.processes.start("syncer", "coordinator", *common)]
        for site, flags in own.items():
            wire = self.wires[site] = RecordingProxy(self.port)
            self.processes.address = wire.address
            started.append(self.processes.start("join", site, *common, *flags))
        self.processes.finish(started)

    def elsewhere(self, site: str) -> bytes:
        """Return all bytes on wires, and in the files and logs of the other parties."""
        result = [wire.content for wire in self.wires.values()]
        for path in sorted(self.runs.rglob("*")):
            if path.is_file() and site not in path.relative_to(self.runs).parts[0]:
                result.append(path.read_bytes())
        return b"\0".join(result)


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    sites = Trial(tmp_path)
    yield sites
    sites.processes.end()
    for wire in sites.wires.values():
        wire.__exit__()


def word(random: np.random.Generator, letters: int = 12) -> str:
    return "".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), letters))


def encodings(numbers: Sequence[float]) -> set[bytes]:
    """Return numbers as bytes in each float format; without those that any file may have."""
    result = {np.array(x, kind).tobytes() for x in numbers for kind in ("<f4", ">f4", "<f8", ">f8")}
    return {each for each in result if len(set(each)) > 2}


def test_tables(trial: Trial, tmp_path: Path) -> None:
    canaries: dict[str, set[bytes]] = {site: set() for site in SITES}
    values: dict[str, list[float]] = {site: [] for site in SITES}
    for seed, site in enumerate(SITES):
        random = np.random.default_rng(seed)
        (tmp_path / site).mkdir()
        patients = [word(random) for _ in range(3)]
        secret = word(random)
        with (tmp_path / site / f"{secret}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["age", "sex", "note", "patient", "outcome"])
            for _ in range(90):
                age, note = random.normal(55, 12), word(random)
                patient = patients[random.integers(3)]
                table.writerow(
                    [f"{age:.9f}", random.choice(["f", "m"]), note, patient, int(age > 52)]
                )
                values[site].append(float(f"{age:.9f}"))
                canaries[site] |= {f"{age:.7f}"[:9].encode(), note.encode()}
        canaries[site] |= {secret.encode(), *(patient.encode() for patient in patients)}
    common = (
        "--data.label=outcome",
        "--training.rounds=3",
        "--training.evaluate_every=1",
        "--cohort.size=6",
    )
    own = {
        site: [f"--data.files={tmp_path}/{site}/*.csv", "--data.client=patient"] for site in SITES
    }
    trial.run("fedavg_table", common, own)
    inputs = (read_federation(trial.runs / "coordinator") or {})["inputs"]
    column = next(each for each in inputs["columns"] if each["treatment"]["name"] == "age")
    for site in SITES:
        elsewhere = trial.elsewhere(site)
        scaled = (np.array(values[site]) - column["mean"]) / column["scale"]
        for canary in canaries[site] | encodings(values[site]) | encodings(scaled.tolist()):
            assert canary not in elsewhere, canary
    check_control(trial, b"age")


def test_documents(trial: Trial, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", 0)
    canaries: dict[str, set[bytes]] = {site: set() for site in SITES}
    for seed, site in enumerate(SITES):
        random = np.random.default_rng(seed)
        (tmp_path / site).mkdir()
        lines, wards = [], [word(random) for _ in range(2)]
        for number in range(30):
            text = f"{word(random)} {word(random)} {word(random)}"
            lines.append(json.dumps({"text": text, "ward": wards[number % 2]}))
            tokens = np.frombuffer(text.encode(), np.uint8)
            canaries[site] |= {part.encode() for part in text.split()}
            for dtype in (np.int16, np.int32, np.int64):
                canaries[site] |= {tokens[:8].astype(dtype).tobytes()}
        canaries[site] |= {ward.encode() for ward in wards}
        secret = word(random)
        canaries[site].add(secret.encode())
        (tmp_path / site / f"{secret}.jsonl").write_text("\n".join(lines) + "\n")
    common = (
        f"--model.weights={base}",
        "--data.tokenizer=bytes",
        "--training.rounds=2",
        "--training.evaluate_every=1",
        "--data.seq_len=16",
        "--lora.rank=2",
        "--cohort.max_steps=3",
    )
    own = {
        site: [
            f"--data.dataset={tmp_path}/{site}/*.jsonl",
            "--data.client_field=ward",
            "--data.heldout_fraction=0.2",
        ]
        for site in SITES
    }
    trial.run("fedavg_lora_text", common, own)
    for site in SITES:
        elsewhere = trial.elsewhere(site)
        for canary in canaries[site]:
            assert canary not in elsewhere, canary
    check_control(trial, b'"clients"')


def check_control(trial: Trial, told: bytes) -> None:
    """Check that the proxies see what is sent: a word, and the model of the last evaluation."""
    for wire in trial.wires.values():
        content = wire.content
        assert told in content
        params = jax.tree.leaves(load_params(trial.runs / "coordinator"))
        assert any(np.asarray(x).tobytes()[:64] in content for x in params)

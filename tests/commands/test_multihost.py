"""`fedpax train --multihost`: processes that do not come, and the scripts of docs/hosts."""

import os
import re
import shlex
import stat
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest
import yaml

from fedpax.commands.parts import processes
from fedpax.commands.parts.options import parse
from fedpax.processes.job_processes import JobProcesses, find_job_processes

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "docs" / "hosts"
REGRESSION = "small_regression:regression"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"JAX_PROCESS_ID": "0"}, "1 of 2 processes did not come within 0.2 s: 1. Present: 0 on"),
        ({"JAX_PROCESS_ID": "1"}, "found no process 0 at localhost:9 within 0.2 s"),
        ({"JAX_PROCESS_ID": "2"}, "Number the processes from 0"),
        ({"JAX_NUM_PROCESSES": ""}, "expected all three. Set JAX_COORDINATOR_ADDRESS=HOST:PORT"),
    ],
)
def test_processes_that_do_not_come(
    command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    port = 9 if changes.get("JAX_PROCESS_ID") == "1" else 0
    for name, value in {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "0",
        **changes,
    }.items():
        monkeypatch.setenv(name, value)
    status, output, errors = command(
        "train",
        f"--exp={REGRESSION}",
        f"--job_log_dir={tmp_path / 'run'}",
        "--multihost",
        "--join_timeout=0.2",
    )
    assert (status, output) == (2, "")
    assert errors.startswith("fedpax: --multihost: ") and words in errors
    assert not (tmp_path / "run").exists()


def test_a_timeout_that_is_not_positive(command, tmp_path: Path) -> None:
    status, _, errors = command(
        "train",
        f"--exp={REGRESSION}",
        f"--job_log_dir={tmp_path}",
        "--multihost",
        "--join_timeout=0",
    )
    assert status == 2 and "expected a positive number of seconds, such as 300" in errors


def test_the_number_of_processes_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    initialized = []
    monkeypatch.setattr(processes, "call_roll", lambda *_: None)
    monkeypatch.setattr(processes, "wait_for_coordinator", lambda *_: None)
    monkeypatch.setattr(processes, "_initialize", lambda *given: initialized.append(given))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    for job, number in ((JobProcesses("localhost:1", 3, 1, "variables"), 3), (None, None)):
        monkeypatch.setattr(processes, "find_job_processes", lambda job=job: job)
        assert processes.join_processes(7.0, 11) == number
        assert initialized.pop() == (job, 7.0, 11)


def test_processes_on_cpus_do_not_keep_compiled_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 alone would find its programs, and wait in vain for processes that compile."""
    options = types.SimpleNamespace(multihost=True, join_timeout=1.0, heartbeat_timeout=10)
    monkeypatch.setattr(processes, "join_processes", lambda *_: None)
    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    processes.provide_processes(options, None)
    assert not updates
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    processes.provide_processes(options, None)
    assert updates == {"jax_enable_compilation_cache": False}


def fedpax_arguments(words: list[str]) -> list[str]:
    """Return the arguments after `fedpax train`, all of which must be known."""
    at = words.index("fedpax")
    assert words[at + 1] == "train"
    options, fields = parse("train", words[at + 2 :])
    assert options.multihost and options.exp and options.job_log_dir and fields == []
    return words[at + 2 :]


@pytest.mark.parametrize("script", sorted(HOSTS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_valid_and_named_on_the_page(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    page = (ROOT / "docs" / "several_hosts.md").read_text()
    assert f"(hosts/{script.name})" in page


def job_environment(index: int) -> dict[str, str]:
    """Return the variables of a pod of docs/hosts/kubernetes.yaml, as Kubernetes resolves them."""
    _, job = yaml.safe_load_all((HOSTS / "kubernetes.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}

    def resolve(entry: dict) -> str:
        if "value" in entry:
            return entry["value"]
        path = entry["valueFrom"]["fieldRef"]["fieldPath"]
        return annotations[re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]]

    return {entry["name"]: resolve(entry) for entry in container["env"]}


def test_the_manifest_starts_what_fedpax_reads() -> None:
    service, job = yaml.safe_load_all((HOSTS / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    result = [find_job_processes(job_environment(i)) for i in range(spec["completions"])]
    assert [cluster.process_id for cluster in result] == list(range(spec["completions"]))
    assert {cluster.num_processes for cluster in result} == {spec["completions"]}
    # The name of the first pod: Kubernetes joins job, index and subdomain.
    name = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert {cluster.host for cluster in result} == {name}
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    (container,) = pod["containers"]
    fedpax_arguments(container["command"] + container["args"])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def programs(folder: Path, **sources: str) -> dict[str, str]:
    """Write programs into a folder, and return an environment in which they are found first."""
    folder.mkdir()
    fedpax = f'exec {shlex.quote(sys.executable)} -m fedpax.main "$@"'
    for name, source in {"fedpax": fedpax, **sources}.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{source}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    dropped = ("JAX_NUM_CPU_DEVICES", "PJRT_NPROC")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return kept | {"PATH": f"{folder}:{os.environ['PATH']}"}


SRUN = """
while [[ $1 == --* ]]; do shift; done
for ((number = 0; number < TASKS; number++)); do
  SLURM_STEP_NODELIST=localhost SLURM_NTASKS=$TASKS SLURM_PROCID=$number SLURM_LOCALID=$number \\
    "$@" & processes+=($!)
done
status=0
for process in "${processes[@]}"; do wait $process || status=$?; done
exit $status
"""
SSH = """
while [[ $1 == -* ]]; do shift; done
host=$1; shift
echo "$host" >> "$HOSTS_SEEN"
exec env "${@//10.0.0.1:/localhost:}"
"""


def run(script: str, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", HOSTS / script, *arguments],
        env=environment,
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
def test_the_slurm_script_runs_two_processes(tmp_path: Path) -> None:
    """`srun` is replaced by a loop that sets what Slurm sets; the rest is the script's."""
    requeued = tmp_path / "requeued"
    environment = programs(tmp_path / "bin", srun=SRUN, scontrol=f'echo "$@" > {requeued}') | {
        "SLURM_JOB_ID": str(os.getpid()),
        "TASKS": "2",
        "EXPERIMENT": REGRESSION,
        "FOLDER": str(tmp_path / "run"),
    }
    done = run("slurm.sh", environment, "--pause=0.1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Finished 12 of 12 rounds") == 1
    assert not requeued.exists()


SHORT = ("--training.rounds=1", "--data.local_steps=2", "--data.heldout_tokens=2048")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_the_slurm_script_trains_its_experiment_on_32_devices(
    tmp_path: Path, processes: int
) -> None:
    environment = programs(tmp_path / "bin", srun=SRUN) | {
        "SLURM_JOB_ID": str(os.getpid()),
        "TASKS": str(processes),
        "JAX_NUM_CPU_DEVICES": str(32 // processes),
        "FOLDER": str(tmp_path / "run"),
    }
    done = run("slurm.sh", environment, *SHORT)
    assert done.returncode == 0, done.stderr
    assert "on 32 cpu devices, mesh islands=4, fsdp=4, tensor=2" in done.stderr
    assert done.stdout.count("Finished 1 of 1 round ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_the_manifest_trains_its_experiment_on_32_devices(tmp_path: Path, processes: int) -> None:
    _, job = yaml.safe_load_all((HOSTS / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = [word.replace("/runs/", f"{tmp_path}/") for word in container["args"]]
    coordinator = f"localhost:{20000 + os.getpid() % 10000}"
    kept = programs(tmp_path / "bin")
    pods = [
        subprocess.Popen(
            [*container["command"], *words, *SHORT],
            env=kept
            | job_environment(number)
            | {
                "JAX_COORDINATOR_ADDRESS": coordinator,
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_NUM_CPU_DEVICES": str(32 // processes),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    errors = [pod.communicate(timeout=200)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0] * processes, errors
    assert "on 32 cpu devices, mesh islands=4, fsdp=4, tensor=2" in errors[0]


def test_the_slurm_script_requeues_a_job_that_was_stopped(tmp_path: Path) -> None:
    requeued = tmp_path / "requeued"
    for status in (143, 137, 1):
        programs_of = tmp_path / str(status)
        srun = f'echo "$SRUN_CPUS_PER_TASK $1"; exit {status}'
        environment = programs(programs_of, srun=srun, scontrol=f'echo "$@" >> {requeued}')
        environment |= {"SLURM_JOB_ID": "4100", "SLURM_CPUS_PER_TASK": "12"}
        done = run("slurm.sh", environment)
        assert done.returncode == status
        # Slurm would end the tasks beside a failed one, also with status 143.
        assert done.stdout == "12 --kill-on-bad-exit=0\n"
    assert requeued.read_text() == "requeue 4100\n"


def test_the_slurm_script_has_a_process_per_gpu() -> None:
    text = (HOSTS / "slurm.sh").read_text()
    settings = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert settings["ntasks-per-node"] == settings["gpus-per-node"]
    assert settings["signal"].startswith("TERM@")  # to the processes, not to the script (B:)


@pytest.mark.slow
def test_the_ssh_script_runs_two_processes(tmp_path: Path) -> None:
    """`ssh` is replaced by a program that runs the command on this machine."""
    seen = tmp_path / "seen"
    environment = programs(tmp_path / "bin", ssh=SSH) | {
        "HOSTS": "10.0.0.1 10.0.0.2",
        "HOSTS_SEEN": str(seen),
        "EXPERIMENT": REGRESSION,
        "FOLDER": str(tmp_path / "run"),
        "PORT": str(20000 + os.getpid() % 10000),
    }
    done = run("ssh.sh", environment, "--training.rounds=8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Finished 8 of 8 rounds") == 1
    assert sorted(seen.read_text().split()) == ["10.0.0.1", "10.0.0.2"]


def test_the_tpu_script_starts_the_same_command_on_all_hosts(tmp_path: Path) -> None:
    environment = programs(tmp_path / "bin", gcloud="printf '%s\\n' \"$@\"")
    done = run("tpu_pod.sh", environment | {"TPU": "pod", "ZONE": "here"})
    assert done.returncode == 0, done.stderr
    *words, command = done.stdout.splitlines()
    assert words[:5] == ["compute", "tpus", "tpu-vm", "ssh", "pod"]
    assert {"--zone=here", "--worker=all"} <= set(words)
    fedpax_arguments(shlex.split(command.removeprefix("--command=")))
    assert "set TPU to the name" in run("tpu_pod.sh", environment).stderr

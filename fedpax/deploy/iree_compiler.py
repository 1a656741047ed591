"""Compile the participant's part of exported stages by IREE, for devices without Python or JAX."""

import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from fedpax.deploy.iree_check import CompilationError, check_compiled
from fedpax.deploy.runtime import load
from fedpax.errors import ArgumentError, MissingPackageError

_TARGETS = {
    "host": ["--iree-llvmcpu-target-cpu=host"],
    "arm64": ["--iree-llvmcpu-target-triple=aarch64-unknown-linux-gnu"],
    "android": ["--iree-llvmcpu-target-triple=aarch64-none-linux-android29"],
}


def compile_client(folder: str | Path, out: str | Path, *, target: str = "host") -> None:
    """Compile the participant's part of each stage of exported stages by IREE.

    Writes `client_N.vmfb` and `client_N.json`, which `fedpax.deploy.iree_client` runs. Each stage
    is also compiled for this machine, and compared with JAX.

    Args:
        folder: a folder that `export_stages` wrote.
        out: a new or an empty folder.
        target: "host" (this machine's CPU), "arm64" (Linux) or "android" (arm64).

    Raises:
        ArgumentError: the target is unknown, or `out` has files.
        MissingPackageError: `iree-compile` or `iree-run-module` is not on the path.
        CompilationError: IREE does not have an operation of the program, or the compiled program
            does not run or differs from JAX's.
    """
    if target not in _TARGETS:
        raise ArgumentError(
            f"compile_client(): target={target!r} is unknown, expected one of {sorted(_TARGETS)}. "
            "For another device, run iree-compile on the file client_0.stablehlo."
        )
    compiler, runner = shutil.which("iree-compile"), shutil.which("iree-run-module")
    if compiler is None or runner is None:
        raise MissingPackageError(
            "compile_client() needs the commands iree-compile and iree-run-module. Install them in "
            "an environment of their own, and add its folder to PATH: pip install "
            "iree-base-compiler==3.13.0 iree-base-runtime==3.13.0."
        )
    artifact, out = load(folder), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ArgumentError(
            f"compile_client(): {out} has files, expected a new or an empty folder. Give another."
        )
    with tempfile.TemporaryDirectory() as temporary:
        for stage, messages in enumerate(artifact.manifest["stages"]):
            compiled = Path(temporary) / f"client_{stage}.vmfb"
            source = Path(folder) / f"client_{stage}.stablehlo"
            _compile(compiler, source, target, compiled)
            with tempfile.TemporaryDirectory() as own:
                module = compiled
                if target != "host":
                    module = Path(own) / compiled.name
                    _compile(compiler, source, "host", module)
                check_compiled(artifact, stage, module, runner)
            about = {
                "program": artifact.program,
                "target": target,
                "sha256": hashlib.sha256(compiled.read_bytes()).hexdigest(),
                # Arguments that the function does not read are not among its inputs.
                "inputs": list(artifact.exported(f"client_{stage}").module_kept_var_idx),
                "messages": messages,
            }
            text = json.dumps(about, indent=1) + "\n"
            (Path(temporary) / f"client_{stage}.json").write_text(text, encoding="utf-8")
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(Path(temporary).iterdir()):
            shutil.copy(path, out / path.name)


def _compile(command: str, source: Path, target: str, out: Path) -> None:
    ran = subprocess.run(
        [
            command,
            str(source),
            "--iree-input-type=stablehlo",
            "--iree-hal-target-device=local",
            "--iree-hal-local-target-device-backends=llvm-cpu",
            *_TARGETS[target],
            "-o",
            str(out),
        ],
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise CompilationError(
            f"{source} cannot be compiled by IREE for {target}: {ran.stderr.strip()[:2000]}"
        )

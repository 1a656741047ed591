"""A federated algorithm as one JSON file: exported stages, initial state and settings."""

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fedpax
from fedpax.algorithm import FederatedAlgorithm, Params
from fedpax.data import CohortRounds
from fedpax.deploy.artifacts import pack_stages
from fedpax.deploy.runtime import (
    Artifact,
    ArtifactError,
    check_content,
    check_format,
    check_manifest,
)
from fedpax.errors import ArgumentError
from fedpax.files import explain_damage, parse_json, read_file, replacing
from fedpax.run_files.configuration import class_name, to_json
from fedpax.training.experiment import Experiment, Run
from fedpax.transforms.stages import stages

FORMAT, VERSION = "fedpax round program", 1

PROGRAM_BYTES = 1 << 33
"""The largest program that is read."""


class Settings(NamedTuple):
    """What a program says beside its stages.

    Attributes:
        seed: seed of the initial parameters.
        num_clients: size of the population.
        local_epochs: passes of a participant over its examples in a round.
        cohort_seed: seed of the cohorts and of the order of each participant's examples.
    """

    rounds: int = 1
    seed: int = 0
    num_clients: int = 1
    local_epochs: int = 1
    cohort_seed: int = 0


class RoundProgram(NamedTuple):
    """A program that `read_program` has read and checked.

    `names` has values by `"server"`, `"own"`, `"carried"` and `"cohort"`; `program` is a sha256.
    """

    artifact: Artifact
    settings: Settings
    names: Mapping[str, Any]
    program: str

    @property
    def size(self) -> int:
        """Number of participants in a round."""
        return int(self.artifact.manifest["placement"]["size"])

    @property
    def batch(self) -> tuple[int, int] | None:
        """Local steps and examples of a step, or None if participants read no batches."""
        cohort = set(self.names["cohort"].values())
        for stage in self.artifact.manifest["stages"]:
            for value in stage["own"]:
                if value["name"] in cohort and len(value["shape"]) >= 2:
                    return int(value["shape"][0]), int(value["shape"][1])
        return None

    def initial_server(self, seed: int) -> dict[str, jax.Array]:
        """Return the server's part of the initial state, by name."""
        values = self.artifact.function("initial_server")(jnp.uint32(seed))
        return dict(zip(self.names["server"], values, strict=True))

    def initial_own(self, seed: int, participant: int) -> dict[str, jax.Array]:
        """Return a participant's part of the initial state, by name."""
        values = self.artifact.function("initial_own")(jnp.uint32(seed), jnp.int32(participant))
        return dict(zip(self.names["own"], values, strict=True))


def pack_program(
    algorithm: FederatedAlgorithm,
    init: Callable[[jax.Array], Params],
    cohort: Any,
    settings: Settings,
    *,
    platforms: Sequence[str] = ("cpu",),
) -> str:
    """Export an algorithm as the text of a JSON file, which `read_program` reads.

    Args:
        algorithm: the algorithm.
        init: `key -> params`, the initial parameters.
        cohort: a cohort, or its types.
        settings: the settings.
        platforms: the platforms to export for.

    Raises:
        ArgumentError: the algorithm cannot be divided into stages, or its server reads a value of
            the cohort.
    """

    def initial(seed: Any) -> Any:
        return algorithm.init(init(jax.random.key(seed)))

    state = jax.eval_shape(initial, jnp.uint32(0))
    divided = stages(algorithm.round, state, cohort)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    state_names, cohort_names = (
        divided.argument_names[: len(paths)],
        divided.argument_names[len(paths) :],
    )
    owned = {value.name for stage in divided for value in stage.own}
    own = [i for i, name in enumerate(state_names) if name in owned]
    servers = [i for i in range(len(paths)) if i not in set(own)]
    for name in divided.wiring().arguments:
        if name in cohort_names:
            raise ArgumentError(
                f"The server of {divided.name} reads {name}, a value of the participants' data, "
                "expected an algorithm whose server reads its state alone: on nodes, the server "
                "has no data. Return the value from a federated_map()."
            )

    def initial_server(seed: Any) -> list[Any]:
        leaves = jax.tree.leaves(initial(seed))
        return [leaves[i] for i in servers]

    def initial_own(seed: Any, participant: Any) -> list[Any]:
        leaves = jax.tree.leaves(initial(seed))
        return [jnp.take(leaves[i], participant, axis=0, mode="clip") for i in own]

    seed, number = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.int32)
    manifest, files = pack_stages(
        divided,
        platforms=platforms,
        portable=False,
        functions={
            "initial_server": (initial_server, [seed]),
            "initial_own": (initial_own, [seed, number]),
        },
    )
    cohort_paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(cohort)]
    names = {
        "server": [state_names[i] for i in servers],
        "own": [state_names[i] for i in own],
        "carried": {state_names[i]: f"result[0]{paths[i]}" for i in servers},
        "cohort": dict(zip(cohort_paths, cohort_names, strict=True)),
    }
    content: dict[str, Any] = {
        "format": FORMAT,
        "format_version": VERSION,
        "manifest": manifest,
        "settings": settings._asdict(),
        "names": names,
        "files": {name: base64.b64encode(x).decode("ascii") for name, x in files.items()},
    }
    content["program"] = _sha256(content)
    return json.dumps(content, sort_keys=True, indent=0) + "\n"


def read_program(path: str | Path) -> RoundProgram:
    """Read a file of `pack_program`, after checks of format, date and sha256."""
    expectation = "expected a program that `fedpax export --flower` wrote. Export again."
    with explain_damage(Path(path), expectation, ArtifactError):
        text = read_file(Path(path), PROGRAM_BYTES).decode()
    return parse_program(text, path)


def parse_program(text: str, path: str | Path = "program.json") -> RoundProgram:
    """Return the program of a text of `pack_program`, after the checks of `read_program`."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged: {error}. Export again.") from error
    wanted = "an exported program, expected program.json of `fedpax export --flower`. Export again."
    check_format(content, path, FORMAT, VERSION, wanted)
    manifest = check_manifest(content.get("manifest"), path)
    try:
        if content["program"] != _sha256(content):
            raise ArgumentError("it does not match its sha256")
        files = {
            name: base64.b64decode(content["files"][name], validate=True)
            for name in manifest["files"]
        }
        settings, names = Settings(**content["settings"]), content["names"]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ArtifactError(f"{path} is damaged: {error}. Export again.") from error
    for name, exported in files.items():
        check_content(f"{path}: {name}", exported, manifest["files"][name])
    return RoundProgram(Artifact(manifest, files), settings, names, content["program"])


def _sha256(content: Mapping[str, Any]) -> str:
    """Return the sha256 of a program without dates and versions."""
    manifest = content["manifest"]
    parts = manifest["program"], manifest["files"], content["settings"], content["names"]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# ---- the program of an experiment, for engines whose participants have their own data


def pack_experiment(experiment: Experiment, run: Run) -> str:
    """Export the round of an experiment as the text of a program (`pack_program`)."""
    if run.frozen is not None or run.initial is not None or run.cohort_shapes is None:
        obstacle = (
            "states no cohort_shapes"
            if run.cohort_shapes is None
            else "begins from parameters in a folder"
        )
        raise ArgumentError(
            f"{class_name(experiment)} {obstacle}, expected a run that begins from new parameters, "
            "with cohorts of known shapes. fedpax.deploy.round_program.pack_program takes any "
            "algorithm."
        )
    training = experiment.training
    settings = Settings(rounds=training.rounds, seed=training.seed)
    if isinstance(run.cohorts, CohortRounds):
        drawn = run.cohorts.settings
        settings = settings._replace(
            num_clients=run.cohorts.num_clients,
            local_epochs=int(drawn["local_epochs"]),
            cohort_seed=int(drawn["seed"]),
        )
    else:
        settings = settings._replace(num_clients=jax.tree.leaves(run.cohort_shapes)[0].shape[0])
    return pack_program(run.algorithm, run.init, run.cohort_shapes, settings)


def program_file(experiment: Experiment, folder: Path) -> Path:
    """Return the file of an experiment's program, exported if missing."""
    content = json.dumps([to_json(experiment), fedpax.__version__, jax.__version__], sort_keys=True)
    path = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:24]}.json"
    if not path.exists():
        packed = pack_experiment(experiment, experiment.build()).encode()
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path, draft=path.with_suffix(f".{os.getpid()}")) as file:
            file.write(packed)
    return path

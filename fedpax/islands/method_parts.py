"""What syncer and islands share: the parts of a method, and the identity of data."""

import dataclasses
import hashlib
from collections.abc import Mapping

from fedpax.algorithm import AlgorithmParts
from fedpax.errors import ConfigurationError
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.experiment import Experiment, Run
from fedpax.training.trainer import begin_from
from fedpax.transport.admission import MAX_TEXT

_READ = (
    "begin_from",
    "checkpoint_dir",
    "keep_checkpoints",
    "stop_on_non_finite",
    "tracker",
    "track_checkpoints",
)


def build_parts(experiment: Experiment, mesh: MeshConfig, exp: str = "") -> Run:
    """Build an experiment on a site's own mesh; raise if its method has no parts."""
    run = dataclasses.replace(experiment, mesh=mesh).build()
    if run.algorithm.parts is None:
        raise ConfigurationError(
            f"--exp={exp or type(experiment).__name__} runs as one program only, expected an "
            "experiment whose algorithm has parts, or one with clients of sites. For clients, "
            "inherit from fedpax.experiments.ClientExperiment. For islands, use one of Decoupled "
            "DiLoCo, such as --exp=decoupled_diloco_text, or set FederatedAlgorithm.parts."
        )
    training = experiment.training
    training.check_read(_READ, "islands with runtimes of their own")
    return begin_from(run, training.begin_from)


def parts_of(run: Run) -> AlgorithmParts:
    """Return the parts of a run of `build_parts`."""
    assert run.algorithm.parts is not None
    return run.algorithm.parts


def tokens_per_step(run: Run, parts: AlgorithmParts, num_fragments: int) -> float:
    """Return the tokens of an inner step of one island."""
    return run.items_per_round / parts.islands / (parts.steps_per_sync * num_fragments)


# ---- the identity of an island's data, equal for all islands of a run, which divide one corpus

MAX_DATA_SETS = 1000


def shorten(data: Mapping[str, str]) -> dict[str, str]:
    """Shorten a fingerprint of a stream of cohorts so that it fits a message."""
    sets = {_short(name): _short(text) for name, text in data.items()}
    if len(sets) > MAX_DATA_SETS:
        return {f"{len(sets)} data sets": hashlib.sha256(repr(sets).encode()).hexdigest()}
    return sets


def describe_other_data(
    name: str, data: Mapping[str, str], other_name: str, other_data: Mapping[str, str]
) -> str | None:
    """Describe the first difference between the data of two islands; None if there is none."""
    # An empty fingerprint is unknown.
    if not data or not other_data or data == other_data:
        return None
    names = sorted({**data, **other_data})
    differing = next(name for name in names if data.get(name) != other_data.get(name))
    return (
        f"island {name!r} has other data than island {other_name!r}: {differing!r} has "
        f"{data.get(differing, 'no documents')}, and at {other_name!r} "
        f"{other_data.get(differing, 'no documents')}. The islands of a run divide one corpus, "
        "and each reads its shard alone: with a corpus of its own, each would leave out most of "
        "its documents. Give all islands the same files (--data.data_dir names their folder)."
    )


def _short(text: str) -> str:
    if 0 < len(text) <= MAX_TEXT and text.isprintable():
        return text
    return f"sha256 {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"

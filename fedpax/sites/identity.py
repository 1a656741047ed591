"""The identity of a run: its version, experiment and model, equal at syncer and islands."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax

import fedpax
from fedpax.algorithm import Params
from fedpax.run_files.configuration import flatten, to_json
from fedpax.training.experiment import Experiment

WIRE_FORMAT = 3
"""The format of headers and encoded updates. Increase it with each change that the other side would
misread, such as another layout of a codec's words."""

LOCAL = (
    "mesh",
    "training.begin_from",
    "training.checkpoint_every",
    "training.evaluate_every",
    "training.hang_after",
    "training.keep_checkpoints",
    "training.on_hang",
    "training.profile_at",
    "training.rounds",
    "training.stop_on_non_finite",
    "training.track_checkpoints",
    "training.tracker",
    "data.data_dir",
    "model.weights",
)
"""Fields of an experiment that may differ between sites; a path stands for all fields below it.

An island takes over the syncer's number of rounds."""


class Identity(NamedTuple):
    """The version, experiment and model, which must be equal at syncer and islands."""

    version: str  # the version of fedpax
    experiment: Mapping[str, Any]  # the fields of the experiment by path, except `LOCAL`
    model: Mapping[str, str]  # dtype and shape of each parameter by path
    wire_format: int = WIRE_FORMAT  # the format of messages, `WIRE_FORMAT`
    # hashes of files, by the field that names the file
    content: Mapping[str, str] | None = None


def identify(
    experiment: Experiment,
    params: Params,
    own: Collection[str] = (),
    content: Mapping[str, str] | None = None,
) -> Identity:
    """Return the identity of a run; fields in `own` may differ between sites too."""
    fields = {
        path: value
        for path, value in flatten(to_json(experiment))
        if not any(path == name or path.startswith(f"{name}.") for name in (*LOCAL, *own))
    }
    model = {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}"
        for path, x in jax.tree.leaves_with_path(params)
    }
    return Identity(fedpax.__version__, fields, model, content=content)


def find_difference(expected: Identity, other: Mapping[str, Any]) -> str | None:
    """Describe how an island's or a site's identity differs from the syncer's, with the remedy."""
    if other.get("version") != expected.version:
        return (
            f"this process has fedpax {str(other.get('version'))[:50]}, and the syncer has "
            f"{expected.version}. Install the same version on both sides."
        )
    if difference := find_other_format(other.get("wire_format"), expected.wire_format):
        return f"this process {difference}"
    for field, name, remedy in (
        ("experiment", "configuration", "Give `fedpax join` the flags of `fedpax syncer`."),
        ("model", "model", "Use the same code and the same flags on both sides."),
        ("content", "content of files", "Use the same files on both sides."),
    ):
        ours, stated = getattr(expected, field) or {}, other.get(field)
        theirs = stated if isinstance(stated, dict) else {}
        paths = [path for path in {**ours, **theirs} if ours.get(path) != theirs.get(path)]
        if paths:
            shown = ", ".join(
                f"{path} is {theirs.get(path, 'missing')}, and {ours.get(path, 'missing')} at the "
                "syncer"
                for path in paths[:5]
            )
            more = f", and {len(paths) - 5} more differ" if len(paths) > 5 else ""
            return f"this process has another {name}: {shown[:1000]}{more}. {remedy}"
    return None


def find_other_format(stated: Any, expected: int = WIRE_FORMAT) -> str | None:
    """Describe a message format other than this side's, with the remedy; None if they are equal."""
    if type(stated) is int and stated == expected:
        return None
    shown = f"format {stated}" if type(stated) is int else "a format without a number"
    return (
        f"sends messages of {shown}, expected format {expected}. Install the same commit of "
        "fedpax on both sides."
    )

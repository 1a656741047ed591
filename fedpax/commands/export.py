"""`fedpax export`: write the model of a run to a folder, for other programs."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags

from fedpax.algorithm import Params
from fedpax.commands import UsageError
from fedpax.commands.options import parse
from fedpax.commands.saved_run import (
    SavedRun,
    build_run,
    checkpoint_round,
    define_saved_run_flags,
    load_whole_model,
    read_saved_run,
)
from fedpax.experiments.language_model import LanguageModelExperiment
from fedpax.experiments.weights import huggingface_obstacle
from fedpax.training.configuration import write_configuration
from fedpax.training.console import print_error, print_line
from fedpax.training.exports import LAST_FILE, write_orbax
from fedpax.training.mounts import rename_folder

FORMATS = ("huggingface", "orbax")


def export(arguments: Sequence[str]) -> int:
    """Write a checkpoint's model to a new folder, completely or not at all.

    Adapters are merged into the model that they adapt.

    Args:
        arguments: the arguments after `export`.

    Returns:
        The exit status.

    Raises:
        UsageError: `--out` is missing or has files, or no Hugging Face model is like the run's.
    """
    options, fields = parse("export", arguments, define_flags, needs_exp=False)
    saved = read_saved_run("export", arguments, options, fields)
    number = checkpoint_round("export", saved, options.round)
    out = _new_folder(options.out)
    if options.format == "huggingface":
        _check_has_huggingface_form(saved)
    run = build_run(saved.experiment)
    print_error(f"{saved.exp}: exporting round {number}")
    draft = out.with_name(f".{out.name}.draft")
    if draft.exists():
        shutil.rmtree(draft)  # of an export that was killed
    try:
        with jax.set_mesh(run.mesh):
            params = load_whole_model(saved, run, number)
            if options.dtype:
                params = jax.tree.map(lambda leaf: leaf.astype(options.dtype), params)
            _WRITERS[options.format](draft, saved, params)
        if out.exists():
            out.rmdir()
        rename_folder(draft, out, last=LAST_FILE)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    names = ", ".join(sorted(path.name for path in out.iterdir()))
    print_line(f"{saved.exp} round {number}: {count:,} parameters in {out}: {names}")
    return 0


def _new_folder(name: str | None) -> Path:
    """Return the folder to write, which must not exist, or be empty."""
    if not name:
        raise UsageError(
            "--out is missing, expected a new folder. Give for example --out=exported."
        )
    out = Path(name).expanduser().absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        kind = "has files" if out.is_dir() else "is a file"
        raise UsageError(
            f"--out={name} {kind}, expected a new or an empty folder. Give another --out, or "
            "remove it."
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out={name} cannot be made ({error.strerror}: {error.filename}), expected a new "
            "folder. Give another --out."
        ) from error
    return out


def _check_has_huggingface_form(saved: SavedRun) -> None:
    experiment = saved.experiment
    remedy = "--format=orbax writes the parameters of any model"
    if not isinstance(experiment, LanguageModelExperiment):
        raise UsageError(
            f"--job_log_dir={saved.folder} holds --exp={saved.exp}, a {type(experiment).__name__}, "
            f"expected a transformer for --format=huggingface. {remedy}."
        )
    if (obstacle := huggingface_obstacle(experiment.model)) is not None:
        raise UsageError(
            f"--format=huggingface: {obstacle} Train with this value to export in this format; "
            f"{remedy}."
        )


def _write_huggingface(folder: Path, saved: SavedRun, params: Params) -> None:
    """Write config.json and safetensors, with the original folder's other entries and tokenizer."""
    experiment = saved.experiment
    assert isinstance(experiment, LanguageModelExperiment)
    experiment.write_huggingface(folder, params)


def _write_orbax(folder: Path, saved: SavedRun, params: Params) -> None:
    """Write the parameters as a checkpoint of their own, and the configuration."""
    write_orbax(folder, params)
    write_configuration(folder, saved.experiment, saved.exp)


_WRITERS = {"huggingface": _write_huggingface, "orbax": _write_orbax}


def define_flags(options: flags.FlagValues) -> None:
    """Define the flags of the command."""
    define_saved_run_flags(options)
    flags.DEFINE_string("out", None, "The folder to write.", flag_values=options)
    flags.DEFINE_enum("format", FORMATS[0], FORMATS, "The format.", flag_values=options)
    dtypes = ("float32", "bfloat16", "float16")
    flags.DEFINE_enum("dtype", None, dtypes, "Cast the parameters.", flag_values=options)

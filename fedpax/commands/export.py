"""`fedpax export` and `inspect`: write a model or stages for other programs, and show stages."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from fedpax.algorithm import Params
from fedpax.checkpoints.exports import FILE_WRITERS, LAST_FILE, write_orbax
from fedpax.checkpoints.orbax_files import rename_folder
from fedpax.checkpoints.saved_state import load_params
from fedpax.clients import ClientStore
from fedpax.commands.parts.flower_export import write_flower_app
from fedpax.commands.parts.options import configure, parse
from fedpax.commands.parts.saved_run import (
    SavedRun,
    build_run,
    checkpoint_round,
    load_whole_model,
    read_saved_run,
)
from fedpax.console import print_error, print_line
from fedpax.deploy.artifacts import export_stages, inspect_round
from fedpax.deploy.flower.app_files import APP_FILE
from fedpax.deploy.runtime import MANIFEST, ArtifactError
from fedpax.errors import UsageError
from fedpax.experiments.language_model_experiment import LanguageModelExperiment
from fedpax.experiments.parts.weights import huggingface_obstacle
from fedpax.files import NO_ROOM
from fedpax.run_files.configuration import without_paths, write_configuration
from fedpax.training.experiment import Experiment, Run
from fedpax.transforms.stages import stages


def export(arguments: Sequence[str]) -> int:
    """Write a checkpoint's model to a new folder or file, completely or not at all."""
    options, fields = parse("export", arguments, needs_exp=False)
    if options.flower and not options.job_log_dir and options.exp:
        experiment = configure(options.exp, fields, command="export --flower")
        return _export_flower(experiment, options.exp, options)
    saved = read_saved_run("export", arguments, options, fields)
    if options.flower:
        return _export_flower(saved.experiment, saved.exp, options)
    if options.stages:
        return _export_stages(saved, options)
    number = checkpoint_round("export", saved, options.round)
    suffix = Path(options.out or "").suffix[1:]
    as_file = suffix in FILE_WRITERS
    chosen = options.format or (suffix if as_file else "huggingface")
    if as_file and chosen != suffix:
        raise UsageError(
            f"--out={options.out} is the name of a file, expected a folder for --format={chosen}. "
            "Leave out --format, or give a folder."
        )
    out = _new_path(options.out, is_folder=not as_file)
    if chosen == "huggingface":
        _check_has_huggingface_form(saved)
    print_error(f"{saved.exp}: exporting round {number}")
    with contextlib.ExitStack() as stack:
        draft = stack.enter_context(_draft_of(out, last=None if as_file else LAST_FILE))
        if getattr(getattr(saved.experiment, "data", None), "files", None) == ():
            run = None  # a coordinator has no data
            params = load_params(saved.saved_in, number)
        else:
            run = build_run(saved.experiment)
            stack.enter_context(jax.set_mesh(run.mesh))
            params = load_whole_model(saved, run, number)
        if options.dtype:
            params = jax.tree.map(lambda leaf: _cast(leaf, options.dtype), params)
        if as_file:
            _write_file(draft, chosen, params)
        else:
            _write_folder(draft, chosen, saved, params)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    names = "" if as_file else f": {', '.join(sorted(path.name for path in out.iterdir()))}"
    print_line(f"{saved.exp} round {number}: {count:,} parameters in {out}{names}")
    for field in () if run is None else _fields_of_own_models(run):
        print_line(
            "This is the shared model. Each client's own part is not exported: "
            f"fedpax.checkpoints.load_field({str(saved.saved_in)!r}, {field!r}, {number})['rows'] "
            "loads it, row k for client k."
        )
    return 0


def inspect(arguments: Sequence[str]) -> int:
    """Print a report on a folder of exported stages."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError(
            f"`fedpax inspect` got {' '.join(arguments) or 'no folder'!r}, expected one folder of "
            "`fedpax export --stages`. Give for example: fedpax inspect round."
        )
    try:
        print_line(inspect_round(arguments[0]))
    except ArtifactError as error:
        raise UsageError(str(error)) from error
    return 0


def _fields_of_own_models(run: Run) -> list[str]:
    """Return the fields of a run's state that keep the clients' own models."""
    if run.evaluate_own_models is None:  # a store is of something else, such as control variates
        return []
    state = jax.eval_shape(lambda key: run.algorithm.init(run.init(key)), jax.random.key(0))
    names: tuple[str, ...] = getattr(state, "_fields", ())
    return [name for name in names if isinstance(getattr(state, name), ClientStore)]


def _check_is_of_round(option: str, options: flags.FlagValues) -> None:
    """Raise if flags of an exported model are given with one that exports the round."""
    for name in ("format", "dtype", "round"):
        if options[name].value is not None:
            raise UsageError(
                f"--{name} is of an exported model, and --{option} exports the round. Leave one "
                "out."
            )


def _export_flower(experiment: Experiment, exp: str, options: flags.FlagValues) -> int:
    """Write a Flower app of an experiment, which needs no training before."""
    _check_is_of_round("flower", options)
    out = _new_path(options.out, is_folder=True)
    with _draft_of(out, last=APP_FILE) as draft:
        words = write_flower_app(draft, experiment, exp)
    print_line(f"{exp}: {words}, in {out}. Next: flwr run {out} --stream")
    return 0


def _export_stages(saved: SavedRun, options: flags.FlagValues) -> int:
    _check_is_of_round("stages", options)
    out = _new_path(options.out, is_folder=True)
    run = build_run(saved.experiment)
    if run.frozen is not None or run.cohort_shapes is None:
        obstacle = "reads frozen parameters" if run.frozen else "states no cohort_shapes"
        raise UsageError(
            f"{saved.exp} {obstacle}, expected a run whose round is (state, cohort), with cohorts "
            "of known shapes. In Python, fedpax.stages(program, *args) takes any arguments."
        )
    state = jax.eval_shape(lambda key: run.algorithm.init(run.init(key)), jax.random.key(0))
    divided = stages(run.algorithm.round, state, run.cohort_shapes)
    with _draft_of(out, last=MANIFEST) as draft:
        artifact = export_stages(divided, draft)
    size = sum(path.stat().st_size for path in out.glob("client_*.jax"))
    print_line(
        f"{saved.exp}: {len(artifact)} {'stage' if len(artifact) == 1 else 'stages'} in {out}, "
        f"{size:,} bytes for a participant, program {artifact.program[:12]}"
    )
    return 0


@contextlib.contextmanager
def _draft_of(out: Path, *, last: str | None) -> Iterator[Path]:
    """Yield the path of a draft of a folder or a file; of a folder, the file `last` comes last."""
    draft = out.with_name(f".{out.name}.draft")
    made = [folder for folder in out.parents if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out={out} cannot be made ({error.strerror}: {error.filename}), expected a new "
            f"{'folder' if last else 'file'}. Give another --out."
        ) from error
    _remove(draft)  # of an export that was killed
    try:
        yield draft
        if last is None:
            draft.replace(out)
            return
        if out.exists():
            out.rmdir()
        rename_folder(draft, out, last=last)
    except Exception as error:
        _tell_write_failure(error, out)
        raise
    finally:
        _remove(draft)
        if not out.exists():
            with contextlib.suppress(OSError):  # a folder that another process has filled
                for folder in made:
                    folder.rmdir()


def _tell_write_failure(error: Exception, out: Path) -> None:
    """Name the output in an error that says that it cannot be written."""
    # safetensors, Orbax and TensorStore put the system's error into their own texts.
    for number in NO_ROOM:
        if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
            raise OSError(number, os.strerror(number), str(out)) from error
    of_file = str(getattr(error, "filename", "")).startswith(str(out.parent))
    if isinstance(error, OSError) and of_file and error.errno in (errno.EROFS, errno.EACCES):
        raise UsageError(
            f"--out={out} cannot be made ({error.strerror}), expected a path in a folder that can "
            "be written. Give another --out."
        ) from error


def _remove(draft: Path) -> None:
    if draft.is_file() or draft.is_symlink():
        draft.unlink()
    shutil.rmtree(draft, ignore_errors=True)


def _cast(leaf: Any, dtype: str) -> Any:
    """Cast a parameter, but no counts: integers stay."""
    return leaf.astype(dtype) if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) else leaf


def _new_path(name: str | None, *, is_folder: bool) -> Path:
    """Return the folder to write, which must not exist or be empty, or the file."""
    if not name:
        raise UsageError(
            "--out is missing, expected a new folder. Give for example --out=exported, or a file: "
            "--out=exported.npz or --out=exported.safetensors."
        )
    out = Path(name).expanduser().absolute()
    is_link = out.is_symlink()
    is_empty = is_folder and out.is_dir() and not any(out.iterdir())
    if is_link or (out.exists() and not is_empty):
        trouble = "is a file" if out.is_file() else "has files" if is_folder else "is a folder"
        trouble = "is a link" if is_link else trouble
        expected = "a new or an empty folder" if is_folder else "a new file"
        raise UsageError(
            f"--out={name} {trouble}, expected {expected}. Give another --out, or remove it."
        )
    return out


def _check_has_huggingface_form(saved: SavedRun) -> None:
    experiment = saved.experiment
    remedy = (
        "--format=orbax writes the parameters of any model, and so do --out=NAME.safetensors and "
        "--out=NAME.npz"
    )
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


def _write_folder(folder: Path, chosen: str, saved: SavedRun, params: Params) -> None:
    """Write a Hugging Face folder, or the parameters and the configuration."""
    if chosen == "huggingface":
        assert isinstance(saved.experiment, LanguageModelExperiment)
        saved.experiment.write_huggingface(folder, params)
        return
    if chosen == "orbax":
        write_orbax(folder, params)
    else:
        folder.mkdir()
        _write_file(folder / f"params.{chosen}", chosen, params)
    write_configuration(folder, without_paths(saved.experiment), saved.exp)
    saved.experiment.write_inputs(folder)


def _write_file(path: Path, chosen: str, params: Params) -> None:
    try:
        FILE_WRITERS[chosen](path, params)
    except ValueError as error:
        raise UsageError(f"--format={chosen}: {error}") from error

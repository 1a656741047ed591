"""The progress of runs, read from their folders while they train and afterwards."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from fedpax.console import (
    escape_controls,
    format_bytes,
    format_seconds,
    format_value,
    markdown_table,
)
from fedpax.errors import ConfigurationError
from fedpax.files import describe_no_permission
from fedpax.reports.metric_table import number_or_nan
from fedpax.run_files.configuration import flatten, read_configuration_json
from fedpax.run_files.evaluations import STOP
from fedpax.run_files.goodput import BUCKETS, Bucket, read_goodput
from fedpax.run_files.metrics import describe_damage, select, throughput
from fedpax.run_files.metrics_log import read_log, spread_rounds
from fedpax.run_files.paths import CONFIGURATION, METRICS, folder_of_checkpoints, latest_round
from fedpax.training.folder_owners import is_in_use


class RunReport(NamedTuple):
    """The progress of a run, as its folder records it."""

    name: str  # the experiment's name, or the folder's name if it is unknown
    # `running` while a process holds the folder, `finished` when the last round is saved, otherwise
    # `stopped`
    state: Literal["running", "finished", "stopped"]
    rounds: int  # that are logged or saved
    total_rounds: int | None  # of the experiment, or None if unknown
    training_loss: float  # of the last logged round; NaN if there is none
    heldout_loss: float  # of the last evaluation; NaN if there is none
    # throughput, as `fedpax.run_files.metrics.throughput` measures it; of a long run, in the rounds
    # of `lines`
    items_per_second: float
    item_unit: str  # `"tokens"` or `"examples"`
    bytes_across_placement: float  # in all rounds; NaN if unknown
    wall_seconds: float  # of all processes that trained the run
    # seconds by use (`fedpax.run_files.goodput`); empty if they are unknown
    goodput: Mapping[Bucket, float] = MappingProxyType({})
    items: float = math.nan  # NaN if unknown
    delta: float = math.nan  # of the metric `epsilon`; NaN if the run is not private
    spikes: int = 0
    damage: tuple[str, ...] = ()  # what cannot be read, in words
    # the lines of `metrics.jsonl`; of a long run, lines that are evenly spread
    lines: Sequence[Mapping[str, Any]] = ()


def report_run(folder: Path) -> RunReport:
    """Read the progress of a run, and change nothing in its folder."""
    damage = []
    name, total_rounds, saved_in, delta = folder.name, None, folder, None
    try:
        if configuration_json := read_configuration_json(folder):
            exp, configuration = configuration_json
            name = exp or name
            fields = dict(flatten(configuration))
            total = fields.get("training.rounds")
            total_rounds = total if isinstance(total, int) else None
            delta = fields.get("aggregator.delta")
            checkpoint_dir = fields.get("training.checkpoint_dir")
            if isinstance(checkpoint_dir, str):
                saved_in = folder_of_checkpoints(folder, checkpoint_dir)
    except ConfigurationError as error:
        damage.append(str(error))
    saved, is_running = 0, is_in_use(folder)
    try:
        saved = latest_round(saved_in) or 0
    except PermissionError as error:
        damage.append(describe_no_permission(Path(error.filename or saved_in)))
    lines: list[dict[str, Any]] = []
    try:
        log = read_log(folder, spread_rounds)
        lines = log.lines
        damage += describe_damage(folder, 0 if is_running else saved, log)
    except ConfigurationError as error:
        damage.append(str(error))
    rounds, evaluations = select(lines, "training"), select(lines, "evaluation")
    last = rounds[-1] if rounds else {}
    stops = [line["round"] for line in select(lines, STOP)]
    finished = total_rounds is not None and saved >= total_rounds
    finished |= saved > 0 and stops[-1:] == [max(saved, last.get("round", 0))]
    sizes = (select(lines, "run") or [{}])[0]
    goodput = read_goodput(folder)
    seconds = goodput[0] if goodput else {}
    logged = number_or_nan(lines[-1].get("wall_seconds") if lines else None)
    return RunReport(
        name=escape_controls(name),
        state="running" if is_running else "finished" if finished else "stopped",
        rounds=max(saved, last.get("round", 0)),
        total_rounds=total_rounds,
        training_loss=number_or_nan(last.get("loss")),
        heldout_loss=number_or_nan(evaluations[-1].get("loss") if evaluations else None),
        items_per_second=throughput(rounds),
        item_unit=str(sizes.get("item_unit", "items")),
        bytes_across_placement=number_or_nan(last.get("bytes_across_placement")),
        # The file is newer than the last line, unless it is missing or was left by an old version.
        wall_seconds=max(sum(seconds.values()), logged) if seconds else logged,
        goodput=seconds,
        items=number_or_nan(last.get("items")),
        delta=number_or_nan(delta),
        spikes=int(last.get("spikes") or 0),
        damage=tuple(damage),
        lines=lines,
    )


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run, or one that is about to start."""
    return any((folder / name).exists() for name in (CONFIGURATION, METRICS)) or is_in_use(folder)


def format_reports(reports: Sequence[RunReport]) -> str:
    """Format reports as a Markdown table, one run per line."""
    head = (
        "experiment", "rounds", "training loss", "held-out loss", "trained on", "throughput",
        "communicated", "wall time", "state",
    )  # fmt: skip
    rows = [
        (
            run.name,
            f"{run.rounds:,}/{'?' if run.total_rounds is None else format(run.total_rounds, ',')}",
            _or_dash(run.training_loss, format_value(run.training_loss)),
            _or_dash(run.heldout_loss, format_value(run.heldout_loss)),
            _or_dash(run.items, f"{run.items:,.0f} {run.item_unit}"),
            _or_dash(run.items_per_second, f"{run.items_per_second:,.0f} {run.item_unit}/s"),
            _or_dash(run.bytes_across_placement, format_bytes(run.bytes_across_placement)),
            _or_dash(run.wall_seconds, format_seconds(run.wall_seconds)),
            run.state,
        )
        for run in reports
    ]
    return markdown_table(head, rows)


def format_goodput(reports: Sequence[RunReport]) -> str:
    """Format the use of the runs' wall time as a Markdown table, one run per line."""
    rest = [bucket for bucket in BUCKETS if bucket != "step"]
    rows = []
    for run in reports:
        if total := sum(run.goodput.values()):
            seconds = [run.goodput["step"], *(run.goodput[bucket] for bucket in rest)]
            shares = [f"{part / total:.1%}" for part in seconds]
            rows.append((run.name, *shares, f"{run.spikes:,}"))
    return markdown_table(("experiment", "step (goodput)", *rest, "spikes"), rows) if rows else ""


def format_privacy(reports: Sequence[RunReport]) -> str:
    """Return a line for each private run: the epsilon of its last logged round; or ""."""
    lines = []
    for run in reports:
        spent = [line for line in select(run.lines, "training") if "epsilon" in line]
        if not spent:
            continue
        epsilon, last = number_or_nan(spent[-1]["epsilon"]), spent[-1].get("round")
        delta = "the aggregator's delta" if math.isnan(run.delta) else f"delta {run.delta:g}"
        lines.append(
            f"{run.name}: epsilon {epsilon:.4g} for {delta} of the model after round {last}, "
            "without amplification by sampling. Metrics, and numbers of clients and examples, have "
            "no noise. In one program (`fedpax train`), the noise is drawn from a seed: a reader "
            "who knows the seed can subtract it, and no epsilon holds"
        )
    return "\n".join(lines)


def _or_dash(number: float, text: str) -> str:
    return "-" if math.isnan(number) else text

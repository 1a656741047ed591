"""`fedpax show`: the progress of one run or several, as a table and a picture."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedpax.comma_lists import split_list
from fedpax.commands.parts.options import did_you_mean_flag, metric_names_of, parse
from fedpax.commands.parts.output_files import output_file
from fedpax.commands.parts.saved_run import existing_folder
from fedpax.console import print_error, print_line
from fedpax.errors import UsageError
from fedpax.islands.syncer.island_table import format_islands, read_islands
from fedpax.reports.metric_table import check_metrics, format_metrics
from fedpax.reports.run_report import (
    format_goodput,
    format_privacy,
    format_reports,
    holds_run,
    report_run,
)
from fedpax.run_files.metrics import select
from fedpax.run_files.paths import is_remote, resolve_job_log_dir
from fedpax.sites.site_table import format_sites, read_sites
from fedpax.training.folder_owners import is_in_use


def show(arguments: Sequence[str]) -> int:
    """Print tables of runs and of the use of their time, and draw a picture."""
    # The runs may be running or damaged; nothing in their folders changes.
    options, unknown = parse("show", arguments)
    if unknown:
        raise UsageError(
            f"`fedpax show` got {unknown[0]!r}, expected "
            "--job_log_dir=DIR, --metric=NAME and --picture=FILE.png alone."
            f"{did_you_mean_flag(options, unknown[:1]) or ' Leave it out.'}"
        )
    names = [name for text in options.job_log_dir for name in split_list(text, _exists)]
    if not names:
        raise UsageError(
            "--job_log_dir is missing, expected the folders of runs, separated by commas. Give for "
            "example --job_log_dir=runs/diloco."
        )
    picture = output_file("picture", options.picture, ".png")
    folders = list(dict.fromkeys(folder for name in names for folder in _runs_in(name)))
    reports = [report_run(folder) for folder in folders]
    uses = Counter(run.name for run in reports)
    reports = [
        run if uses[run.name] == 1 else run._replace(name=f"{run.name} ({_short(folder)})")
        for run, folder in zip(reports, folders, strict=True)
    ]
    lines = {run.name: run.lines for run in reports}
    metrics = metric_names_of(options)
    check_metrics(metrics, lines)
    print_line(format_reports(reports))
    if table := format_metrics(lines, metrics):
        print_line(f"\nMetrics:\n{table}")
    if privacy := format_privacy(reports):
        print_line(f"\nPrivacy:\n{privacy}")
    if goodput := format_goodput(reports):
        print_line(f"\nUse of the wall time:\n{goodput}")
    for folder in folders:
        if islands := read_islands(folder):
            when = "" if is_in_use(folder) else ", when it stopped"
            print_line(
                f"\nIslands of the syncer in {_short(folder)}{when}:\n{format_islands(islands)}"
            )
        if sites := read_sites(folder):
            when = "" if is_in_use(folder) else ", when it stopped"
            print_line(f"\nSites of the syncer in {_short(folder)}{when}:\n{format_sites(sites)}")
    for text in (text for run in reports for text in run.damage):
        print_error(text)
    if picture:
        if not any(select(run_lines, "training") for run_lines in lines.values()):
            raise UsageError(
                f"--picture={options.picture} has nothing to show: no round is logged yet. Repeat "
                "the command later."
            )
        from fedpax.reports.plot import Axis, plot_losses

        over: tuple[Axis, ...] = ("items", "bytes_across_placement", "wall_seconds")
        plot_losses(lines, picture, over=over, metrics=metrics or ("loss",), training_loss=True)
    return 0


def _exists(job_log_dir: str) -> bool:
    return not is_remote(job_log_dir) and resolve_job_log_dir(job_log_dir).exists()


def _runs_in(job_log_dir: str) -> list[Path]:
    """Return the folder itself if it holds a run, otherwise the runs directly in it."""
    folder = existing_folder(job_log_dir)
    if holds_run(folder):
        return [folder]
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and holds_run(path))
    if not folders:
        raise UsageError(
            f"--job_log_dir={job_log_dir} holds no run, expected config.json or metrics.jsonl "
            "there or in a folder below. Give the folder that `fedpax train` or `fedpax compare` "
            "got."
        )
    return folders


def _short(folder: Path) -> str:
    """Return the shorter of a folder's full path and its path from the current folder."""
    if is_remote(folder):
        return str(folder)
    below = folder.is_relative_to(Path.cwd())
    return str(folder.relative_to(Path.cwd()) if below else folder)

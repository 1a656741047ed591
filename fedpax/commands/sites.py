"""`fedpax sites`: list the sites of a run, expel one, or admit it again."""

import time
from collections.abc import Sequence
from pathlib import Path

from fedpax.commands.parts.options import check_job_log_dir, did_you_mean_flag, parse
from fedpax.commands.parts.saved_run import existing_folder
from fedpax.console import markdown_table, print_line
from fedpax.errors import UsageError
from fedpax.islands.syncer.island_table import format_islands, read_islands
from fedpax.reports.run_report import holds_run
from fedpax.run_files.paths import is_remote
from fedpax.sites.site_table import format_sites, read_sites
from fedpax.transport.admission import admit, expel, read_expulsions

ACTIONS = ("list", "expel", "admit")


def sites(arguments: Sequence[str]) -> int:
    """List sites, or change which ones are expelled; a running syncer notices within a second."""
    options, words = parse("sites", arguments)
    action, *names = words or [""]
    if action not in ACTIONS or len(names) != (action != "list"):
        unknown = [word for word in words if word.startswith("--")]
        raise UsageError(
            f"`fedpax sites` got {' '.join(words) or 'no action'!r}, expected list, expel NAME or "
            f"admit NAME.{did_you_mean_flag(options, unknown[:1])} Run for example `fedpax sites "
            "list --job_log_dir=runs/fed`."
        )
    check_job_log_dir(options)
    folder = existing_folder(options.job_log_dir)
    if is_remote(options.job_log_dir) or not holds_run(folder):
        raise UsageError(
            f"--job_log_dir={options.job_log_dir} holds no run, expected the folder of a syncer. "
            "Give the folder that `fedpax syncer` got."
        )
    if action == "list":
        print_line(describe_sites(folder))
    elif action == "expel":
        _expel(folder, names[0], options.reason)
    elif admit(folder, names[0]):
        print_line(f"Site {names[0]} may return: start it again.")
    else:
        raise UsageError(
            f"site {names[0]!r} is not expelled. Run `fedpax sites list` to see who is."
        )
    return 0


def describe_sites(folder: Path) -> str:
    """Describe the islands of a run with their sites, and the expelled sites."""
    islands, expelled = read_islands(folder), read_expulsions(folder)
    parts = [format_islands(islands, sites=True)] if islands else []
    if over_rounds := read_sites(folder):
        parts.append(format_sites(over_rounds))
    if expelled:
        rows = [
            (
                site,
                time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expulsion.time)),
                expulsion.by,
                expulsion.reason,
            )
            for site, expulsion in expelled.items()
        ]
        parts.append(f"Expelled:\n{markdown_table(('site', 'since', 'by', 'reason'), rows)}")
    return "\n\n".join(parts) or "No site has joined."


def _expel(folder: Path, name: str, reason: str) -> None:
    islands = read_islands(folder)
    known = {island.site for island in islands} | {site.name for site in read_sites(folder)}
    of_island = {island.name: island.site for island in islands}
    if name not in known and (site := of_island.get(name)):
        raise UsageError(
            f"{name!r} is an island of the site {site!r}, and sites are expelled. Run `fedpax "
            f"sites expel {site}`."
        )
    expel(folder, name, reason)
    print_line(f"Site {name} is expelled. `fedpax sites admit {name}` lets it return.")
    if name not in known:
        print_line(f"No site {name} has joined so far. Joined: {', '.join(sorted(known)) or '-'}.")

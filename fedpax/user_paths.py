"""Paths that users write: home folders, patterns, `{split}`."""

import glob
from pathlib import Path

from fedpax.errors import ArgumentError


def expand_home(path: str | Path) -> Path:
    """Return a path with `~` expanded."""
    if str(path).startswith("./~"):  # pathlib would drop the "./"
        return Path(path).absolute()
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        if Path(Path(path).parts[0]).exists():  # a folder called ~name, of no user of that name
            return Path(path).absolute()
        raise ArgumentError(
            f"{path} begins with a home folder that is unknown, expected a full path. Set the "
            "environment variable HOME, or give another folder; a folder of this name is written "
            f"./{path}."
        ) from error


def find_paths(pattern: str | Path) -> list[Path]:
    """Return the paths that match a pattern, in order; a part that exists stands for itself."""
    whole = expand_home(pattern)
    matches = [Path(whole.anchor)]
    for part in whole.parts[bool(whole.anchor) :]:
        matches = [path for folder in matches for path in _match(folder, part)]
    if whole.name == "**":
        matches = [path for path in matches if not path.is_dir()]
    return sorted({*matches})


def _match(folder: Path, part: str) -> list[Path]:
    if (folder / part).exists():
        return [folder / part]
    below = [folder / name for name in glob.glob(part, root_dir=folder, recursive=True)]
    return [folder, *below] if part == "**" else below


def existing_head(pattern: str) -> tuple[str, str]:
    """Divide a pattern after its first parts that exist as they are written, such as `{client}`."""
    whole = expand_home(pattern)
    path, parts = Path(whole.anchor), whole.parts[bool(whole.anchor) :]
    for count, part in enumerate(parts):
        if not (path / part).exists():
            return f"{path}/", "/".join(parts[count:])
        path = path / part
    return str(path), ""


def fill_in_split(pattern: str, split: str) -> str:
    """Replace `{split}` in a pattern, but for folders that are named so."""
    head, tail = existing_head(pattern)
    return head + tail.replace("{split}", glob.escape(split))

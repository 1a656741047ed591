"""Object stores, such as a bucket that gcsfuse mounts, or one that is named by its URL."""

import shutil
from pathlib import Path
from typing import Any

from fedpax.run_files.paths import is_remote

MOUNTS = Path("/proc/self/mounts")


OBJECT_STORES = frozenset(
    {"gcsfuse", "s3fs", "goofys", "geesefs", "rclone", "blobfuse", "blobfuse2"}
)
"""Names of programs that mount an object store, as Linux lists them after `fuse.`."""


COMMITTED = "commit_success.txt"


CHUNK_BYTES = 1 << 24


def is_object_store(folder: Path) -> bool:
    """Return whether a folder is in an object store, which renames no folder with its files."""
    if is_remote(folder):
        return True
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return False
    folder = folder.resolve()
    types = {}
    for line in lines:
        _, place, file_system, *_ = line.split(" ")
        # The list writes a space as \\040; a later mount on the same place hides the earlier one.
        types[Path(place.replace("\\040", " "))] = file_system
    mounted = next((types[place] for place in (folder, *folder.parents) if place in types), "")
    return mounted.removeprefix("fuse.") in OBJECT_STORES


def remove_folder(folder: Any) -> None:
    """Remove a folder with its files."""
    if is_remote(folder):
        folder.rmtree()
    else:
        shutil.rmtree(folder)


def delete_folder(folder: Any, *, last: str) -> None:
    """Delete a folder that counts as complete; if the process is killed, a part does not count."""
    if is_object_store(folder):
        (folder / last).unlink(missing_ok=True)
        remove_folder(folder)
        return
    leftover = folder.with_name(f".{folder.name}.deleted.draft")
    if leftover.exists():
        shutil.rmtree(leftover)
    folder.rename(leftover)
    shutil.rmtree(leftover)


def rename_folder(source: Path, target: Path, *, last: str) -> None:
    """Rename a folder; in an object store, or between two of them, move its files one by one."""
    one_store = not is_object_store(source) and not is_object_store(target)
    if one_store and source.stat().st_dev == target.parent.stat().st_dev:
        source.rename(target)
        return
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    for file in sorted(files, key=lambda file: (file == Path(last), file)):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        if is_remote(target):
            with (source / file).open("rb") as old, (target / file).open("wb") as new:
                shutil.copyfileobj(old, new, CHUNK_BYTES)
        else:
            shutil.move(source / file, target / file)
    shutil.rmtree(source)

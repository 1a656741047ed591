"""Files that a command writes, as its flags name them."""

import os
from pathlib import Path

from fedpax.errors import UsageError
from fedpax.extras import check_installed


def output_file(flag: str, name: str | None, suffix: str = "") -> Path | None:
    """Check the file that a command will write, and make its folder."""
    if not name:
        return None
    example = f"Set for example --{flag}={flag}{suffix or '.txt'}."
    if not name.endswith(suffix):
        format_name = suffix.removeprefix(".").upper()
        raise UsageError(
            f"--{flag}={name} is not a {format_name}, expected a name that ends with {suffix}. "
            f"{example}"
        )
    if suffix == ".png":
        check_installed("matplotlib", f"--{flag}={name}")
    path = Path(name).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        reason = "it is a folder" if path.is_dir() else None
        if reason is None and not os.access(path if path.exists() else path.parent, os.W_OK):
            reason = "no permission"
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
    if reason is not None:
        raise UsageError(
            f"--{flag}={name} cannot be written ({reason}), expected the name of a file in a "
            f"folder that exists or can be made. {example}"
        )
    return path

"""JAX's persistent compilation cache: a second start of an experiment compiles nothing."""

import os
from pathlib import Path

import jax


def enable_compilation_cache() -> None:
    """Keep compiled programs in `$XDG_CACHE_HOME/fedpax/jax`, or `~/.cache/fedpax/jax`."""
    # JAX's own settings come first: `JAX_ENABLE_COMPILATION_CACHE=0` switches the cache off, and
    # `JAX_COMPILATION_CACHE_DIR` names another folder. Without a home folder, and if the folder
    # cannot be created, there is no cache. The key of a program includes its text, the devices, the
    # flags of the compiler and the versions of JAX and XLA.
    settings = jax.config.values
    if not settings["jax_enable_compilation_cache"] or settings["jax_compilation_cache_dir"]:
        return
    try:
        folder = _cache_home() / "fedpax" / "jax"
        # For the user alone: JAX executes what it finds there.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the home folder is unknown
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # JAX's default is 1 second, but a start compiles many programs that take less.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _cache_home() -> Path:
    """Return the user's cache folder; by the XDG specification a relative path is ignored."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"

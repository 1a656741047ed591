"""Environments whose encoding is ASCII."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedpax.console import escape_unknown_characters, print_line
from fedpax.errors import ConfigurationError
from fedpax.run_files.paths import resolve_job_log_dir

ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def test_commands_run_in_the_c_locale(tmp_path: Path) -> None:
    # Without HOME, and with a warning for each text file in the encoding of the locale.
    result = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-m", "fedpax", "list"],
        env={"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu", **ASCII},
        cwd=tmp_path,
        capture_output=True,
    )
    assert result.returncode == 0 and b"pretrain_text" in result.stdout, result.stderr
    warnings = [x for x in result.stderr.splitlines() if b"EncodingWarning" in x]
    assert not [x for x in warnings if b"/site-packages/" not in x]
    assert not [*tmp_path.iterdir()]


def test_characters_that_the_encoding_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii"))
    escape_unknown_characters()
    print_line("2.0 \u00b1 0.5 in d\u00e9")
    assert written.getvalue() == b"2.0 \\xb1 0.5 in d\\xe9\n"


def test_a_folder_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"characters that are unknown.* PYTHONUTF8=1"):
        resolve_job_log_dir("d\udcc3\udca9/run")

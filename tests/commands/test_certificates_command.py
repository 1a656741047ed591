"""Tests of `fedpax certificates`."""

from pathlib import Path

import pytest
from small_runs import Command

from fedpax.sites.transport.certificates import read_certificates


def test_certificates_are_made_and_their_expiry_is_stated(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "certificates"
    status, output, errors = command(
        "certificates", f"--out={out}", "--names=syncer.example.org, site-1", "--days=20"
    )
    assert (status, errors) == (0, "")
    for name in ("syncer.example.org", "site-1"):
        expires = read_certificates(out / name).expires
        line = next(line for line in output.splitlines() if line.startswith(str(out / name)))
        assert line.endswith(f"expires {expires:%Y-%m-%d %H:%M} UTC")
    assert f"--authority={out / 'authority'}`" in output
    status, output, errors = command(
        "certificates",
        f"--out={tmp_path / 'more'}",
        "--names=site-2",
        f"--authority={out / 'authority'}",
    )
    assert (status, errors) == (0, "")
    assert read_certificates(tmp_path / "more" / "site-2").name == "site-2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Run for example `fedpax certificates --out=certificates"),
        (("--out=new",), "needs a folder and names"),
        (("--names=a",), "needs a folder and names"),
        (("--out=new", "--names=a", "--sites=b"), "got '--sites=b', expected --out, --names"),
        (("--out=new", "--names=a", "--exp=b"), "got '--exp'"),
        (("--out=new", "--names=A"), "names[0]='A' is not a name"),
        (("--out=new", "--names=a", "--days=0"), "days=0 is out of range"),
        (("--out=new", "--names=a", "--days=x"), "--days"),
        (("--out=.", "--names=a"), "Choose a new folder"),
        (("--out=new", "--names=a", "--authority=none"), "there is no file none/certificate.pem"),
    ],
)
def test_arguments_that_are_refused(
    command: Command, arguments: tuple[str, ...], words: str
) -> None:
    status, output, errors = command("certificates", *arguments)
    assert (status, output) == (2, "") and words in errors
    assert not Path("new").exists()

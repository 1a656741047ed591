"""Tests of `fedpax certificates`."""

import subprocess
from pathlib import Path

import pytest
from small_runs import Command

from fedpax.transport.certificates import read_certificates


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
        (("--out=new", "--names=a", "--exp=b"), "got '--exp=b'"),
        (("--out=new", "--names=A"), "names[0]='A' is not a name"),
        (("--out=new", "--names=a", "--days=0"), "days=0 is out of range"),
        (("--out=new", "--names=a", "--days=x"), "--days"),
        (("--out=.", "--names=a"), "Choose a new folder"),
        (("--out=new", "--request"), "needs the site's name and a folder"),
        (("--out=new", "--request", "--name=*"), "name='*' is not a name"),
        (("--out=new", "--request", "--name=a", "--days=3"), "got --days with --request"),
        (("--out=new", "--sign=a", "--names=b", "--authority=c"), "got --names with --sign"),
        (("--out=new", "--sign=a"), "needs the authority's folder"),
        (("--out=new", "--sign=a", "--authority=c"), "--sign=a: it cannot be read (No such file"),
        (("--out=new", "--names=a", "--replace"), "got --replace with --names"),
        (("--out=new", "--names=a", "--authority=none"), "there is no file none/certificate.pem"),
    ],
)
def test_arguments_that_are_refused(
    command: Command, arguments: tuple[str, ...], words: str
) -> None:
    status, output, errors = command("certificates", *arguments)
    assert (status, output) == (2, "") and words in errors
    assert not Path("new").exists()


def test_a_site_requests_and_the_coordinator_signs(command: Command, tmp_path: Path) -> None:
    authority, me, signed = (str(tmp_path / name) for name in ("authority", "me", "signed"))
    assert command("certificates", f"--out={authority}", "--names=localhost")[0] == 0
    status, requested, errors = command(
        "certificates", "--request", "--name=hospital-1", f"--out={me}"
    )
    assert (status, errors) == (0, "")
    sign = (
        "certificates",
        f"--sign={me}/request.pem",
        f"--authority={authority}/authority",
        f"--out={signed}",
    )
    status, output, errors = command(*sign, "--days=20")
    assert (status, errors) == (0, "") and "hospital-1  expires" in output
    fingerprint = requested.split()[2]
    assert fingerprint.startswith("SHA256:") and fingerprint in output.split()
    copied = next(line for line in output.splitlines() if "cp " in line)
    subprocess.run(copied.split("`")[1].replace("DIR", me), shell=True, check=True)
    assert read_certificates(me).name == "hospital-1"
    status, output, errors = command(*sign[:-1], f"--out={signed}2")
    assert status == 2 and "pass --replace" in errors
    assert command(*sign[:-1], f"--out={signed}2", "--replace")[0] == 0

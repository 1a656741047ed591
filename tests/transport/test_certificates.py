"""Certificates: who can connect with which ones, and what the others are told."""

import datetime
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fedpax.experiments.benchmarks.unreliable_network import UnreliableNetwork
from fedpax.transport import certificates as module
from fedpax.transport.calls import (
    Connection,
    DisconnectedError,
    MessageServer,
    RefusedError,
    connect,
    serve,
)
from fedpax.transport.certificates import make_certificates, read_certificates
from fedpax.transport.message import Message

NAMES = ("localhost", "site-1", "site-2", "127.0.0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of two authorities, in `own` and `other`."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder / "own", NAMES)
    make_certificates(folder / "other", NAMES)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[MessageServer]:
    certificates = folder / "own" / "localhost"
    with serve(tell_peer, "localhost:0", certificates=certificates) as server:
        yield server


def tell_peer(peer: str, message: Message) -> Message:
    return Message({"peer": peer})


def peer_name(address: str, certificates: Path | None, server_name: str | None = None) -> str:
    with connect(address, certificates=certificates, server_name=server_name) as connection:
        return connection.call(Message({}), timeout=10).header["peer"]


@pytest.mark.parametrize("name", ["site-1", "site-2"])
def test_a_site_is_known_by_its_name(server: MessageServer, folder: Path, name: str) -> None:
    assert peer_name(f"localhost:{server.port}", folder / "own" / name) == name


def test_the_syncer_is_known_by_its_name_behind_another_address(
    server: MessageServer, folder: Path
) -> None:
    with UnreliableNetwork(server.port) as tunnel:
        address, site = f"127.0.0.1:{tunnel.port}", folder / "own" / "site-1"
        assert peer_name(address, site, "localhost") == "site-1"
        with pytest.raises(RefusedError, match=r"for the server one with the name '127\.0\.0\.1'"):
            peer_name(address, site)


def test_a_certificate_for_an_address(folder: Path) -> None:
    certificates = folder / "own" / "127.0.0.1"
    with serve(tell_peer, "127.0.0.1:0", certificates=certificates) as server:
        assert peer_name(f"127.0.0.1:{server.port}", folder / "own" / "site-1") == "site-1"


def test_strangers_are_told_why(server: MessageServer, folder: Path) -> None:
    address = f"localhost:{server.port}"
    with pytest.raises(RefusedError, match=r"refuses connections without certificates. Pass this"):
        peer_name(address, None)
    with pytest.raises(RefusedError, match=r"is not accepted.*Use certificates of one authority"):
        peer_name(address, folder / "other" / "site-1")
    assert peer_name(address, folder / "own" / "site-1") == "site-1"


@pytest.mark.parametrize("stranger", ["other authority", "self-signed", "expired"])
def test_a_stranger_who_trusts_the_syncer_is_refused(
    server: MessageServer,
    folder: Path,
    tmp_path: Path,
    stranger: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if stranger == "other authority":
        shutil.copytree(folder / "other" / "site-1", tmp_path / "site")
    elif stranger == "self-signed":
        shutil.copytree(folder / "other" / "authority", tmp_path / "site")
    else:
        past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=9)
        monkeypatch.setattr("fedpax.transport.authority.now", lambda: past)
        authority = folder / "own" / "authority"
        make_certificates(tmp_path / "expired", ["site-1"], days=1, authority=authority)
        monkeypatch.undo()
        shutil.copytree(tmp_path / "expired" / "site-1", tmp_path / "site")
    shutil.copy(folder / "own" / "site-1" / "authority.pem", tmp_path / "site" / "authority.pem")
    authority, key, certificate = (
        (tmp_path / "site" / f"{name}.pem").read_bytes()
        for name in ("authority", "key", "certificate")
    )
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    address = f"localhost:{server.port}"
    channel = grpc.secure_channel(address, credentials)
    with Connection(channel, address, tmp_path / "site", "localhost", 100) as connection:
        with pytest.raises(RefusedError, match=r"refuses the certificate in .* Use one of the"):
            connection.call(Message({}), timeout=10)
    assert peer_name(address, folder / "own" / "site-1") == "site-1"
    # `connect` itself notices such a folder before anything is sent.
    with pytest.raises(ValueError, match=r"Copy the whole folder again|Make new ones with"):
        connect(address, certificates=tmp_path / "site")


def test_a_site_cannot_pose_as_the_syncer(folder: Path) -> None:
    with serve(tell_peer, "localhost:0", certificates=folder / "own" / "site-2") as server:
        with pytest.raises(RefusedError, match="with the name 'localhost'"):
            peer_name(f"localhost:{server.port}", folder / "own" / "site-1")


def test_one_side_without_certificates(folder: Path) -> None:
    with serve(tell_peer, "localhost:0") as server:
        with pytest.raises(RefusedError, match=r"does not use TLS. Start it with --certificates"):
            peer_name(f"localhost:{server.port}", folder / "own" / "site-1")


def test_a_server_that_dies_is_not_said_to_refuse(folder: Path) -> None:
    certificates = folder / "own" / "localhost"
    with serve(tell_peer, "localhost:0", certificates=certificates) as server:
        with UnreliableNetwork(server.port) as network:
            address, site = f"localhost:{network.port}", folder / "own" / "site-1"
            with connect(address, certificates=site) as connection:
                assert connection.call(Message({}), timeout=10).header["peer"] == "site-1"
                network.cut()
                with pytest.raises(DisconnectedError):
                    connection.call(Message({}), timeout=2)


def test_files_can_be_read_by_their_owner_alone(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        make_certificates(tmp_path / "new" / "certificates", ["site-1"])
    finally:
        os.umask(former)
    paths = [tmp_path / "new" / "certificates", *(tmp_path / "new" / "certificates").rglob("*")]
    assert len(paths) == 1 + 2 + 6
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert os.listdir(tmp_path / "new") == ["certificates"]


def test_expiry_and_names_are_as_stated(tmp_path: Path) -> None:
    begin = datetime.datetime.now(datetime.UTC)
    expires = make_certificates(tmp_path / "a", ["syncer.example.org", "::1", "10.1.2.3"], days=30)
    assert list(expires) == ["authority", "syncer.example.org", "::1", "10.1.2.3"]
    assert abs(expires["authority"] - begin - datetime.timedelta(days=3650)).seconds < 60
    for name in ("syncer.example.org", "::1", "10.1.2.3"):
        assert abs(expires[name] - begin - datetime.timedelta(days=30)).seconds < 60
        own = read_certificates(tmp_path / "a" / name)
        assert (own.name, own.expires) == (name, expires[name])


def test_sites_are_added_to_an_authority(
    server: MessageServer, folder: Path, tmp_path: Path
) -> None:
    authority = folder / "own" / "authority"
    assert list(make_certificates(tmp_path / "more", ["site-3"], authority=authority)) == ["site-3"]
    assert sorted(os.listdir(tmp_path / "more")) == ["site-3"]
    assert peer_name(f"localhost:{server.port}", tmp_path / "more" / "site-3") == "site-3"
    limit = make_certificates(tmp_path / "long", ["site-4"], days=3650, authority=authority)
    assert limit["site-4"] <= make_certificates(tmp_path / "x", ["site-5"])["authority"]


def test_a_certificate_that_expires_soon_is_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_certificates(tmp_path / "a", ["site-1"], days=13)
    read_certificates(tmp_path / "a" / "site-1")
    assert "expire at" in caplog.text


@pytest.mark.parametrize(
    ("names", "days", "words"),
    [
        ([], 365, "Set for example --names=syncer.example.org,site-1,site-2"),
        (["a", "b", "a"], 365, "Remove the duplicate"),
        (["Site"], 365, r"names\[0\]='Site' is not a name"),
        (["a", "../b"], 365, r"names\[1\]='../b' is not a name"),
        (["-a"], 365, "is not a name"),
        (["a..b"], 365, "is not a name"),
        ([""], 365, "is not a name"),
        (["a" * 65], 365, "at most 64"),
        (["authority"], 365, "Choose another"),
        (["a"], 0, "Choose for example days=365"),
        (["a"], 4000, "expected a whole number from 1 to 3650"),
        (["a"], True, "expected a whole number"),
    ],
)
def test_certificates_that_are_not_made(
    tmp_path: Path, names: list[str], days: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make_certificates(tmp_path / "new", names, days=days)
    assert os.listdir(tmp_path) == []


def test_existing_folders_are_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(FileExistsError, match="Choose a new folder, or remove this one"):
            make_certificates(out, ["a"])
    assert (tmp_path / "file").read_text() == "content"


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "record_issued", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_certificates(tmp_path / "new", ["a"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "damage", ["missing", "text", "a folder", "a pipe", "other key", "other authority", "no folder"]
)
def test_folders_that_cannot_be_read(folder: Path, tmp_path: Path, damage: str) -> None:
    site, other = tmp_path / "site", folder / "own" / "site-2"
    shutil.copytree(folder / "own" / "site-1", site)
    error, words = ValueError, "Copy the whole folder again"
    if damage == "missing":
        (site / "key.pem").unlink()
        error, words = FileNotFoundError, "Pass a folder that `fedpax certificates` made"
    elif damage == "text":
        (site / "certificate.pem").write_text("text")
        words = r"site/certificate\.pem is damaged, .* Copy the folder again from where"
    elif damage == "a folder":
        (site / "key.pem").unlink()
        (site / "key.pem").mkdir()
        error, words = OSError, r"site/key\.pem cannot be read .*, or copy the folder again"
    elif damage == "a pipe":
        (site / "certificate.pem").unlink()
        os.mkfifo(site / "certificate.pem")
        error, words = OSError, r"certificate\.pem cannot be read \(it is a pipe"
    elif damage == "other key":
        shutil.copy(other / "key.pem", site)
    elif damage == "other authority":
        shutil.copy(folder / "other" / "site-1" / "authority.pem", site)
    else:
        site = site / "key.pem"
        error, words = FileNotFoundError, "there is no file"
    with pytest.raises(error, match=words):
        connect("localhost:1", certificates=site)
    with pytest.raises(error, match=words):
        serve(tell_peer, "localhost:0", certificates=site)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_keys_that_other_users_can_use_are_refused(folder: Path, tmp_path: Path, mode: int) -> None:
    shutil.copytree(folder / "own", tmp_path / "own")
    for name in ("site-1", "authority"):
        key = tmp_path / "own" / name / "key.pem"
        key.chmod(mode)
        words = rf"key.pem has mode {mode:04o}, expected 0600: .* Run `chmod 600 {key}`"
        with pytest.raises(ValueError, match=words):
            if name == "authority":
                make_certificates(tmp_path / "new", ["a"], authority=key.parent)
            else:
                connect("localhost:1", certificates=key.parent)
        key.chmod(0o400)  # what ssh accepts
    read_certificates(tmp_path / "own" / "site-1")
    make_certificates(tmp_path / "new", ["a"], authority=tmp_path / "own" / "authority")


@pytest.mark.parametrize("name", ["site-1", "nothing"])
def test_authorities_that_cannot_sign(folder: Path, tmp_path: Path, name: str) -> None:
    authority = folder / "own" / name
    error = ValueError if authority.exists() else FileNotFoundError
    with pytest.raises(error, match=r"Pass this folder, or make a new authority|there is no file"):
        make_certificates(tmp_path / "new", ["a"], authority=authority)

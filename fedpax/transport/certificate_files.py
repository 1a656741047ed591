"""Files of certificates, requests and private keys: read with checks, written for their owner."""

import contextlib
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedpax.errors import ArgumentError
from fedpax.files import read_file

AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "authority.pem", "certificate.pem", "key.pem"
REQUEST_FILE = "request.pem"

Content = x509.Certificate | x509.CertificateSigningRequest | ec.EllipticCurvePrivateKey


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Make a folder of mode 0700 that appears as `out` when the block has ended without error."""
    if out.exists():
        raise FileExistsError(
            f"out={str(out)!r} exists, and certificates that are in use must not be replaced. "
            "Choose a new folder, or remove this one."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))  # mode 0700
    try:
        yield temporary
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_files(folder: Path, files: dict[str, Content]) -> None:
    """Write PEM files of mode 0600 into a folder, which is made if it is missing."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, value in files.items():
        if isinstance(value, ec.EllipticCurvePrivateKey):
            content = value.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        else:
            content = value.public_bytes(serialization.Encoding.PEM)
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)


def read_pem(path: Path) -> bytes:
    """Read a file that `fedpax certificates` made."""
    try:
        return read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        remedy = (
            "Pass a folder that `fedpax certificates` made for one name, such as "
            "certificates/site-1."
        )
        if (path.parent / REQUEST_FILE).exists():
            remedy = (
                f"Let the coordinator sign {path.parent / REQUEST_FILE} by `fedpax certificates "
                f"--sign`, and copy the files of the signed folder into {path.parent}."
            )
        raise FileNotFoundError(f"there is no file {path}. {remedy}") from None
    except OSError as error:
        raise OSError(
            f"{path} cannot be read ({error.strerror}), expected a file that `fedpax certificates` "
            "made. Let the user of this process read it, or copy the folder again."
        ) from None


def check_mode(path: Path) -> None:
    """Check that only its owner can use a private key. As in ssh, keys of another user pass."""
    if os.name == "nt":
        return
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.getuid() and mode & 0o077:
        raise ArgumentError(
            f"{path} has mode {mode:04o}, expected 0600: other users of this machine can read or "
            f"change this private key. Run `chmod 600 {shlex.quote(str(path))}`."
        )

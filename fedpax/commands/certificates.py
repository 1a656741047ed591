"""`fedpax certificates`: make the certificates of a syncer and its islands."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from fedpax.commands.parts.options import did_you_mean_flag, parse
from fedpax.errors import UsageError
from fedpax.extras import check_installed

# The flags of each way of running the command.
_FLAGS = {
    "names": ("names", "days", "authority"),
    "request": ("request", "name"),
    "sign": ("sign", "authority", "days", "replace"),
}


def certificates(arguments: Sequence[str]) -> int:
    """Write a folder with certificates, with a request, or with a signed certificate."""
    options, unknown = parse("certificates", arguments)
    if unknown:
        raise UsageError(
            f"`fedpax certificates` got {' '.join(unknown)!r}, expected --out, --names, "
            f"--days and --authority.{did_you_mean_flag(options, unknown[:1])} Run `fedpax --help` "
            "to see all flags."
        )
    action = next((flag for flag in ("request", "sign") if options[flag].value), "names")
    for flag in sorted({flag for known in _FLAGS.values() for flag in known}):
        if options[flag].present and flag not in _FLAGS[action]:
            raise UsageError(
                f"`fedpax certificates` got --{flag} with --{action}, expected only --out and "
                f"--{', --'.join(_FLAGS[action])}. Run `fedpax --help` to see the commands."
            )
    _check_required(options, action)
    check_installed("cryptography", "`fedpax certificates`")
    {"names": _make, "request": _request, "sign": _sign}[action](options)
    return 0


def _check_required(options: flags.FlagValues, action: str) -> None:
    if action == "request" and not (options.out and options.name):
        raise UsageError(
            "`fedpax certificates --request` needs the site's name and a folder for its key. Run "
            "for example `fedpax certificates --request --name=hospital-1 --out=me`."
        )
    if action == "sign" and not (options.out and options.authority):
        raise UsageError(
            "`fedpax certificates --sign` needs the authority's folder, and a folder to make. Run "
            "for example `fedpax certificates --sign=request.pem --authority=authority/authority "
            "--out=signed`."
        )
    if action == "names" and not (options.out and options.names):
        raise UsageError(
            "`fedpax certificates` needs a folder and names: the host name of the syncer, and a "
            "name for each site. Run for example `fedpax certificates --out=certificates "
            "--names=syncer.example.org,site-1,site-2`."
        )


def _make(options: flags.FlagValues) -> None:
    from fedpax.transport.certificates import AUTHORITY, make_certificates

    out = Path(options.out)
    names = [name.strip() for name in options.names.split(",")]
    expires = make_certificates(out, names, days=options.days, authority=options.authority)
    width = max(len(str(out / name)) for name in expires)
    for name, time in expires.items():
        print(f"{out / name!s:{width}}  expires {time:%Y-%m-%d %H:%M} UTC")
    authority = options.authority or out / AUTHORITY
    print(
        "\nCopy each folder to its site, over an encrypted connection, and pass it as "
        "--certificates.\n"
        "Keep the authority's folder off the sites: its key makes certificates. Add sites with\n"
        f"`fedpax certificates --out=NEW --names=NAME --authority={authority}`."
    )


def _request(options: flags.FlagValues) -> None:
    from fedpax.transport.authority import KEY_FILE, REQUEST_FILE
    from fedpax.transport.certificates import make_request

    out = Path(options.out)
    fingerprint = make_request(out, options.name)
    print(
        f"{out / REQUEST_FILE}  {options.name}  {fingerprint}\n\n"
        f"Send {out / REQUEST_FILE} to the coordinator, and compare the fingerprint with the one "
        "that the\n"
        f"coordinator sees. {out / KEY_FILE} stays here. Copy the two files that come back into "
        f"{out},\nand pass it as --certificates."
    )


def _sign(options: flags.FlagValues) -> None:
    from fedpax.transport.certificates import sign_request

    signed = sign_request(
        options.sign, options.authority, options.out, days=options.days, replace=options.replace
    )
    files = Path(shlex.quote(options.out)) / "*.pem"
    print(
        f"{options.out}  {signed.name}  expires {signed.expires:%Y-%m-%d %H:%M} UTC  "
        f"{signed.fingerprint}\n\n"
        "If the site states another fingerprint, do not send the folder. Else send it to the "
        f"site, which\nruns `cp {files} DIR`: DIR is the folder of its key."
    )

"""`fedpax certificates`: make the certificates of a syncer and its islands."""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from fedpax.commands.parts.options import did_you_mean_flag, parse
from fedpax.errors import UsageError


def certificates(arguments: Sequence[str]) -> int:
    """Write a folder with certificates, and print when they expire."""
    options, unknown = parse("certificates", arguments, define_flags, needs_exp=False)
    if unknown or options.exp:
        raise UsageError(
            f"`fedpax certificates` got {' '.join(unknown) or '--exp'!r}, expected --out, --names, "
            f"--days and --authority.{did_you_mean_flag(options, unknown[:1])} Run `fedpax --help` "
            "to see all flags."
        )
    if not options.out or not options.names:
        raise UsageError(
            "`fedpax certificates` needs a folder and names: the host name of the syncer, and a "
            "name for each site. Run for example `fedpax certificates --out=certificates "
            "--names=syncer.example.org,site-1,site-2`."
        )
    try:
        from fedpax.sites.transport.certificates import AUTHORITY, make_certificates
    except ImportError:
        raise UsageError(
            "certificates need the package cryptography, and it is not installed. Install it: "
            "pip install 'fedpax[sites]'."
        ) from None

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
    return 0


def define_flags(options: flags.FlagValues) -> None:
    """Define the flags of the command."""
    flags.DEFINE_string("out", None, "The folder to make.", flag_values=options)
    flags.DEFINE_string("names", None, "Names, separated by commas.", flag_values=options)
    flags.DEFINE_integer("days", 365, "Days until they expire.", flag_values=options)
    flags.DEFINE_string("authority", None, "An existing authority's folder.", flag_values=options)

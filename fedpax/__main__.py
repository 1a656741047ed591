"""The program `fedpax`, or `python -m fedpax`: Ctrl-C is handled from the first import on."""

import sys


def main() -> int:
    """Run the command line, or end with status 130 if Ctrl-C arrives while it is imported.

    Returns:
        The exit status, as in `fedpax.main.main`.
    """
    try:
        from fedpax.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("fedpax: SIGINT: stopped; there was nothing to save.\n")
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())

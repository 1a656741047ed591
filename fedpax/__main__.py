"""The program `fedpax`, or `python -m fedpax`: Ctrl-C is handled from the first import on."""

import sys


def main() -> int:
    """Run the command line, or end with status 130 if Ctrl-C arrives before it is handled there."""
    try:
        from fedpax.main import program

        return program()
    except KeyboardInterrupt:
        sys.stderr.write("fedpax: SIGINT: stopped; there was nothing to save.\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())

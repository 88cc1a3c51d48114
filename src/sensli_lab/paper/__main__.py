"""``python -m sensli_lab.paper list|run|show|report``."""

from __future__ import annotations

import argparse
import sys

from sensli.text.commands import run_command
from sensli_lab.paper import cli


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sensli_lab.paper")
    cli.add_commands(parser)
    return run_command(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())

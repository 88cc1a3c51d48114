"""``python -m sensli``: the command line, where the command itself is not on the path."""

from sensli.cli.start import main

raise SystemExit(main())

"""``python -m sensli.cli``."""

from sensli.cli.main import main

raise SystemExit(main())

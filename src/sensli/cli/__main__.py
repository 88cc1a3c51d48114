"""``python -m sensli.cli``."""

from sensli.cli.start import main

raise SystemExit(main())

"""The command line: what a person runs. Nothing imports from here."""

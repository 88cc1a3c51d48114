"""The command line: what a person runs, and what it shows in a terminal. Nothing else in the library imports from here."""

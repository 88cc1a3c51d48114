"""What an experiment is, as data: read strictly from a file, at the size of a preset, with every seed. Trains nothing."""

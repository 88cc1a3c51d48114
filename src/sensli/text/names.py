"""Names that a person types as arguments, and that the command line lists: here, so that its help needs nothing else."""

from __future__ import annotations

KINDS = ("conv", "linear", "block", "units")  # of sites
FORMS = ("relu", "residual", "parametric")  # of new layers
GROW = ("layers", "units", "both")  # what may grow
PER = {"parameters": "per parameter", "flops": "per FLOP"}  # what merits are compared by, and how a table says it
TRAINER_FILE = "sensli.json"  # beside the weights in every folder that a growing Trainer of Hugging Face saves
RESULTS = "results"  # the folder of the experiments
DEVICES = ("auto", "cpu", "cuda", "mps")  # of the experiments
TASKS = ("teacher", "spirals", "fashion", "vgg", "resnet", "text")  # of `sensli compare`
UNMEASURED = "none"  # the norm where a strategy takes places without measuring them: its values are no merits

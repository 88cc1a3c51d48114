"""Twenty networks in each of three arms, in parallel as Ray tasks; when started again, it computes only what is missing."""

from pathlib import Path

from sensli_lab.paper import runner, tables
from sensli_lab.paper.planning import RunOptions, parse, plan
from sensli_lab.paper.store import Store
from sensli_lab.work.on_ray import ray_place
from sensli_lab.work.pages import terminal_table

EXPERIMENT = {
    "name": "wide",
    "title": "FNN of width 8 on two spirals, one insertion",
    "shows": "grown, small, large",
    "runs": 20,
    "settings": {
        "network": {"kind": "fnn", "widths": [8]},
        "optimizer": {"lr": 0.1},
        "batch": 45,
        "epochs": 150,
    },
    "arms": {"grown": {"insert_at": [30]}, "small": {}, "large": {"network": {"widths": [8, 8]}}},
}

if __name__ == "__main__":
    one = plan(parse(EXPERIMENT, "this file"), "stated", RunOptions())
    store = Store(Path("results"))
    # ray_place("10.0.0.1:6379") would use a cluster; without an address, a Ray on this machine is started
    computed = runner.run_plans([one], store, place=ray_place())
    print(f"{computed} of {len(one.arms)} arms computed, the others were stored already")
    print(terminal_table(tables.measured_table(one, store.load_all(one))))

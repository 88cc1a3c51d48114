"""One line makes a LightningModule grow, in one process or several: python examples/12_lightning.py [devices]"""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from sensli import triggers
from sensli.integrations.lightning import GrowthCallback


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))

    def training_step(self, batch, index):
        x, y = batch
        return cross_entropy(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


devices = int(sys.argv[1]) if len(sys.argv) > 1 else 1
pl.seed_everything(0, verbose=False)
x = torch.randn(512, 2)
loader = DataLoader(TensorDataset(x, (torch.sin(3 * x[:, 0]) > x[:, 1]).long()), batch_size=64, shuffle=True)
growth = GrowthCallback(triggers.Every(5) & triggers.Limit(growths=2))
options = {"accelerator": "cpu", "devices": devices, "strategy": "ddp" if devices > 1 else "auto", "logger": False}
trainer = pl.Trainer(
    max_epochs=12, callbacks=[growth], enable_progress_bar=False, enable_model_summary=False, **options
)
trainer.fit(model := Classifier(), loader)
total = sum(p.double().sum().item() for p in model.parameters())
print(f"rank {trainer.global_rank}: {len(growth.history)} growths, sum of weights {total:.12f}\n{growth.history}")

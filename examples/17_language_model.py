"""A byte-level Llama that grows in the Trainer, first in depth, then in width, and is an ordinary model of its library afterwards:

python examples/17_language_model.py
"""

from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from sensli import triggers
from sensli.integrations.transformers import GrowthCallback

torch.manual_seed(0)
text = "".join(topics[name] for name in sorted(topics)).encode()[: 160 * 32]
windows = torch.tensor(list(text)).view(-1, 32)
lines = [{"input_ids": window, "labels": window} for window in windows[torch.randperm(len(windows))]]
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))


def depth_then_width(merits):
    """A block in the middle while there are two; then hidden units in all blocks, which the configuration can state."""
    kind = "block" if model.config.num_hidden_layers == 2 else "units"
    places = [merit for merit in merits if merit.site.kind == kind]
    return places[len(places) // 2]


what = {"what": "both", "where": ["block", "*.mlp.gate_proj"], "units": 0.5, "select": depth_then_width}
growth = GrowthCallback(triggers.At(1, 2), batches=1, **what)
loop = {"per_device_train_batch_size": 16, "learning_rate": 5e-3, "num_train_epochs": 5, "eval_strategy": "epoch"}
quiet = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
args = TrainingArguments(output_dir="run", **loop, **quiet)
trainer = Trainer(model, args, train_dataset=lines[:128], eval_dataset=lines[128:], callbacks=[growth])
trainer.train()
model.save_pretrained("grown")
again = AutoModelForCausalLM.from_pretrained("grown").config  # needs no sensli
print(f"{growth.history}\n{again.num_hidden_layers} blocks of {again.intermediate_size} hidden units")

"""One entry in callbacks= makes a language model grow in the Trainer, in one process or several:

python examples/13_hugging_face.py, or torchrun --nproc-per-node 2 examples/13_hugging_face.py; a killed run resumes when started again
"""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from sensli import triggers
from sensli.integrations.transformers import GrowthCallback

torch.manual_seed(0)
tokens = torch.randint(3, 32, (256, 12))
tokens[:, 6:] = tokens[:, :6].flip(1)  # the second half of a line is its first half backwards
data = [{"input_ids": row, "labels": row} for row in tokens]
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 32}

model = LlamaForCausalLM(LlamaConfig(**sizes))
growth = GrowthCallback(triggers.Every(2) & triggers.Limit(growths=2), what="layers")
args = TrainingArguments(
    output_dir="grown",
    num_train_epochs=6,
    per_device_train_batch_size=32,
    learning_rate=3e-3,
    logging_strategy="epoch",
    save_strategy="epoch",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
last = get_last_checkpoint("grown") if os.path.isdir("grown") else None
trainer = Trainer(model, args, train_dataset=data, callbacks=[growth])
trainer.train(resume_from_checkpoint=last)
total = sum(p.double().sum().item() for p in model.parameters())
print(
    f"rank {args.process_index}: {model.config.num_hidden_layers} blocks, sum of weights {total:.12f}\n{growth.history}"
)

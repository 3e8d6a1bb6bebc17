"""What other libraries call our options; how a message names one of ours is in `core/option_names.py`."""

from __future__ import annotations

from fednorms.core.option_names import command_line as command_line
from fednorms.core.option_names import flag as flag
from fednorms.core.option_names import key as key
from fednorms.core.option_names import option as option
from fednorms.core.option_names import recipe_file as recipe_file
from fednorms.core.option_names import setting as setting

# What other libraries call our options.
ELSEWHERE = {
    "algorithm": "method",
    "aggregator": "method",
    "strategy": "method",
    "dataset": "federation",
    "net": "model",
    "network": "model",
    "arch": "model",
    "num_rounds": "rounds",
    "global_rounds": "rounds",
    "communication_rounds": "rounds",
    "learning_rate": "lr",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "bs": "batch_size",
    "batchsize": "batch_size",
    "local_batch_size": "batch_size",
    "optim": "optimizer",
    "scheduler": "schedule",
    "lr_schedule": "schedule",
    "wd": "weight_decay",
    "l2": "weight_decay",
    "warmup_rounds": "warmup",
    "gpu": "device",
    "image_size": "size",
    "callbacks": "callback",
    "output": "out",
    "out_dir": "out",
    "output_dir": "out",
    "num_workers": "workers",
}

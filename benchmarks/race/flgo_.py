"""The job in FLGo."""

import os
import sys
from pathlib import Path

import flgo
import flgo.algorithm.fedavg as fedavg
import numpy as np
from flgo.benchmark.partition import BasicPartitioner
from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe
from job import given
from torch.utils.data import DataLoader

job, record = given()
CONFIG = """
import torch
from job import Job
job = Job({folder!r})
x, y = (torch.cat(both) for both in zip(*job.clients))
train_data, test_data = torch.utils.data.TensorDataset(x, y), torch.utils.data.TensorDataset(*job.test)
get_model = job.model
"""


class ByClient(BasicPartitioner):
    def __init__(self):
        self.num_clients = job.n

    def __call__(self, data):
        ends = np.cumsum([len(y) for _, y in job.clients])
        return [list(range(end - len(y), end)) for end, (_, y) in zip(ends, job.clients, strict=True)]


class Recorded:
    """FLGo's FedAvg, recorded, with batches in the order of the data."""

    class Server(fedavg.Server):
        def iterate(self):
            updated = super().iterate()
            record.round(self.model.model.state_dict())
            return updated

    class Client(fedavg.Client):
        def set_data(self, data, flag="train"):
            super().set_data(data, flag)
            if flag == "train":
                self._train_loader = DataLoader(data, batch_size=int(self.option["batch_size"]))


FromDatasetPipe.TaskDataset.__getitems__ = lambda self, rows: [self[row] for row in rows]  # torch 2.15 asks for it
os.chdir(record.folder)
sys.path.insert(0, os.getcwd())
sys.argv = sys.argv[:1]  # FLGo reads options from the command line
Path("config_of_job.py").write_text(CONFIG.format(folder=str(job.folder)))
benchmark = flgo.gen_benchmark_from_file("race_benchmark", "config_of_job.py")
__import__(benchmark)
sys.modules[benchmark].visualize = lambda *_: None  # a picture of the partition, which takes minutes
flgo.gen_task_by_(sys.modules[benchmark], ByClient(), "task")
option = {
    "num_rounds": job.rounds,
    "num_epochs": 1,
    "learning_rate": job.lr,
    "batch_size": float(job.batch),
    "sample": "full",
    "aggregate": "other",
    "proportion": 1.0,
    "train_holdout": 0.0,
    "eval_interval": -1,
    "gpu": [0] if job.device == "cuda" else [],
    "torch_num_threads": int(os.environ["OMP_NUM_THREADS"]),
}
flgo.init("task", Recorded, option).run()

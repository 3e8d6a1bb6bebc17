"""The job in fluke."""

import torch
from fluke import FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver
from job import given

job, record = given()


class Clock(FederationObserver):
    def end_round(self, round):
        record.round(algorithm.server.model.state_dict())


FlukeENV().set_device(job.device)
FlukeENV().set_eval_cfg(post_fit=False, pre_fit=False, server=False, locals=False)
optimizer = OptimizerConfigurator({"name": "SGD", "lr": job.lr}, {"name": "StepLR", "step_size": 1, "gamma": 1})
loaders = [
    FastDataLoader(x, y, num_labels=10, batch_size=job.batch, shuffle=False, transforms=None) for x, y in job.clients
]
clients = [Client(k, data, None, optimizer, torch.nn.CrossEntropyLoss(), 1) for k, data in enumerate(loaders)]
server = Server(job.model(), None, clients, weighted=True)
algorithm = CentralizedFL(job.n, None, None, clients, server)
algorithm.set_callbacks(Clock())
algorithm.run(job.rounds, 1.0)

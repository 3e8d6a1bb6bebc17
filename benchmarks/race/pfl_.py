"""The job in pfl-research."""

import torch
from job import given
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn

job, record = given()


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = job.model()

    def loss(self, x, y, eval=False):
        self.train(not eval)
        return nn.functional.cross_entropy(self.inner(x), y)

    def metrics(self, x, y, eval=True):
        return {}


class Clock(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        record.round(model.pytorch_model.inner.state_dict())
        return False, Metrics()


model = Wrapped()
data = {str(k): list(pair) for k, pair in enumerate(job.clients)}
users = FederatedDataset(
    lambda name: Dataset(raw_data=data[name], user_id=name), get_user_sampler("minimize_reuse", list(data))
)
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=job.rounds, evaluation_frequency=10**6, train_cohort_size=job.n, val_cohort_size=None
    ),
    backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByDatapoints()]),
    model=PyTorchModel(
        model=model,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    ),
    model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=job.lr, local_batch_size=job.batch),
    model_eval_params=NNEvalHyperParams(local_batch_size=1000),
    callbacks=[Clock()],
    send_metrics_to_platform=False,
)

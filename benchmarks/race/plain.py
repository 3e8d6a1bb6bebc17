"""The job as one writes it by hand, the reference of all others: one model, a weighted mean of state dicts."""

import copy

from job import given

job, record = given()
model = job.model()
state = copy.deepcopy(model.state_dict())
total = sum(len(y) for _, y in job.clients)
for _ in range(job.rounds):
    mean = {k: v.double() * 0 for k, v in state.items()}
    for k, (_, y) in enumerate(job.clients):
        model.load_state_dict(state)
        job.train(model, k)
        for name, v in model.state_dict().items():
            mean[name] += v.double() * (len(y) / total)
    state = {k: v.to(state[k].dtype) for k, v in mean.items()}
    record.round(state)

"""The job in fednorms; images are put where the plan of the first round finds them in the job's order."""

import os

import torch
from job import given

import fednorms as fn
from fednorms.core.batches import batch_plan
from fednorms.core.noise import seed_of
from fednorms.core.part import Phase
from fednorms.data import Preprocessing


def placed(name, x, y):
    seed = seed_of("data", 0, 0, name, 0)
    plan, _ = batch_plan(len(y), fn.Training(batch_size=job.batch), Phase(), seed)
    at = torch.cat(plan).argsort()
    return fn.Split(x[at], y[at])


job, record = given()
if __name__ == "__main__":
    data = [(x.cpu(), y.cpu()) for x, y in job.clients]
    sites = [fn.Site(f"c{k:03d}", "one", placed(f"c{k:03d}", x, y)) for k, (x, y) in enumerate(data)]
    federation = fn.Federation("race", sites, [str(c) for c in range(10)], Preprocessing())
    engine = os.environ.get("ENGINE", "loop")
    fn.run(
        "fedavg",
        federation,
        job.model(),
        job.rounds,
        lr=job.lr,
        batch_size=job.batch,
        recipe=fn.Recipe(
            engine=engine, threads=1 if engine == "workers" else torch.get_num_threads(), device=job.device
        ),
        callback=lambda event: record.round(event.state.model),
        progress=False,
    )

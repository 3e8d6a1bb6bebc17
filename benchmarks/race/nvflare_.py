"""The job in NVFlare's simulator: this file is both the job and, given a client's number, the client's script."""

import sys
from pathlib import Path

import torch
from job import Job, Record


def client(folder, out):
    import nvflare.client as flare

    job = Job(folder)
    model = job.model()
    flare.init()
    k = int(flare.get_site_name().rpartition("-")[2]) - 1
    while flare.is_running():
        received = flare.receive()
        if k == 0 and received.current_round:  # what arrives is the server's model after the round before
            Record(out).round({name: torch.as_tensor(v) for name, v in received.params.items()})
        model.load_state_dict({name: torch.as_tensor(v) for name, v in received.params.items()})
        job.train(model, k)
        flare.send(flare.FLModel(params=model.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": len(job.clients[k][1])}))


def server(folder, out):
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    job, start = Job(folder), Path(out) / "start.pt"
    torch.save(job.model().state_dict(), start)  # the recipe makes the model anew from its class
    Record(out)
    recipe = FedAvgRecipe(
        model=job.model(),
        initial_ckpt=str(start),
        min_clients=job.n,
        num_rounds=job.rounds,
        train_script=__file__,
        train_args=f"client {folder} {out}",
        server_expected_format="pytorch",
    )
    recipe.execute(SimEnv(num_clients=job.n, num_threads=min(job.n, 10), workspace_root=str(Path(out) / "workspace")))
    last = next((Path(out) / "workspace").rglob("FL_global_model.pt"))
    Record(out).round(torch.load(last, weights_only=False)["model"])


if __name__ == "__main__":
    (client if sys.argv[1] == "client" else server)(*sys.argv[-2:])

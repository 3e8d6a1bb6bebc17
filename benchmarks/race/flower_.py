"""The job in Flower's simulation, with Ray and one core per client."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import given

job, record = given()
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message, context):
    torch.set_num_threads(1)
    k = int(context.node_config["partition-id"])
    model = job.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    job.train(model, k)
    found = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(job.clients[k][1])}),
    }
    return Message(content=RecordDict(found), reply_to=message)


@server_app.main()
def main(grid, context):
    def after(number, arrays):
        if number:
            record.round(arrays.to_torch_state_dict())

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=job.n, min_available_nodes=job.n)
    strategy.start(grid, ArrayRecord(job.model().state_dict()), job.rounds, evaluate_fn=after)


run_simulation(server_app, client_app, job.n, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})

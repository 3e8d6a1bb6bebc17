"""How many bytes a round takes on the wire, per method and site: every object of the messages that Flower would send.

python benchmarks/flower_messages.py [METHOD ...]
"""

import sys

from flwr.app import Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.explain.deployable import obstacle
from fednorms.flower import messages
from fednorms.methods.registry import load_all, method, names
from fednorms.runs.recipe import Recipe
from fednorms.runs.session import Session


def wire_bytes(content: RecordDict) -> int:
    message = Message(content, 1, "train")
    return sum(len(thing.deflate()) for thing in get_all_nested_objects(message).values())


def sizes(text: str) -> tuple[int, int, int, int]:
    """Tensor bytes and wire bytes, down and up, of the second round at one site."""
    recipe = Recipe(method=text, rounds=2, threads=1, data={"size": 16}, training={"steps": 1, "epochs": 1})
    session = Session.open(recipe)
    task, engine = session.task, session.engine
    state = engine.setup(initial_state(task))
    state = server_update(task, state, engine.train(broadcast(task, state), engine.clients).uploads)
    sent = broadcast(task, state)
    model = sent.model.pick(task.net.exchanged)
    upload = engine.train(sent, engine.clients[:1]).uploads[0]
    down = messages.pack_broadcast(sent, model, type(model)(), {"accepted": 0, "agreement": "x" * 200, "score": False})
    up = messages.pack_upload(upload, {"site": upload.client, "kept": 1})
    tensors = [model.nbytes() + sum(t.nbytes() for t in sent.parts.values())]
    tensors.append(upload.model.nbytes() + sum(t.nbytes() for t in upload.parts.values()))
    return tensors[0], wire_bytes(down), tensors[1], wire_bytes(up)


def main() -> None:
    load_all()
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    chosen = sys.argv[1:] or [n for n in names() if not obstacle(method(n)) and n != "fednorm"]
    print(f"{'method':<22}{'tensors down':>14}{'wire down':>12}{'tensors up':>14}{'wire up':>12}   bytes, cnn-small")
    for text in chosen:
        print(f"{text:<22}" + "".join(f"{n:>{w},}" for n, w in zip(sizes(text), (14, 12, 14, 12), strict=True)))


if __name__ == "__main__":
    main()

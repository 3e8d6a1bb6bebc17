"""FedHEAL's server, entry by entry, over flat lists of numbers; all clients take part in every round."""

from __future__ import annotations


class Server:
    """`model` is a list of numbers; `tensors` are the slices whose lengths are summed."""

    def __init__(self, model, tensors, clients, tau, beta):
        self.model, self.tensors, self.tau, self.beta = list(model), tensors, tau, beta
        self.history = [[] for _ in range(clients)]  # per client and round, whether each entry rose
        self.weight, self.change = [1 / clients] * clients, [0.0] * clients

    def round(self, models):
        updates = [[b - a for a, b in zip(self.model, sent, strict=True)] for sent in models]
        masks = [self.mask(k, u) for k, u in enumerate(updates)]
        far = [
            sum(sum((u[i] * m[i]) ** 2 for i in part) ** 0.5 for part in self.tensors)
            for u, m in zip(updates, masks, strict=True)
        ]
        for k, d in enumerate(far):
            self.change[k] = (1 - self.beta) * self.change[k] + self.beta * d / sum(far)
            self.weight[k] += self.change[k]
        for i in range(len(self.model)):
            total = sum(w * m[i] for w, m in zip(self.weight, masks, strict=True))
            if total:
                step = sum(w * m[i] * u[i] for w, m, u in zip(self.weight, masks, updates, strict=True))
                self.model[i] += step / total
        for k, u in enumerate(updates):
            self.history[k].append([v > 0 for v in u])

    def mask(self, k, update):
        if not self.history[k]:
            return [1] * len(update)
        out = []
        for i, v in enumerate(update):
            rose = sum(past[i] for past in self.history[k]) / len(self.history[k])
            out.append(int((rose if v > 0 else 1 - rose) > self.tau))
        return out

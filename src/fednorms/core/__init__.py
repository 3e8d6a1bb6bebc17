"""The mathematics of a round: trees of tensors, parts and their hooks, a client's round and the server's."""

"""fednorms: federated learning when clients differ."""

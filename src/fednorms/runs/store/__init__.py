"""Files of a run: atomic writes, packed states, checkpoints, and the run directory."""

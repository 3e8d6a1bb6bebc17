"""Analyses of the papers' figures: functions of plain tensors, and what they find in a run."""

"""Tracking: the rounds of a run in TensorBoard, Weights & Biases or MLflow."""

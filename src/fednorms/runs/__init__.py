"""A run on disk: its recipe, its directory, its checkpoints, and the driver that starts and resumes it."""

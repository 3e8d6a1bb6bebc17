"""Published tables and figures as files: read, run, and compared with what the papers report."""

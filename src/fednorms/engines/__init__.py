"""Engines: where clients run, and where their states are kept."""

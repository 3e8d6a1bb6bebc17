"""After training: open a run, evaluate it again, predict, export, load, and adapt it to a new site."""

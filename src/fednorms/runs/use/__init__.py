"""After training: open a run, test it again, predict, export, load, and adapt it to a new site."""

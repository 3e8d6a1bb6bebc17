"""Where the clients' functions run, and where their states live."""

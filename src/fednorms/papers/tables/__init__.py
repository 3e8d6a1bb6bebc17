"""Published tables and figures: their protocols and numbers as files, and what this library makes of them."""

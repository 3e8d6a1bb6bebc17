"""`python -m fednorms` is the command `fednorms`."""

import sys

from fednorms.cli import main

if __name__ == "__main__":
    sys.exit(main())

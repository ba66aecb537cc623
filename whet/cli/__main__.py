"""`python -m whet.cli` is `whet`; torchrun -m whet.cli starts one in each process."""

import sys

from whet.cli import main

if __name__ == "__main__":
    sys.exit(main())

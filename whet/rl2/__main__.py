"""`python -m whet.rl2`; torchrun -m whet.rl2 starts one in each process."""

import sys

from whet.rl2.command import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m whet.trl` is TRL's command line."""

import sys

from whet.trl.command import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m eformer` is the command `eformer`."""

import sys

from eformer.cli import main

if __name__ == "__main__":
    sys.exit(main())

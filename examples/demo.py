"""A real sentence encoder in INT8, NF4 and ternary: `eformer demo`, which `make demo` runs.

The model, plain JAX, is `minilm.py` beside this file; `eformer/cli/_demo.py` quantizes, saves and measures it.
"""

import sys

from eformer.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))

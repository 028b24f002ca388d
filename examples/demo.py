"""A real sentence encoder in INT8, NF4 and ternary: `eformer demo`, which `make demo` runs.

The model is plain JAX, `eformer/cli/_minilm.py`; what quantizes, saves and measures it is `eformer/cli/_demo.py`.
"""

import sys

from eformer.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))

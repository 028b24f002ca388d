"""A language model and a sentence encoder in several formats: `eformer demo`, which `make demo` runs.

The models, plain JAX, are `llm` and `minilm.py` beside this file; `eformer/cli/_demo.py` quantizes and measures them.
"""

import sys

from eformer.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))

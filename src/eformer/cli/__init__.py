"""The command line: `eformer quantize`, `inspect`, `compare`, `convert`, `bench`, `demo` and `completion`."""

from ._main import main as main

"""The command line: `eformer quantize`, `inspect`, `compare`, `convert`, `bench` and `demo`."""

from ._main import main as main

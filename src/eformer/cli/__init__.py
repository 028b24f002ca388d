"""The command line: `eformer quantize`, `inspect`, `compare`, `convert`, `bench`, `demo` and `completion`."""

from eformer._src.cli.main import main as main
from eformer._src.public import name_publicly as _name_publicly

_name_publicly(globals())

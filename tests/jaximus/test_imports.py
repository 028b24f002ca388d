"""What importing the package does, and which module may import which."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import eformer

ROOT = Path(eformer.__file__).parent
MODULES = ["eformer", *sorted(m.name for m in pkgutil.walk_packages([str(ROOT)], "eformer."))]
SOURCES = sorted(ROOT.rglob("*.py"))
IMPLEMENTATION = [path for path in (ROOT / "_src").rglob("*.py") if path != ROOT / "_src" / "__init__.py"]
PUBLIC = [path for path in ROOT.glob("*/**/*.py") if "_src" not in path.parts]

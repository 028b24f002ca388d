"""What the site adds to the pages in `docs`: the README as its first page, other pages of the repository, and pictures.

Links between pages of the repository become links of the site. The site has no source files: a link to one becomes its
name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES |= {"benchmarks/README.md": "benchmarks-readme.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)#]*)(#[^)]*)?\)")


def slug(text: str, separator: str) -> str:
    """The anchor of a heading, as `tests/test_docs.py` and Markdown viewers derive it."""
    del separator
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def on_config(config: Any) -> Any:
    config["mdx_configs"]["toc"]["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for picture in sorted((ROOT / "benchmarks/results").glob("*.svg")):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    own = page.file.src_uri
    source = next((name for name, uri in PAGES.items() if uri == own), f"docs/{own}")
    return LINK.sub(lambda found: _link(found, source), markdown)


def _link(found: re.Match[str], source: str) -> str:
    picture, text, target, anchor = found[1], found[2], found[3], found[4] or ""
    if not target:
        return found[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path in PAGES:
        uri = PAGES[path]
    elif path.startswith("docs/"):
        uri = path.removeprefix("docs/")
    elif picture:
        uri = f"pictures/{posixpath.basename(path)}"
    else:
        return text if text.startswith("`") or "/" not in text else f"`{text}`"
    return f"{picture}[{text}]({uri}{anchor})"

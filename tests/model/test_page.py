"""The page of a report: what is in it, and what a browser makes of it."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from eformer._src.model.report.distance import Distance
from eformer._src.model.report.histogram import Histogram
from eformer._src.model.report.plots import group_of, layer_of, natural_order
from eformer._src.model.report.table import in_percent
from eformer._src.svg import shorten, ticks
from eformer._src.text import in_bytes
from eformer.model import Leaf, Report

from .browser import Page, chromium, find_chromium

ODD = "layers.0.<script>alert('&')</script>.a_path_that_is_longer_than_the_screen_of_any_telephone_is_wide.kernel"
LONG = Distance(4.0, 4.0, 0.04, 3.9, 0.3)


def leaf(path: str, format: str = "nf4", distance: Distance | None = LONG, size: int = 4096) -> Leaf:
    quantized = format != "float32"
    return Leaf(
        path, (64, size // 64), "float32", format, quantized, False, 4 * size, size if quantized else 4 * size, distance
    )


def layered(layers: int) -> Report:
    kinds = [
        ("attention.kernel", "nf4"),
        ("mlp.kernel", "int8"),
        ("out.kernel", "ternary/binary"),
        ("norm.scale", "float32"),
    ]
    found = [leaf(f"layers.{i}.{kind}", form) for i in range(layers) for kind, form in kinds]
    counts = Histogram(
        "layers.0.mlp.kernel", tuple(i / 8 - 1 for i in range(17)), tuple(range(16)), tuple(range(16, 0, -1))
    )
    return Report(tuple(found), ("kernal=nf4",), counts)


REPORTS = {
    "empty": Report(()),
    "small": Report((leaf("kernel"), leaf("bias", "float32", Distance()))),
    "layers": layered(12),
    "deep": layered(80),
    "odd": Report(
        (
            leaf(ODD, distance=Distance(1.0, 1.0, 0.1, 1.0, 0.5, 3, 128)),
            leaf("infinite", distance=Distance(0.0, 1.0, 1.0, 0.0, 1.0)),
            leaf("exact", distance=Distance(1.0, 1.0, 0.0, 1.0)),
            leaf("freed", "int8", None),
            leaf("nothing", size=0),
            leaf("huge", "int8", size=64 * 10**10),
        ),
        unused_rules=("<b>=nf4",),
    ),
}
every_report = pytest.mark.parametrize("name", REPORTS)


class Tags(HTMLParser):
    """The tags with their attributes; fails where one is not closed."""

    EMPTY = ("meta", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open[-1:] not in (["style"], ["script"]) else ""


@pytest.fixture
def written(name: str, tmp_path):
    path = REPORTS[name].to_html(tmp_path / "report.html", title="A <b>model</b> & its report")
    return path.read_text("utf-8")


@every_report
def test_the_page_is_whole_and_alone(written):
    page = Tags(written)
    assert "A <b>model</b> & its report" in page.text
    links = [value for _, attributes in page.found for key, value in attributes.items() if key in ("src", "href")]
    assert links == ["data:,"]
    assert not re.search(r"https?:|url\(|@import|fetch\(|<script>alert", written)
    assert "nan" not in re.sub(r"<script>.*?</script>", "", written, flags=re.DOTALL).lower().replace("nan or", "")


@every_report
def test_every_leaf_has_a_row(written, name):
    rows = written.split("<tbody>")[1].count("<tr>")
    assert rows == len(REPORTS[name].leaves)


@pytest.mark.parametrize("name", ["layers"])
def test_what_the_page_says(written):
    text = Tags(written).text
    assert "36 of 48 arrays quantized to nf4, int8, ternary/binary" in text
    assert "relative error, %" in text
    assert "bytes stored, kB" in text
    assert "share of the values, %" in text
    assert "The rule kernal=nf4 matched nothing" in text
    assert written.count("<figure>") == 3
    assert written.count('class="m0"') == 12 + 1  # a mark for each leaf, and one in the legend


@pytest.mark.parametrize("name", ["odd"])
def test_what_is_wrong_is_said(written):
    text = Tags(written).text
    assert f"{ODD} has NaN or infinite values: 3 before, 128 after" in text
    assert "The values of 1 quantized array could not be compared" in text
    assert "The rule <b>=nf4 matched nothing" in text


# --- in a browser ---


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium is installed to look at the page with")
    with chromium(program, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("name", ["empty", "layers", "odd"])
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(browser: Page, name: str, width: int, scheme: str, tmp_path):
    path = REPORTS[name].to_html(tmp_path / "report.html")
    browser.requests.clear()
    browser.open(path, width=width, height=900, scheme=scheme)
    assert browser.problems == []
    assert browser.requests == [path.as_uri()]
    wide = (
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert browser.value(wide) == 0
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 3 * 128) == (scheme == "dark")


def test_a_browser_would_have_told(browser: Page, tmp_path):
    """The test above can fail: of a page with these faults, each is seen."""
    path = tmp_path / "faults.html"
    path.write_text("<p style='width: 2000px'>wide</p><img src='missing.png'><script>nowhere()</script>")
    browser.requests.clear()
    browser.open(path, width=390, height=900, scheme="light")
    problems, browser.problems = browser.problems, []
    assert any("Uncaught" in problem for problem in problems)
    assert browser.requests == [path.as_uri(), (tmp_path / "missing.png").as_uri()]
    assert not browser.value("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    ("column", "clicks", "expected"),
    [
        (0, 1, ["exact", "freed"]),
        (0, 2, ["nothing", ODD]),
        (3, 1, ["huge", "infinite"]),
        (6, 0, ["infinite", ODD]),
        (6, 1, ["exact", "nothing"]),  # it was sorted by errors already, so this is the other way
    ],
)
def test_headings_sort(browser: Page, column: int, clicks: int, expected: list[str], tmp_path):
    browser.open(REPORTS["odd"].to_html(tmp_path / "report.html"), width=1400, height=900, scheme="light")
    browser.value(f"for (let i = 0; i < {clicks}; i++) document.querySelectorAll('th button')[{column}].click()")
    first = browser.value("[...document.querySelectorAll('tbody tr')].map(row => row.cells[0].textContent).slice(0, 2)")
    assert first == expected


# --- its parts ---


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (73_728, "73.7 kB"), (999_499, "999 kB"), (999_600, "1.00 MB")],
)
def test_bytes(count, text):
    assert in_bytes(count) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.00%"), (0.0953, "9.53%"), (3e-7, "3.0e-05%"), (math.inf, "inf"), (None, "?"), (2.0, "200.00%")],
)
def test_percent(share, text):
    assert in_percent(share) == text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-3, 3, [-2, 0, 2]),
        (5, 5, [5]),
        (0, 1e-320, [0]),
    ],
    ids=str,
)
def test_ticks(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_paths_in_plots():
    paths = ["layers.10.w", "layers.2.w", "head"]
    assert sorted(paths, key=natural_order) == ["head", "layers.2.w", "layers.10.w"]
    assert [group_of(path) for path in paths] == ["layers.*.w", "layers.*.w", "head"]
    assert [layer_of(path) for path in [*paths, "Dense_3.kernel", "conv2d.w"]] == ["10", "2", None, "3", None]
    assert shorten("abcdefghij", 7) == "ab…ghij"
    assert shorten("abc", 3) == "abc"

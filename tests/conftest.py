"""Strict settings for every test. Warnings are errors too: see `filterwarnings` in pyproject.toml."""

import os
from importlib.metadata import version

# Before JAX is imported: eight devices on the host, so that sharding is real; and what makes XLA compile small programs
# faster, unless flags are given: most of a test run is compiling. JAX 0.10 has two ways to make code of a fusion.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", str("XLA_FLAGS" not in os.environ))
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS",
    "--xla_cpu_parallel_codegen_split_count=1"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)

import ctypes
import gc
import itertools
import math
import re
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import pytest

from eformer._src.kernels import cpu

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--half", type=int, choices=(1, 2), help="of each test, run every other value of a parameter")
    parser.addoption("--whole", action="append", default=[], metavar="FILE", help="with --half: all tests of this file")
    parser.addoption("--most-memory", type=float, metavar="GB", help="fail if a worker has taken more than this")


# Set by what tests the native core: "1", or the best instruction set that the core must offer. It is an error then that
# there is no core, or that a test is skipped for want of it.
NEED_CORE = os.environ.get("EFORMER_NEED_CORE", "")


def pytest_configure() -> None:
    if NEED_CORE and not (cpu.is_available() and NEED_CORE in ("1", cpu.instruction_sets()[0])):
        found = f"offers {', '.join(cpu.instruction_sets())}" if cpu.is_available() else "is not installed"
        raise pytest.UsageError(f"EFORMER_NEED_CORE={NEED_CORE}, and the native core {found}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    if NEED_CORE and report.skipped and re.search(r"\bcore\b", reason):
        report.outcome, report.longrepr = "failed", f"{item.nodeid}, with EFORMER_NEED_CORE={NEED_CORE}: {reason}"
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose a half of the tests, by the parameter nearest to each. What has none is in both halves."""
    half, whole = config.getoption("--half"), config.getoption("--whole")
    if half is None:
        return
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    chosen = {
        item
        for name, cases in tests.items()
        for item in (cases if name.partition("::")[0] in whole else half_of(cases, half))
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def half_of(cases: list[pytest.Item], half: int) -> list[pytest.Item]:
    places = [getattr(case, "callspec", None) and case.callspec.indices for case in cases]
    for name in reversed(places[0] or ()):
        if len({place[name] for place in places}) > 1:
            return [case for case, place in zip(cases, places, strict=True) if place[name] % 2 == half - 1]
    return cases


# --- memory ---

# JAX keeps what it traced and compiled: a worker would grow to several GB. It forgets that whenever it has grown by as
# much as this since it last did, which costs little, as the next tests are others.
GROWTH = 2e8  # bytes
MOST = 1.5e9  # bytes that a worker should take at most, so that `-n auto` runs on a laptop with many cores
_least = math.inf  # bytes that the worker had when it began, or had forgotten last
_peaks: dict[str, int] = {}  # by worker


def pytest_runtest_teardown() -> None:
    global _least
    if resident() > _least + GROWTH:
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":  # else freed memory stays with the process
            ctypes.CDLL(None).malloc_trim(0)
        _least = resident()
    _least = min(_least, resident())


def resident() -> int:
    """The bytes of memory that this process has now, or the most that it has had where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak()


def peak() -> int:
    """The most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Called where the tests are handed out, when a worker of pytest-xdist has ended."""
    _peaks[node.gateway.id] = getattr(node, "workeroutput", {}).get("peak", 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    config, most = session.config, session.config.getoption("most_memory")
    if hasattr(config, "workeroutput"):
        config.workeroutput["peak"] = peak()
    elif most and max(_peaks.values(), default=peak()) > most * 1e9 and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


# What some tests need and no package of the extra `test` brings: the word in their reasons, and how to get it.
MISSING = {
    "torch": "pip install torch (PyTorch; tests compare files with what it reads)",
    "Chromium": "apt-get install chromium (a browser; tests open our pages in it)",
    "native core": "a C++ compiler, apt-get install g++, and install again",
    "simde": "apt-get install libsimde-dev (the AVX-512 code is compiled without such a processor)",
    "aarch64": "apt-get install g++-aarch64-linux-gnu (the ARM64 code is compiled)",
}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for word, how in MISSING.items():
        if count := sum(word.lower() in reason.lower() for reason in reasons):
            terminalreporter.write_line(f"{count} skipped for want of {word}. To run them: {how}")
    worker, most = max(_peaks.items(), key=lambda each: each[1], default=("this process", peak()))
    line = f"{worker} took the most memory: {most / 1e9:.2f} GB; it should take {MOST / 1e9:g} GB at most"
    terminalreporter.write_line(line, red=most > MOST)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking the modules and the thousands of test items at each full collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def getkey() -> Callable[[], jax.Array]:
    """A function that gives a new random key at each call, the same ones in every run of the test."""
    seeds = itertools.count()
    return lambda: jax.random.key(next(seeds))


@pytest.fixture
def optimized() -> Iterator[None]:
    """For tests that ask how a compiled program rounds or what it allocates: XLA optimizes, as it does for users."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

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

import gc
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator

import jax
import pytest

from eformer.kernels import cpu

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--half", type=int, choices=(1, 2), help="of each test, run every other value of a parameter")


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
    half = config.getoption("--half")
    if half is None:
        return
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    chosen = {item for cases in tests.values() for item in half_of(cases, half)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def half_of(cases: list[pytest.Item], half: int) -> list[pytest.Item]:
    places = [getattr(case, "callspec", None) and case.callspec.indices for case in cases]
    for name in reversed(places[0] or ()):
        if len({place[name] for place in places}) > 1:
            return [case for case, place in zip(cases, places, strict=True) if place[name] % 2 == half - 1]
    return cases


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

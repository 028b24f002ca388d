import pytest


def pytest_addoption(parser):
    parser.addoption("--programs", type=int, default=100, metavar="COUNT", help="random programs to compare with dense")


def pytest_generate_tests(metafunc):
    if "first" in metafunc.fixturenames:
        metafunc.parametrize("first", range(0, metafunc.config.getoption("--programs"), 20))


@pytest.fixture(autouse=True)
def _all_compile_quickly(compile_quickly):
    """All values here are exact, in whatever order they are computed."""

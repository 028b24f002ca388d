def pytest_addoption(parser):
    parser.addoption("--programs", type=int, default=40, metavar="COUNT", help="random programs to compare with dense")


def pytest_generate_tests(metafunc):
    if "first" in metafunc.fixturenames:
        metafunc.parametrize("first", range(0, metafunc.config.getoption("--programs"), 20))

"""Processes that share a model over the network of this machine: `worker.py` is what each of them runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eformer.checkpoint import load
from eformer.model import Rule, quantize_model

from . import worker

WORKER = Path(worker.__file__)
SECONDS = 300  # a run takes about ten; the rest is for slow machines
every_number = pytest.mark.skipif(
    not os.environ.get("EFORMER_TEST_PROCESSES"), reason="costs a minute: `make test-distributed` runs it"
)


@contextmanager
def running(processes: int, step: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """So many processes that find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, str(WORKER), address, str(processes)]
    devices = f"--xla_force_host_platform_device_count={worker.DEVICES // processes}"
    environment = {**os.environ, "XLA_FLAGS": devices, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen([*command, str(i), step, str(folder)], stdout=-1, stderr=-1, text=True, env=environment)
        for i in range(processes)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    """What a process says of its work; Gloo writes lines of its own."""
    assert process.stdout
    assert process.stderr
    line = next((line for line in process.stdout if line.startswith("{")), None)
    assert line, process.stderr.read()
    return json.loads(line)


def losses() -> tuple[float, float]:
    """Before and after the step of training, of one process with one device, and what is quantized made dense."""
    weights, x = worker.model()
    formats = [Rule(name, form) for name, form in worker.FORMATS.items()]
    quantized = quantize_model({name: jnp.asarray(w) for name, w in weights.items()}, formats)
    dense = {name: q.materialize() for name, q in quantized.items()}
    before, gradient = jax.value_and_grad(worker.loss)(jnp.zeros((64, 64)), dense, jnp.asarray(x))
    return float(before), float(worker.loss(-0.1 * gradient, dense, jnp.asarray(x)))


def save_and_kill(processes: int, folder: Path) -> dict[str, float]:
    with running(processes, "make", folder) as started:
        made = answer(started[0])
        assert started[-1].wait(SECONDS) == -9  # killed in the middle of the second save; the others wait for it
    return made


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=every_number)])
def test_a_model_of_several_processes(processes, tmp_path):
    made = save_and_kill(processes, tmp_path)
    before, after = losses()
    assert made["largest"] == processes / 8  # of the array that only the second axis of the mesh divides
    np.testing.assert_allclose(made["loss"], before, rtol=1e-5)  # a mean of 512 sums, each good to some 1e-6
    mesh = jax.make_mesh((8,), ("all",))
    place = NamedSharding(mesh, PartitionSpec("all"))
    tree = load(tmp_path / "model.safetensors", sharding=place)  # the last good one, in one process
    assert tree["weights"]["up"].packed.addressable_shards[0].data.shape == (4, 128)
    _, x = worker.model()
    dense = {name: np.asarray(q.materialize()) for name, q in tree["weights"].items()}
    np.testing.assert_allclose(worker.loss(np.asarray(tree["adapter"]), dense, x), after, rtol=1e-5)


@every_number
@pytest.mark.parametrize(("processes", "others"), [(2, 4), (4, 2)])
def test_another_number_of_processes_goes_on(processes, others, tmp_path):
    save_and_kill(processes, tmp_path)
    with running(others, "go on", tmp_path) as started:
        loaded = answer(started[0])
        assert [process.wait(SECONDS) for process in started] == [0] * others
    np.testing.assert_allclose(loaded["loss"], losses()[1], rtol=1e-5)

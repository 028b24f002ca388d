"""What an installed wheel must do on any machine: have the core, quantize, multiply, and say its version.

Run with `python -W error::UserWarning`: a missing core warns.
"""

import contextlib
import io
import sys

import jax
import jax.numpy as jnp

import eformer
from eformer.cli import main
from eformer.kernels import cpu

assert cpu.is_available(), "the wheel has no core for this machine"
assert {"int8", "nf4", "ternary"} <= set(cpu.formats())
w, x = jax.random.normal(jax.random.key(0), (256, 128)), jnp.ones((2, 256))
for name in ("int8", "int4", "nf4", "ternary"):
    q = eformer.quantize(w, format=name, axis=0)
    error = jnp.abs(jax.jit(eformer.implicit(jnp.matmul))(x, q) - x @ q.materialize()).max()
    assert error < 1e-3, (name, error)
with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
    main(["--version"])
assert said.getvalue().strip() == f"eformer {eformer.__version__}", said.getvalue()
what = f"Python {sys.version.split()[0]}, JAX {jax.__version__}, {', '.join(cpu.instruction_sets())}"
print(f"eformer {eformer.__version__} works: {what}")

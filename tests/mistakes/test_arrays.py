"""Mistakes with `quantize`, with quantized arrays, and with functions of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer
from eformer import Array1B, Array8B, ArrayNF4, QuantizationConfig, cache, implicit, quantize, register_format
from eformer.jaximus import MaterializationError

from .common import PARAMS, Mistakes, W, X, check, model, q

KEYS = jnp.ones((1, 2, 8, 64))


class LowRank(eformer.ImplicitArray):
    a: jax.Array
    name: Any = eformer.aux_field(default="")

    def materialize(self) -> jax.Array:
        return self.a @ self.a.T


def set_field() -> None:
    q().axis = 0


def set_item() -> None:
    q()[0] = 1


def forbidden() -> None:
    with eformer.materialization_error():
        implicit(jnp.sort)(q())


QUANTIZE: Mistakes = {
    "a dict": (lambda: quantize({"w": W}), TypeError, "got dict | `quantize_model` takes a tree"),
    "a list": (lambda: quantize([1.0, 2.0]), TypeError, "got list | `jnp.asarray` makes one"),
    "a path": (lambda: quantize("model.safetensors"), TypeError, "got str | `load` reads | `quantize_checkpoint`"),
    "nothing": (lambda: quantize(None), TypeError, "got NoneType"),
    "a number": (lambda: quantize(3.0), TypeError, "got float | `jnp.asarray`"),
    "complex": (lambda: quantize(W.astype(np.complex64)), TypeError, "floating point and integer | got complex64"),
    "bools": (lambda: quantize(W > 0, "int8"), TypeError, "floating point and integer | got bool"),
    "counts": (
        lambda: quantize(np.arange(1000, dtype=np.int32), "nf4"),
        ValueError,
        "can't hold these integers exactly | off by up to 63 | `w.astype(jnp.float32)`",
    ),
    "counts under jit": (
        lambda: jax.jit(lambda x: quantize(x, "int4"))(jnp.arange(1000)),
        ValueError,
        "not known under tracing | `w.astype(jnp.float32)`",
    ),
    "misspelt format": (lambda: quantize(W, "nf5"), ValueError, "unknown format 'nf5' | 'mxfp4' | did you mean 'nf4'?"),
    "llama.cpp's name": (lambda: quantize(W, "q4_k"), ValueError, "'q4_k' | did you mean 'int4'?"),
    "GPTQ as format": (lambda: quantize(W, "gptq"), ValueError, "'gptq' | did you mean 'int4'?"),
    "float8's name": (lambda: quantize(W, "e4m3"), ValueError, "'e4m3' | did you mean 'fp8'?"),
    "bits as format": (lambda: quantize(W, 4), TypeError, "a format is a name | got int 4 | for 4 bits write 'int4'"),
    "dtype as format": (lambda: quantize(W, jnp.int8), TypeError, "a format is a name | 'int8' | jax.numpy.int8"),
    "dtype as dtype": (lambda: quantize(W, dtype=jnp.int8), TypeError, "a format is a name | 'int8' | jax.numpy.int8"),
    "NumPy's dtype": (
        lambda: quantize(W, format=np.dtype("int8")),
        TypeError,
        "a format is a name | 'int8' | dtype('int8')",
    ),
    "the class as config": (
        lambda: quantize(W, QuantizationConfig),
        TypeError,
        "is a class | write `QuantizationConfig(...)`",
    ),
    "format twice": (lambda: quantize(W, "int4", format="nf4"), TypeError, "given twice | 'int4' | 'nf4'"),
    "both words": (
        lambda: quantize(W, dtype="int4", format="nf4"),
        TypeError,
        "mean the same | give one | 'int4' and 'nf4'",
    ),
    "option twice": (
        lambda: quantize(W, "int4,axis=0", axis=1),
        TypeError,
        "`axis` is given twice | 0 in 'int4,axis=0' | 1 beside",
    ),
    "no option name": (lambda: quantize(W, "int4,32"), ValueError, "'int4,32' | write 'int4,block_size=32'"),
    "blanks for commas": (
        lambda: quantize(W, "int4 block_size=32"),
        ValueError,
        "'int4 block_size=32' | write 'int4,block_size=32'",
    ),
    "group_size": (
        lambda: quantize(W, "int4", group_size=64),
        TypeError,
        "'int4' has no option 'group_size' | 'block_size', 'axis' | Did you mean 'block_size'?",
    ),
    "blocksize": (
        lambda: quantize(W, "nf4", blocksize=64),
        TypeError,
        "'nf4' has no option 'blocksize' | Did you mean 'block_size'?",
    ),
    "bits": (lambda: quantize(W, "int4", bits=3), TypeError, "no option 'bits' | in the name of the format | 'int3'"),
    "sym": (lambda: quantize(W, "int4", sym=True), TypeError, "no option 'sym' | Did you mean 'symmetric'?"),
    "double_quant": (
        lambda: quantize(W, "nf4", double_quant=True),
        TypeError,
        "no option 'double_quant' | Did you mean 'double_quantization'?",
    ),
    "blocks of int8": (
        lambda: quantize(W, "int8", block_size=32),
        TypeError,
        "'int8' has no option 'block_size' | per slice | 'int8_grouped'",
    ),
    "symmetric nf4": (
        lambda: quantize(W, "nf4", symmetric=True),
        TypeError,
        "'nf4' has no option 'symmetric' | it has 'block_size'",
    ),
    "misspelt use_kernel": (
        lambda: quantize(W, "nf4", use_kernal=False),
        TypeError,
        "'use_kernal' | Did you mean 'use_kernel'?",
    ),
    "importance of binary": (
        lambda: quantize(W, "binary", importance=jnp.ones(96)),
        TypeError,
        "'binary' has no option 'importance' | it has 'scale'",
    ),
    "importance of another shape": (
        lambda: quantize(W, "int4", importance=jnp.ones(7)),
        ValueError,
        "`importance` of shape (7,) | (64, 96)",
    ),
    "axis out of range": (lambda: quantize(W, "nf4", axis=2), ValueError, "axis 2 is out of range | 2 axes"),
    "axis by name": (lambda: quantize(W, "int8", axis="rows"), TypeError, "`axis` must be an int | got 'rows'"),
    "axis 1.5": (lambda: quantize(W, "int4", axis=1.5), TypeError, "`axis` must be an int | got 1.5"),
    "two axes": (lambda: quantize(W, "int4", axis=(0, 1)), ValueError, "along one axis | (0, 1)"),
    "an axis twice": (lambda: quantize(W, "int8", axis=(0, -2)), ValueError, "names an axis twice | (0, -2)"),
    "block of 0": (lambda: quantize(W, "int4", block_size=0), ValueError, "`block_size=0` | from 1"),
    "odd block": (
        lambda: quantize(W, "nf4", block_size=7),
        ValueError,
        "`block_size=7` must be even | two codes share a byte",
    ),
    "negative block": (lambda: quantize(W, "int4", block_size=-4), ValueError, "`block_size=-4` | from 1"),
    "block a float": (
        lambda: quantize(W, "int4", block_size=64.0),
        TypeError,
        "`block_size` must be an int | float 64.0",
    ),
    "block a text": (lambda: quantize(W, "nf4", block_size="64"), TypeError, "`block_size` must be an int | '64'"),
    "block a bool": (lambda: quantize(W, "nf4", block_size=True), TypeError, "`block_size` must be an int | bool True"),
    "4-bit activations": (
        lambda: quantize(W, "int4", activation_dtype="int4"),
        ValueError,
        "None or 'int8' | got 'int4'",
    ),
    "activations by dtype": (
        lambda: quantize(W, "int4", activation_dtype=jnp.int8),
        ValueError,
        "None or 'int8' | jax.numpy.int8",
    ),
    "simulate a text": (
        lambda: quantize(W, "int4", simulate="yes"),
        TypeError,
        "`simulate` must be True or False | 'yes'",
    ),
    "fit a text": (lambda: quantize(W, "int4", fit="yes"), TypeError, "`fit` must be True or False | 'yes'"),
    "symmetric a number": (
        lambda: quantize(W, "int4", symmetric=1),
        TypeError,
        "`symmetric` must be True or False | got 1",
    ),
    "a path as importance": (
        lambda: quantize(W, "int4", importance="imatrix.dat"),
        TypeError,
        "`importance` must be an array | got str 'imatrix.dat'",
    ),
    "a dict as config": (lambda: quantize(W, {"format": "int4"}), TypeError, "a format is a name | got dict"),
    "the block by position": (
        lambda: quantize(W, "int4", 64),
        TypeError,
        "`dtype` is the name of a format | write `block_size=64`",
    ),
    "the dtype of the values": (
        lambda: quantize(W, "int4", dtype=jnp.bfloat16),
        TypeError,
        "`dtype` is the name of a format | cast the array itself",
    ),
    "straight_through of a misspelt format": (
        lambda: eformer.straight_through(W, "nf5"),
        ValueError,
        "unknown format 'nf5' | did you mean 'nf4'?",
    ),
    "a registered number": (
        lambda: register_format(3, ArrayNF4, ArrayNF4.quantize),
        TypeError,
        "the name of a format is a text | got int 3",
    ),
    "double_quantization a number": (
        lambda: quantize(W, "int4", double_quantization=1),
        TypeError,
        "`double_quantization` must be True or False | got 1",
    ),
    "scale of ternary": (
        lambda: quantize(W, "ternary", scale="row"),
        ValueError,
        "`scale='row'` | 'tensor', 'channel'",
    ),
    "block_shape of a vector": (lambda: quantize(W[0], "fp8", block_shape=(2, 2)), ValueError, "needs 2 axes | has 1"),
    "block_shape of floats": (
        lambda: quantize(W, "fp8", block_shape=(2, 2.0)),
        TypeError,
        "`block_shape` must be an int | 2.0",
    ),
    "config of a misspelt format": (lambda: QuantizationConfig("int99"), ValueError, "'int99' | did you mean"),
    "config with an axis": (
        lambda: QuantizationConfig("int4,axis=0"),
        TypeError,
        "options as arguments | 'int4,axis=0'",
    ),
    "config of int8 with blocks": (
        lambda: QuantizationConfig("int8", block_size=32),
        TypeError,
        "'int8' has no option 'block_size'",
    ),
    "values for codes": (
        lambda: Array1B.quantize(jnp.asarray([[0.5, 2.0]])),
        ValueError,
        "{-1, 0, 1} | got 0.5 | quantize(array, 'ternary')",
    ),
    "integers to train": (lambda: eformer.straight_through(np.arange(8), "int8"), TypeError, "floating point | int32"),
    "a format registered twice": (
        lambda: register_format("nf4", ArrayNF4, ArrayNF4.quantize),
        ValueError,
        "a format 'nf4' already | ArrayNF4",
    ),
    "leaves that fit no array": (
        lambda: ArrayNF4(packed=jnp.zeros(3, jnp.uint8), absmax=jnp.ones(9)),
        ValueError,
        "packed (3,) | absmax (9,) | no array of shape",
    ),
    "codes that are floats": (
        lambda: Array8B(scale=jnp.ones((1, 1)), weight=jnp.ones((4, 4))),
        TypeError,
        "weight must be int8 | got float32",
    ),
}
ARRAYS: Mistakes = {
    "a field is set": (set_field, AttributeError, "is a value | `dataclasses.replace(array, axis=...)`"),
    "an element is set": (set_item, TypeError, "immutable | `q.at[index].set(value)`"),
    "x @ q of other lengths": (lambda: jnp.ones((2, 5)) @ q(), TypeError, "array[2, 5] @ Array8B[64, 96] | (5) | (64)"),
    "q @ x of other lengths": (lambda: q() @ jnp.ones((5, 2)), TypeError, "Array8B[64, 96] @ array[5, 2] | (96) | (5)"),
    "q @ a number": (lambda: q() @ 3, TypeError, "at least one axis | use `*`"),
    "q @ a list": (lambda: q() @ [1.0], TypeError, "two arrays | Array8B and list | `jnp.asarray`"),
    "the truth of many": (lambda: bool(q()), ValueError, "more than one element | a.any()"),
    "NumPy without a copy": (
        lambda: np.asarray(q(), copy=False),
        ValueError,
        "always makes a new array | `copy=False`",
    ),
    "a function outside implicit": (
        lambda: jnp.dot(X, q()),
        TypeError,
        "Array8B | `eformer.jaximus.implicit(f)` takes it",
    ),
    "a sum outside implicit": (lambda: jnp.sum(q()), TypeError, "Array8B | `eformer.jaximus.implicit(f)` takes it"),
    "jit without implicit": (
        lambda: jax.jit(lambda x, w: jnp.dot(x, w))(X, q()),
        TypeError,
        "Array8B | `eformer.jaximus.implicit(f)` takes it",
    ),
    "a cast of all leaves": (
        lambda: X @ jax.tree.map(lambda leaf: leaf.astype(jnp.float16), q()),
        TypeError,
        "`scale` of this Array8B is float16 | was float32 | `tree_cast`",
    ),
    "another shape": (lambda: q().reshape(3, 5), TypeError, "(64, 96) | (3, 5)"),
    "a dtype that is none": (lambda: q().astype("float33"), TypeError, "float33"),
    "sharding by a text": (
        lambda: q().with_sharding("data"),
        TypeError,
        "NamedSharding, a PartitionSpec or None | 'data'",
    ),
    "a spec without a mesh": (
        lambda: q().with_sharding(jax.sharding.PartitionSpec("data")),
        ValueError,
        "needs a mesh | `jax.set_mesh(mesh)`",
    ),
    "a mesh alone": (lambda: q().with_mesh_and_axis(jax.make_mesh((1,), ("d",))), TypeError, "a pair (mesh, axes)"),
    "another activation_dtype": (lambda: q().with_activation_dtype("fp8"), ValueError, "None or 'int8' | got 'fp8'"),
    "use_kernels of a text": (lambda: eformer.use_kernels("no"), TypeError, "True or False | 'no'"),
    "implicit of an array": (lambda: implicit(q()), TypeError, "takes a function | got Array8B | `implicit(f)(x)`"),
    "implicit of a result": (lambda: implicit(model(PARAMS, X)), TypeError, "takes a function | `implicit(f)(x)`"),
    "implicit of a tree": (lambda: implicit(PARAMS), TypeError, "takes a function | got dict | `implicit(f)(x)`"),
    "explain of an array": (
        lambda: eformer.explain(q()),
        TypeError,
        "takes a function | got Array8B | `explain(f)(x)`",
    ),
    "fuse of an array": (lambda: eformer.fuse(q()), TypeError, "takes a function | got Array8B | `fuse(f)(x)`"),
    "ste of an array": (lambda: eformer.ste(jnp.ones(3)), TypeError, "takes a function | `ste(f)(x)`"),
    "ste of integers": (lambda: eformer.ste(jnp.round)(jnp.arange(3)), TypeError, "floating point | int32"),
    "ste that changes the shape": (lambda: eformer.ste(jnp.sum)(jnp.ones(3)), ValueError, "shape (3,) | got ()"),
    "a dense copy that is forbidden": (
        forbidden,
        MaterializationError,
        'no rule serves `sort` of Array8B | @register("sort")',
    ),
    "a primitive that is none": (
        lambda: eformer.register("dot_genral"),
        ValueError,
        "'dot_genral' | did you mean 'dot_general'",
    ),
    "a number for a primitive": (lambda: eformer.register(3), TypeError, 'got int 3 | @register("dot_general")'),
    "a handler without annotations": (
        lambda: eformer.register("neg")(lambda primitive, x: x),
        TypeError,
        "annotates no operand | `x: MyArray`",
    ),
    "a static field that is an array": (
        lambda: LowRank(jnp.ones((2, 2)), name=jnp.ones(2)),
        TypeError,
        "`LowRank.name` is static and must be hashable | a tuple would work",
    ),
    "no materialize": (lambda: type("Empty", (eformer.ImplicitArray,), {})(), TypeError, "abstract | materialize"),
    "a wrong shape": (lambda: LowRank(jnp.ones((2, 2)), shape=(3, 3)), ValueError, "`shape=(3, 3)` | (2, 2)"),
}


CACHES: Mistakes = {
    "a format without caches": (
        lambda: cache.quantize(KEYS, "int3"),
        ValueError,
        "`format='int3'` must be one of 'int8', 'fp8', 'int4'",
    ),
    "keys and values": (
        lambda: cache.quantize({"keys": KEYS, "values": KEYS}),
        TypeError,
        "made of one array | got dict",
    ),
    "a length for the shape": (
        lambda: cache.empty(64),
        TypeError,
        "`shape` must be a tuple | (batch, heads, positions, channels) | got 64",
    ),
    "the format as dtype": (
        lambda: cache.empty((1, 2, 8, 64), "int8"),
        TypeError,
        "floating point; got int8 | `format` says",
    ),
    "a negative length": (lambda: cache.empty((1, -2, 8, 64)), ValueError, "negative length | (1, -2, 8, 64)"),
    "an axis that is not there": (lambda: cache.empty((1, 2, 8, 64), axis=4), ValueError, "`axis=4` | 4 axes"),
}


@pytest.mark.parametrize("mistake", CACHES.values(), ids=CACHES)
def test_mistakes_with_caches(mistake):
    check(*mistake)


@pytest.mark.parametrize("mistake", QUANTIZE.values(), ids=QUANTIZE)
def test_mistakes_with_one_array(mistake):
    check(*mistake)


@pytest.mark.parametrize("mistake", ARRAYS.values(), ids=ARRAYS)
def test_mistakes_with_quantized_arrays(mistake):
    check(*mistake)

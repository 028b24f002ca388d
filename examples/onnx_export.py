"""Quantized weights for ONNX Runtime: INT4 and INT8 as MatMulNBits, which multiplies by the codes as they are.

    pip install onnx onnxruntime
    python examples/onnx_export.py

`parts` makes the inputs of the operator of one weight (in, out), in blocks along its rows; `save_mlp` writes layers of
matmul, bias and ReLU. Other operators of a model are those of `onnx.helper`, or of a converter of the dense model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eformer import Array8B, ArrayGrouped, implicit, quantize

BLOCK = 32  # of a scale per column, which ONNX has in blocks


class Parts(NamedTuple):
    """What MatMulNBits takes of a weight (in, out): value = scale * (code - zero)."""

    codes: np.ndarray  # (out, blocks, bytes of a block), uint8
    scales: np.ndarray  # (out * blocks,), float32
    zeros: np.ndarray | None  # the same; None: 2 ** (bits - 1)
    bits: int
    block: int


def parts(q: Array8B | ArrayGrouped) -> Parts:
    """The parts of an array in "int4" or "int8" that is packed along its rows."""
    rows, columns = q.shape
    if isinstance(q, Array8B):
        if q.axis != (-2,) or rows % BLOCK:
            raise ValueError(f"INT8 needs a scale per column and rows in blocks of {BLOCK}, got {q}")
        codes = (np.asarray(q.weight, np.int16) + 128).astype(np.uint8)
        scales = np.repeat(np.asarray(q.scale, np.float32), rows // BLOCK, axis=0)
        return Parts(codes.T.reshape(columns, -1, BLOCK), scales.T.ravel(), None, 8, BLOCK)
    block = q.block_size
    if q.bits != 4 or q.axis != -2 or q.codebook != "integer" or q.zero is not None or rows % block or block < 16:
        raise ValueError(f"only `quantize(w, 'int4')` with whole blocks of 16 or more along the rows fits, got {q}")
    scales = _level(q, q.scale, q.scale_scale)
    zeros = None if q.offset is None else -_level(q, q.offset, q.offset_scale) / np.where(scales == 0, 1, scales)
    codes = np.asarray(q.packed).T.reshape(columns, rows // block, block // 2)  # both have the first code in low bits
    return Parts(codes, scales.T.ravel(), None if zeros is None else zeros.T.ravel().astype(np.float32), 4, block)


def _level(q: ArrayGrouped, leaf: Any, scale: Any) -> np.ndarray:
    """Scales or offsets in float32, multiplied by their own scales if they have some."""
    found = np.asarray(leaf, np.float32)
    if scale is None:
        return found
    each = q.superblock_size // q.block_size
    return found * np.repeat(np.asarray(scale, np.float32), each, axis=0)[: len(found)]


def save_mlp(path: Path, layers: Sequence[tuple[Array8B | ArrayGrouped, np.ndarray]]) -> None:
    """Write relu(... relu(x @ w + b) ...) @ w + b."""
    import onnx  # pyright: ignore[reportMissingImports]

    helper, constants, nodes, name = onnx.helper, [], [], "x"
    for i, (q, bias) in enumerate(layers):
        made = parts(q)
        inputs = {"codes": made.codes, "scales": made.scales, "zeros": made.zeros, "bias": np.asarray(bias)}
        constants += [
            onnx.numpy_helper.from_array(array, f"{part}{i}") for part, array in inputs.items() if array is not None
        ]
        given = [name, *(f"{part}{i}" for part in ("codes", "scales", "zeros") if inputs[part] is not None)]
        sizes = {"K": q.shape[0], "N": q.shape[1], "bits": made.bits, "block_size": made.block}
        nodes.append(helper.make_node("MatMulNBits", given, [f"y{i}"], domain="com.microsoft", **sizes))
        nodes.append(helper.make_node("Add", [f"y{i}", f"bias{i}"], [f"z{i}"]))
        name = f"z{i}"
        if i < len(layers) - 1:
            nodes.append(helper.make_node("Relu", [name], [f"x{i}"]))
            name = f"x{i}"
    float32 = onnx.TensorProto.FLOAT
    ends = [
        helper.make_tensor_value_info(each, float32, ["batch", size])
        for each, size in (("x", layers[0][0].shape[0]), (name, layers[-1][0].shape[1]))
    ]
    graph = helper.make_graph(nodes, "mlp", ends[:1], ends[1:], constants)
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=sets, ir_version=10), path)


def mlp(layers: Sequence[tuple[Any, jax.Array]], x: jax.Array) -> jax.Array:
    for w, b in layers[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ layers[-1][0] + layers[-1][1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=Path, help="a folder for the models (a temporary one)")
    args = parser.parse_args(argv)
    import onnxruntime  # pyright: ignore[reportMissingImports]

    keys = jax.random.split(jax.random.key(0), 3)
    weights = jax.random.normal(keys[0], (2, args.width, args.width)) / args.width**0.5
    bias, x = jax.random.normal(keys[1], (args.width,)), jax.random.normal(keys[2], (4, args.width))
    folder = args.out or Path(tempfile.mkdtemp())
    for form in ("int8", "int4", "int4,symmetric=true"):
        layers = [(quantize(w, form), bias) for w in weights]  # pyright: ignore[reportArgumentType,reportCallIssue]
        path = folder / f"{form.replace(',', '-').replace('=', '-')}.onnx"
        save_mlp(path, layers)  # pyright: ignore[reportArgumentType]
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {"x": np.asarray(x)})
        expected = jax.jit(implicit(mlp))(layers, x)
        off = jnp.abs(found - expected).max() / jnp.ptp(expected)
        print(f"{form}: {path.stat().st_size:,} bytes, largest difference {off:.1e} of the range")


if __name__ == "__main__":
    main()

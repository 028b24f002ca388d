"""The same matmul in several libraries, each called in the fastest way that its documentation gives.

Every function takes the weights (K, N) and x (M, K) in float32, and yields the matmuls that its library has for them.
Libraries are imported inside the functions, since any of them may be missing.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rings import Contender, ring_length, stored_bytes

from eformer._src.kernels.reference import NF4_CODES
from eformer.jaximus import materialize
from eformer.ops.quantization import quantize

GROUP = 64  # weights per scale, where a library lets us choose
DENSE, INT8, BITS4, BITS2 = "dense", "8 bits", "4 bits", "2 bits"


class Problem(NamedTuple):
    weights: Sequence[np.ndarray]  # distinct ones, (K, N)
    x: np.ndarray  # (M, K)
    ring_bytes: float
    threads: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.weights[0].shape


class Product(NamedTuple):
    library: str
    weight: str  # how it is stored
    group: str  # what it is compared with
    activations: str  # "float32", or the dtype that x may be rounded to
    nbytes: int  # of one weight
    contender: Contender
    decoded: Callable[[], Any]  # the first weight of the ring as a dense matrix (K, N)

    @property
    def name(self) -> str:
        return f"{self.library}: {self.weight}, {self.activations} x"


Products = Iterator[Callable[[], Product]]  # made one at a time, so that a failure leaves out only one


def as_numpy(array: Any) -> np.ndarray:
    return np.asarray(array.float() if hasattr(array, "float") else array, dtype=np.float32)


def ring(distinct: Sequence[Any], duplicate: Callable[[Any], Any], each: int, problem: Problem) -> list[Any]:
    count = max(ring_length(each, problem.ring_bytes), len(distinct))
    return [duplicate(distinct[i % len(distinct)]) for i in range(count)]


# JAX and this package


OUT_IN = ", (out, in)"  # weights stored as torch stores them, and as most other libraries do


def with_jax(problem: Problem) -> Products:
    formats: dict[str, tuple[str, Callable[..., Any]]] = {
        "": (DENSE, lambda w: w),
        "INT8, a scale per column": (INT8, functools.partial(quantize, dtype="int8", axis=0)),
        "NF4, blocks of 64": (BITS4, functools.partial(quantize, dtype="nf4", axis=0, block_size=GROUP)),
        "INT4, blocks of 64": (BITS4, functools.partial(quantize, format="int4", axis=0, block_size=GROUP)),
        "ternary": (BITS2, functools.partial(quantize, dtype="ternary", scale="channel", axis=0)),
    }

    def make(weight: str, activations: str, out_in: bool = False) -> Product:
        group, encode = formats[weight]
        dtype = "float32" if activations == "int8" else activations
        distinct = [encode(w.T, axis=-1) if out_in else encode(w) for w in map(jnp.asarray, problem.weights)]
        distinct = [q.astype(dtype) for q in distinct]
        if activations == "int8":
            distinct = [q.with_activation_dtype("int8") for q in distinct]
        each = stored_bytes(distinct[0])
        x = jnp.asarray(problem.x, dtype)
        product = jax.jit((lambda x, w: x @ w.T) if out_in else (lambda x, w: x @ w))
        weights = ring(distinct, functools.partial(jax.tree.map, jnp.copy), each, problem)
        contender = Contender(lambda w: product(x, w).block_until_ready(), weights)
        first = distinct[0].astype("float32")
        library, name = "JAX" if group == DENSE else "eformer", f"{weight or dtype}{OUT_IN if out_in else ''}"
        decoded = (lambda: materialize(first).T) if out_in else (lambda: materialize(first))
        return Product(library, name, group, activations, each, contender, decoded)

    for weight in formats:
        yield functools.partial(make, weight, "float32")
        yield functools.partial(make, weight, "bfloat16")
        if weight:
            yield functools.partial(make, weight, "int8")
            yield functools.partial(make, weight, "float32", out_in=True)
            yield functools.partial(make, weight, "int8", out_in=True)


# torch and what is built on it


@functools.cache
def _torch(threads: int) -> Any:
    torch = importlib.import_module("torch")
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return torch


def _torch_tensors(problem: Problem, dtype: str) -> tuple[Any, list[Any], Any]:
    """torch, the weights as torch has them (N, K), and x."""
    torch = _torch(problem.threads)
    wanted = getattr(torch, dtype)
    weights = [torch.from_numpy(np.ascontiguousarray(w.T)) for w in problem.weights]
    return torch, weights, torch.from_numpy(problem.x).to(wanted)


def with_torch(problem: Problem) -> Products:
    def dense(dtype: str) -> Product:
        torch, weights, x = _torch_tensors(problem, dtype)
        distinct = [w.to(x.dtype) for w in weights]
        each = distinct[0].nbytes
        linear = functools.partial(torch.nn.functional.linear, x)
        contender = Contender(linear, ring(distinct, copy.deepcopy, each, problem))
        return Product("torch", dtype, DENSE, dtype, each, contender, lambda: distinct[0].float().T)

    def int8(dtype: str) -> Product:
        torch, weights, x = _torch_tensors(problem, dtype)

        def encode(w: Any) -> tuple[Any, Any]:
            scale = w.abs().amax(1) / 127
            return torch.round(w / scale[:, None]).to(torch.int8), scale.to(x.dtype)

        distinct = list(map(encode, weights))
        codes, scale = distinct[0]
        dense = codes.float() * scale.float()[:, None]
        each = codes.nbytes + scale.nbytes
        weights = ring(distinct, copy.deepcopy, each, problem)
        contender = Contender(lambda q: torch._weight_int8pack_mm(x, *q), weights)
        return Product("torch", "int8pack, a scale per column", INT8, dtype, each, contender, lambda: dense.T)

    def int4(dtype: str) -> Product:
        torch, weights, x = _torch_tensors(problem, dtype)

        def encode(w: Any) -> tuple[Any, Any, Any]:
            groups = w.unflatten(1, (-1, GROUP))
            low, high = groups.amin(-1), groups.amax(-1)
            scale = ((high - low) / 15).to(x.dtype)
            zero = (low + 8 * (high - low) / 15).to(x.dtype)  # what code 8 stands for
            codes = torch.round((groups - zero.float()[..., None]) / scale.float()[..., None] + 8).clamp(0, 15)
            scales = torch.stack([scale, zero], -1).transpose(0, 1).contiguous()
            dense = ((codes - 8) * scale.float()[..., None] + zero.float()[..., None]).flatten(1)
            packed = torch._convert_weight_to_int4pack_for_cpu(codes.flatten(1).to(torch.int32), 1)
            return packed, scales, dense

        encoded = list(map(encode, weights))
        packed, scales, dense = encoded[0]
        each = packed.nbytes + scales.nbytes
        weights = ring([e[:2] for e in encoded], copy.deepcopy, each, problem)
        contender = Contender(lambda q: torch._weight_int4pack_mm_for_cpu(x, q[0], GROUP, q[1]), weights)
        return Product("torch", "int4pack, groups of 64", BITS4, dtype, each, contender, lambda: dense.T)

    yield functools.partial(dense, "float32")
    yield functools.partial(dense, "bfloat16")
    # Without AVX-512, these two kernels take seconds for 512 rows of float32.
    yield functools.partial(int8, "bfloat16")
    yield functools.partial(int4, "bfloat16")


def with_bitsandbytes(problem: Problem) -> Products:
    layers = importlib.import_module("bitsandbytes").nn
    functional = importlib.import_module("bitsandbytes.functional")

    def loaded(layer: Any, w: Any) -> Any:
        layer.load_state_dict({"weight": w})
        return layer.to("cpu").eval()

    def nf4(dtype: str) -> Product:
        _, weights, x = _torch_tensors(problem, dtype)
        make = functools.partial(
            layers.Linear4bit, bias=False, quant_type="nf4", compute_dtype=x.dtype, compress_statistics=False
        )
        distinct = [loaded(make(*problem.shape), w) for w in weights]
        stored = distinct[0].weight
        dense = functional.dequantize_4bit(stored.data, stored.quant_state).float()  # now: a call may repack it
        each = stored.data.nbytes + stored.quant_state.absmax.nbytes
        contender = Contender(lambda layer: layer(x), ring(distinct, copy.deepcopy, each, problem))
        return Product("bitsandbytes", "NF4, blocks of 64", BITS4, dtype, each, contender, lambda: dense.T)

    def int8() -> Product:
        _, weights, x = _torch_tensors(problem, "float16")  # its own choice, whatever it is given
        make = functools.partial(layers.Linear8bitLt, bias=False, has_fp16_weights=False, threshold=0.0)
        distinct = [loaded(make(*problem.shape), w) for w in weights]
        each = distinct[0].weight.nbytes + 4 * problem.shape[1]
        layers_around = ring(distinct, copy.deepcopy, each, problem)

        def decoded() -> Any:
            state = layers_around[0].state  # there from the first call on
            return (state.CB.float() * state.SCB[:, None] / 127).T

        contender = Contender(lambda layer: layer(x), layers_around)
        return Product("bitsandbytes", "LLM.int8", INT8, "int8", each, contender, decoded)

    yield functools.partial(nf4, "float32")
    yield functools.partial(nf4, "bfloat16")
    yield int8


def with_torchao(problem: Problem) -> Products:
    """Compiled by `torch.compile`, as its manual asks."""
    _torch(problem.threads).compiler.reset()  # it compiles a function only so often, then no more
    for name in ("torchao", "torch._inductor"):  # that there is no GPU, that a cache cannot be used
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "(?s).*_stable_hash_for_caching")
    quantization = importlib.import_module("torchao.quantization")
    opaque = importlib.import_module("torchao.prototype.quantization.int4.inference_workflow")

    def make(weight: str, group: str, activations: str, dtype: str, config: Callable[[], Any]) -> Product:
        torch, weights, x = _torch_tensors(problem, dtype)
        linear = torch.nn.functional.linear
        compiled = torch.compile(lambda x, w: linear(x, w), dynamic=False)

        def encode(w: Any) -> Any:
            layer = torch.nn.Linear(*problem.shape, bias=False, dtype=x.dtype)
            layer.weight.data.copy_(w)
            quantization.quantize_(layer, config())
            return layer.weight

        distinct = list(map(encode, weights))
        each = sum(getattr(distinct[0], name).nbytes for name in distinct[0].tensor_data_names)
        contender = Contender(lambda w: compiled(x, w), ring(distinct, copy.deepcopy, each, problem))

        def decoded() -> Any:
            if group == INT8:
                return distinct[0].dequantize().T
            # It offers no dequantize: multiply with the identity, which is exact in any dtype.
            dense = linear(torch.eye(problem.shape[0], dtype=x.dtype), distinct[0])
            off = float((dense.T - weights[0]).norm() / weights[0].norm())
            if not off < 0.15:  # 4 bits are off by 0.09
                raise ValueError(f"{weight} is off by {off:.2g} from what was quantized")
            return dense

        return Product("torchao", weight, group, activations, each, contender, decoded)

    int8, both8 = quantization.Int8WeightOnlyConfig, quantization.Int8DynamicActivationInt8WeightConfig
    int4 = functools.partial(opaque.PrototypeInt4WeightOnlyConfig, group_size=GROUP)
    yield functools.partial(make, "INT8, a scale per column", INT8, "float32", "float32", int8)
    yield functools.partial(make, "INT8, a scale per column", INT8, "bfloat16", "bfloat16", int8)
    yield functools.partial(make, "INT8, a scale per column", INT8, "int8", "bfloat16", both8)
    yield functools.partial(make, "INT4, groups of 64", BITS4, "bfloat16", "bfloat16", int4)


# Runtimes of their own


def symmetric(w: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (N, K / GROUP, GROUP) from 0, scales (N, K / GROUP, 1), and the dequantized matrix (K, N)."""
    groups = np.ascontiguousarray(w.T).reshape(w.shape[1], -1, GROUP)
    zero = 1 << (bits - 1)
    scale = np.abs(groups).max(-1, keepdims=True) / (zero - 1)
    codes = np.clip(np.rint(groups / scale) + zero, 0, 2 * zero - 1).astype(np.uint8)
    return codes, scale, ((codes - np.float32(zero)) * scale).reshape(w.shape[::-1]).T


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack several codes per byte along the last axis, the first in the lowest bits."""
    a_byte = 8 // bits
    return functools.reduce(np.bitwise_or, [codes[..., i::a_byte] << (i * bits) for i in range(a_byte)])


def with_onnxruntime(problem: Problem) -> Products:
    runtime = importlib.import_module("onnxruntime")
    onnx = importlib.import_module("onnx")
    _onnxruntime_threads(problem.threads)
    (k, n), m = problem.shape, len(problem.x)

    def model(w: np.ndarray, bits: int, accuracy: int) -> bytes:
        codes, scale, _ = symmetric(w, bits)
        sizes = {"K": k, "N": n, "bits": bits, "block_size": GROUP, "accuracy_level": accuracy}
        node = onnx.helper.make_node("MatMulNBits", ["x", "w", "scale"], ["y"], domain="com.microsoft", **sizes)
        constants = {"w": packed(codes, bits), "scale": scale.reshape(-1)}
        value, float32 = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
        graph = onnx.helper.make_graph(
            [node],
            "product",
            [value("x", float32, [m, k])],
            [value("y", float32, [m, n])],
            [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
        )
        opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
        return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()

    def session(serialized: bytes) -> Any:
        options = runtime.SessionOptions()
        options.use_per_session_threads = False
        return runtime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])

    def make(bits: int, group: str, accuracy: int) -> Product:
        distinct = [model(w, bits, accuracy) for w in problem.weights]
        each = k * n * bits // 8 + 4 * k * n // GROUP
        inputs = {"x": problem.x}
        contender = Contender(lambda s: s.run(None, inputs)[0], ring(distinct, session, each, problem))
        activations = "int8" if accuracy == 4 else "float32"
        dense = symmetric(problem.weights[0], bits)[2]
        return Product("ONNX Runtime", f"{bits} bits, groups of 64", group, activations, each, contender, lambda: dense)

    for bits, group in ((8, INT8), (4, BITS4), (2, BITS2)):
        yield functools.partial(make, bits, group, 0)
        yield functools.partial(make, bits, group, 4)


@functools.cache  # once a process, or it complains
def _onnxruntime_threads(threads: int) -> None:
    importlib.import_module("onnxruntime").set_global_thread_pool_sizes(threads, 1)


def with_openvino(problem: Problem) -> Products:
    openvino = importlib.import_module("openvino")
    op = importlib.import_module("openvino.opset13")
    core = openvino.Core()
    (k, n), m = problem.shape, len(problem.x)

    class Encoded(NamedTuple):
        packed: np.ndarray
        dtype: Any
        shape: tuple[int, ...]
        scale: np.ndarray
        dense: np.ndarray

    def int8(w: np.ndarray) -> Encoded:
        scale = np.abs(w).max(0)[:, None] / 127
        codes = np.rint(w.T / scale).astype(np.int8)
        return Encoded(codes, openvino.Type.i8, codes.shape, scale, (codes * scale).T)

    def int4(w: np.ndarray) -> Encoded:
        codes, scale, dense = symmetric(w, 4)
        signed = codes ^ 8  # from 8 as zero to two's complement
        return Encoded(packed(signed, 4), openvino.Type.i4, codes.shape, scale, dense)

    def nf4(w: np.ndarray) -> Encoded:
        groups = np.ascontiguousarray(w.T).reshape(n, -1, GROUP)
        scale = np.abs(groups).max(-1, keepdims=True)
        codes = np.searchsorted((NF4_CODES[1:] + NF4_CODES[:-1]) / 2, groups / scale).astype(np.uint8)
        dense = (np.asarray(NF4_CODES, np.float32)[codes] * scale).reshape(n, k).T
        return Encoded(packed(codes, 4), openvino.Type.nf4, codes.shape, scale, dense)

    def compiled(encoded: Encoded, dynamic_group: int) -> tuple[Any, np.ndarray]:
        """A request, and the memory that its weight may still be in: each has its own."""
        memory = encoded.packed.copy()
        constant = openvino.op.Constant(openvino.Tensor(memory, openvino.Shape(encoded.shape), encoded.dtype))
        x = op.parameter([m, k], np.float32)
        w = op.multiply(op.convert(constant, np.float32), op.constant(encoded.scale))
        y = op.matmul(x, op.reshape(w, op.constant(np.array([n, k])), False), False, True)
        settings = {
            "INFERENCE_NUM_THREADS": problem.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": dynamic_group,
        }
        return core.compile_model(openvino.Model([y], [x]), "CPU", settings).create_infer_request(), memory

    def make(weight: str, group: str, encode: Callable[..., Encoded], activations: str) -> Product:
        distinct = list(map(encode, problem.weights))
        each = distinct[0].packed.nbytes + distinct[0].scale.nbytes
        duplicate = functools.partial(compiled, dynamic_group=GROUP if activations == "int8" else 0)

        def call(item: tuple[Any, np.ndarray]) -> Any:
            return item[0].infer([problem.x], share_inputs=True, share_outputs=True)[0]

        contender = Contender(call, ring(distinct, duplicate, each, problem))
        return Product("OpenVINO", weight, group, activations, each, contender, lambda: distinct[0].dense)

    yield functools.partial(make, "INT8, a scale per column", INT8, int8, "float32")
    yield functools.partial(make, "INT4, groups of 64", BITS4, int4, "float32")
    yield functools.partial(make, "INT4, groups of 64", BITS4, int4, "int8")
    yield functools.partial(make, "NF4, groups of 64", BITS4, nf4, "float32")


# The packages that each library needs; a library without an entry is not compared.
LIBRARIES: dict[Callable[[Problem], Products], tuple[str, ...]] = {
    with_jax: ("jax",),
    with_torch: ("torch",),
    with_bitsandbytes: ("bitsandbytes", "torch"),
    with_torchao: ("torchao", "torch"),
    with_onnxruntime: ("onnxruntime", "onnx"),
    with_openvino: ("openvino",),
}

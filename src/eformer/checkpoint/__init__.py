"""Checkpoints of dense and quantized arrays: safetensors, also as bitsandbytes writes it, and GGUF."""

from eformer._src.checkpoint.adapter import load_adapter as load_adapter
from eformer._src.checkpoint.adapter import save_adapter as save_adapter
from eformer._src.checkpoint.arrays import ArrayInfo as ArrayInfo
from eformer._src.checkpoint.file import CheckpointError as CheckpointError
from eformer._src.checkpoint.gguf.codecs import DecodedWarning as DecodedWarning
from eformer._src.checkpoint.gguf.codecs import GgufCodec as GgufCodec
from eformer._src.checkpoint.gguf.codecs import register_gguf_codec as register_gguf_codec
from eformer._src.checkpoint.layouts.bitsandbytes import BitsandbytesCodec as BitsandbytesCodec
from eformer._src.checkpoint.layouts.bitsandbytes import register_bitsandbytes_codec as register_bitsandbytes_codec
from eformer._src.checkpoint.load import load as load
from eformer._src.checkpoint.open import Checkpoint as Checkpoint
from eformer._src.checkpoint.open import open_checkpoint as open_checkpoint
from eformer._src.checkpoint.saving.rewrite import NotRunnableWarning as NotRunnableWarning
from eformer._src.checkpoint.saving.rewrite import convert as convert
from eformer._src.checkpoint.saving.rewrite import quantize_checkpoint as quantize_checkpoint
from eformer._src.checkpoint.saving.save import save as save
from eformer._src.compat.checkpoint import save_bitsandbytes as save_bitsandbytes
from eformer._src.compat.checkpoint import save_gguf as save_gguf
from eformer._src.public import name_publicly as _name_publicly

_name_publicly(globals(), below="eformer.model")

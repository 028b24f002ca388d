"""Checkpoints of dense and quantized arrays: safetensors, also as bitsandbytes writes it, and GGUF."""

import importlib as _importlib
import pkgutil as _pkgutil

from eformer._saving import atomic_file as atomic_file

from ._adapter import load_adapter as load_adapter
from ._adapter import save_adapter as save_adapter
from ._adapter_config import adapter_facts as adapter_facts
from ._arrays import ArrayInfo as ArrayInfo
from ._bitsandbytes import BitsandbytesCodec as BitsandbytesCodec
from ._bitsandbytes import register_bitsandbytes_codec as register_bitsandbytes_codec
from ._file import CheckpointError as CheckpointError
from ._gguf_codecs import GgufCodec as GgufCodec
from ._gguf_codecs import register_gguf_codec as register_gguf_codec
from ._gguf_entry import DecodedWarning as DecodedWarning
from ._gguf_write import save_gguf as save_gguf
from ._load import load as load
from ._open import Checkpoint as Checkpoint
from ._open import open_checkpoint as open_checkpoint
from ._paths import SUFFIXES as SUFFIXES
from ._paths import check_suffix as check_suffix
from ._rewrite import convert as convert
from ._rewrite import quantize_checkpoint as quantize_checkpoint
from ._write import save as save
from ._write import save_bitsandbytes as save_bitsandbytes

for _module in _pkgutil.iter_modules(__path__):  # a layout registers itself when its file is imported
    if _module.name.startswith("_layout_"):
        _importlib.import_module(f"{__name__}.{_module.name}")

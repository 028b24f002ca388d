"""The element types of safetensors, and the NumPy types that hold them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

# Name in the file -> NumPy type. Types of less than a byte (F4, F6_E2M3, F6_E3M2) are left out: the format does not
# define the order of their bits.
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "I16": np.int16,
        "U16": np.uint16,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "I32": np.int32,
        "U32": np.uint32,
        "F32": np.float32,
        "C64": np.complex64,
        "F64": np.float64,
        "I64": np.int64,
        "U64": np.uint64,
    }.items()
}
NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
BY_NUMPY_NAME: dict[str, np.dtype] = {dtype.name: dtype for dtype in NAMES}


def dtype_name(dtype: DTypeLike, tensor: str) -> str:
    """The name of a dtype in the file; a TypeError names the tensor if the format has no such dtype."""
    try:
        return NAMES[np.dtype(dtype)]
    except (KeyError, TypeError):
        known = ", ".join(BY_NUMPY_NAME)
        raise TypeError(f"{tensor!r} is {dtype}, which safetensors can't hold; it has {known}") from None


def narrowed(name: str, array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """`array` in a dtype of less range; a ValueError if a finite value would become infinite."""
    dtype = np.dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(dtype, copy=False)
    lost = np.isinf(made) & np.isfinite(array)
    if np.any(lost):
        peak = float(np.max(np.abs(array), initial=0, where=lost))
        raise ValueError(f"{name!r} has values up to {peak:g}, which {dtype.name} can't hold")
    return made

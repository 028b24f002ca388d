"""What XLA must be told of a GPU to compile for it where there is none."""

from __future__ import annotations

from typing import Any


def _target(name: str, major: int, extension: str, **numbers: Any) -> str:
    fields = "\n".join(f"  {key}: {value}" for key, value in numbers.items())
    return f"""gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: 0 feature_extension: {extension} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
{fields}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


# Of NVIDIA's data sheets: processors and their units, memory and its bytes a second, caches.
TARGETS = {
    "A100": _target(
        "NVIDIA A100-SXM4-80GB",
        8,
        "NONE",
        core_count=108,
        fpus_per_core=64,
        shared_memory_per_core=167936,
        shared_memory_per_block_optin=166912,
        l2_cache_size=41943040,
        memory_bandwidth=2039040000000,
        clock_rate_ghz=1.41,
        device_memory_size=85100068864,
    ),
    "H100": _target(
        "NVIDIA H100 80GB HBM3",
        9,
        "ACCELERATED_FEATURES",
        core_count=132,
        fpus_per_core=128,
        shared_memory_per_core=233472,
        shared_memory_per_block_optin=232448,
        l2_cache_size=52428800,
        memory_bandwidth=3352320000000,
        clock_rate_ghz=1.98,
        device_memory_size=84942979072,
    ),
}

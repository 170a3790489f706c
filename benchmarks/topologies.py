"""Device meshes of machines that are not here, for their real compilers.

H200 meshes need `jax[cuda13]`, TPU meshes `jax[tpu]`; no device is needed. JAX should be told
`jax_platforms=cpu`, or it looks for one.
"""

import math
import re
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from parallel.mesh import AXES

_GPUS_A_HOST = 8
# Public figures of the H200 SXM (141 GB), in the text form that the GPU compiler reads.
_H200_TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 150754820096
}
"""


def target_mesh(target: str, data: int, points: int, heads: int) -> Mesh:
    """A mesh of a machine that is not here.

    Args:
        target: `h200:8` (that many GPUs), or `tpu:v5e:8x8` (a slice by its generation and shape).
        data: size of the mesh axis `data`; the three multiply to the number of devices, and one may
            be -1 for all that are left.
        points: size of the mesh axis `points`.
        heads: size of the mesh axis `heads`.

    Raises:
        ValueError: the target is not known, or the axes do not multiply to its devices.
    """
    sizes = (data, points, heads)
    gpu = re.fullmatch(r"h200:(\d+)", target)
    tpu = re.fullmatch(r"tpu:(v\w+:\d+(?:x\d+)+)", target)
    if gpu:
        count = int(gpu.group(1))
        hosts, local = max(1, count // _GPUS_A_HOST), min(count, _GPUS_A_HOST)
        if not count or hosts * local != count:
            raise ValueError(
                f"target: expected at most {_GPUS_A_HOST} GPUs or a multiple; got {target!r}"
            )
        topology = _topology(
            "h200", "cuda", target_config=_H200_TARGET, topology=f"1x{hosts}x{local}"
        )
    elif tpu:
        topology = _topology(tpu.group(1), "tpu")
    else:
        raise ValueError(f"target: expected h200:COUNT or tpu:GENERATION:SHAPE; got {target!r}")
    devices = topology.devices
    if sizes.count(-1) == 1:
        left = len(devices) // -math.prod(sizes)
        data, points, heads = (left if size == -1 else size for size in sizes)
        sizes = (data, points, heads)
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh: expected sizes that multiply to the {len(devices)} devices of {target}; "
            f"got data={data} x points={points} x heads={heads}"
        )
    return Mesh(np.array(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _topology(name: str, platform: str, **options: str) -> Any:
    try:
        return topologies.get_topology_desc(name, platform, **options)
    except (NotImplementedError, RuntimeError) as error:
        extra = {"cuda": "cuda13", "tpu": "tpu"}[platform]
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"target: expected a machine that jax[{extra}], installed, compiles for, as by "
            f"pip install -c constraints.txt -e '.[{extra}]'; got {name} ({reason})"
        ) from error

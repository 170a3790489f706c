"""One of four processes with two devices each, for `test_store_processes`.

`python four_processes.py PORT RANK LARGE SMALL` prints, as JSON, how much it read of one store,
what its devices hold of that, and the moments of another that all of them agree on.
"""

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np

import parallel
from experiments.configuration.schema import StoreConfig, StreamConfig
from experiments.data.batch import Batch, Windows
from experiments.data.moments import Moments
from experiments.data.placement import Placement
from experiments.meshes.dataset import StoreSplit
from experiments.meshes.store import Store

BATCH = 4
MESHES = [dict(data=1, points=8), dict(data=2, points=4), dict(data=4, points=2)]
ARRAYS = ("volume_mesh_centers", "volume_direction", "volume_fields")
SIZES = (6, 2)


def split_of(store: str | Path, samples: int = BATCH) -> StoreSplit:
    """The first samples of a store, whole."""
    centers, direction, fields = ARRAYS
    stream = StreamConfig([centers], [direction], local_positions=centers, targets=[fields])
    config = StoreConfig(path=str(store), streams={"volume": stream}, global_embedding=["angle"])
    return StoreSplit(list(Store(Path(store)))[:samples], config)


def held(batch: Batch) -> dict[str, str]:
    """A digest of each part of the arrays of a batch that lies on a device of this process."""
    parts = {}
    for path, array in jax.tree_util.tree_leaves_with_path(batch):
        for shard in array.addressable_shards:
            place = [(part.start, part.stop) for part in shard.index]
            digest = hashlib.sha256(np.ascontiguousarray(shard.data)).hexdigest()
            parts[f"{jax.tree_util.keystr(path)}{place}"] = digest
    return parts


def bytes_read() -> int:
    """Bytes that this process has read so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def as_lists(moments: dict[str, Moments]) -> dict[str, list]:
    """Moments as JSON has them; no digit is lost."""
    return {
        name: [of.count, *(part.tolist() for part in (of.mean, of.squares, of.least, of.greatest))]
        for name, of in moments.items()
    }


def main(port: str, rank: str, large: str, small: str) -> None:
    """Reads a batch on each mesh, and goes through the samples of the small store."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=4, process_id=int(rank))
    split = split_of(large)
    # Decoders are loaded by the first that needs them.
    split.read(0, Windows((slice(0, 1),)))
    report = {"read": [], "held": [], "moments": [], "groups": []}
    for axes in MESHES:
        with jax.set_mesh(mesh := parallel.make_mesh(**axes)):
            report["groups"].append(
                [[d.process_index for d in row] for row in mesh.devices[..., 0]]
            )
            placement = Placement.of(split, BATCH, None)
            before = bytes_read()
            samples = {row: placement.read(split, row, row) for row in placement.rows}
            report["read"].append(bytes_read() - before)
            report["held"].append(held(placement.place(samples)))
    for samples in SIZES:
        report["moments"].append(as_lists(split_of(small, samples).moments()))
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])

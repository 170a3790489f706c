"""What is checked of an HDF5 data set before it is read: where its values lie, and their size."""

import math

import h5py

from experiments.formats.limits import (
    DEFLATE_RATIO,
    UNPACKED_UNSEEN,
    inflates_within,
    machine_memory,
)


def require_own_values(name: str, dataset: h5py.Dataset) -> None:
    """Refuses a data set whose values are those of other files, which its file only names.

    Args:
        name: of the data set, for the error.
        dataset: it.

    Raises:
        ValueError: they are.
    """
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"array {name!r} with its values in another file")


def require_chunks(name: str, dataset: h5py.Dataset) -> None:
    """Refuses chunks that are longer, or unpack to more, than they say.

    Args:
        name: of the data set, for the error.
        dataset: it.

    Raises:
        ValueError: a chunk takes more than the machine's memory, or unpacks to more than the
            values of a chunk.
    """
    if dataset.chunks is None or not dataset.size:
        return
    most = math.prod(dataset.chunks) * dataset.dtype.itemsize
    if most > machine_memory():
        raise ValueError(f"chunks of {most} bytes in array {name!r}")
    filters = dataset.id.get_create_plist()
    kinds = [filters.get_filter(i)[0] for i in range(filters.get_nfilters())]
    if h5py.h5z.FILTER_DEFLATE not in kinds:
        return
    if kinds.count(h5py.h5z.FILTER_DEFLATE) > 1:
        raise ValueError(f"array {name!r} packed more than once")
    large: list[tuple[int, ...]] = []

    def look(chunk: h5py.h5d.StoreInfo) -> None:
        # What deflate cannot make smaller, it makes hardly longer.
        if chunk.size > most + most // 8 + 2**10:
            raise ValueError(f"a chunk of {chunk.size} bytes for {most} in array {name!r}")
        if chunk.size * DEFLATE_RATIO > UNPACKED_UNSEEN:
            large.append(chunk.chunk_offset)

    dataset.id.chunk_iter(look)
    for place in large:
        _, content = dataset.id.read_direct_chunk(place)
        if not inflates_within(content, most):
            raise ValueError(f"a chunk that unpacks to more than {most} bytes in array {name!r}")

"""What a model is given of one sample, and the widths and names of that."""

import numpy as np

from experiments.configuration.schema import StreamConfig
from experiments.data.batch import Cloud
from experiments.data.description import Description, StreamDescription
from experiments.meshes.rows import Rows
from experiments.meshes.wiring import Wired


def searched_entries(stream: StreamConfig) -> list[str]:
    """Entries of the coordinates that neighbours of a stream are searched by."""
    return stream.embedding if stream.local_positions is None else [stream.local_positions]


def cloud(sample: Wired, stream: StreamConfig, rows: Rows, window: slice = slice(None)) -> Cloud:
    """A window of one stream; its targets only where the sample has them."""
    positions = [] if stream.local_positions is None else [stream.local_positions]
    targets = stream.targets if sample.has(stream.targets) else []
    parts = [stream.embedding, targets, stream.fx, positions]
    # Together, so that an array that several of them name is read once.
    values = sample.values([name for part in parts for name in part], rows, window)
    ends = np.cumsum([len(sample.columns(part)) for part in parts])
    embedding, *rest = np.split(values, ends[:-1], axis=1)
    target, fx, places = (
        each if part else None for part, each in zip(parts[1:], rest, strict=True)
    )
    return Cloud(rows.count, embedding, target, fx, places)


def _kind(stream: StreamConfig) -> str:
    return stream.embedding[0].partition("_")[0]


def tokens(sample: Wired) -> np.ndarray | None:
    """Global quantities as one token, or `None`."""
    names = sample.config.global_embedding
    return sample.numbers(names) if names else None


def describe(sample: Wired) -> Description:
    """Widths and names of what is read of a sample.

    Raises:
        ValueError: it lacks something.
    """
    config = sample.config
    streams = tuple(
        StreamDescription(
            name,
            len(sample.columns(stream.embedding)),
            len(sample.columns(stream.fx)),
            sample.columns(stream.targets),
            positions=stream.local_positions is not None,
            kind=_kind(stream),
            targets=sample.explicit(stream.targets),
            on_cells=sample.arrays.attributes.get(f"{_kind(stream)}_on_cells", True),
        )
        for name, stream in config.streams.items()
    )
    token = tokens(sample)
    return Description(
        streams,
        len(sample.columns(config.geometry)) or None,
        None if token is None else token.shape,
    )

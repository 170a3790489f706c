"""Fields of one sample on all of its points, however many, a part of them at a time.

The result is that of the whole cloud, see `flare_jax.phases`. What the layers made of it, a few
thousand numbers, can be kept, and any further point be predicted from that alone.
"""

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key, PyTree

from experiments.data.batch import Batch, Cloud, Sample, Statistics, Stream
from experiments.data.neighborhoods import nearest_within
from experiments.files import write_atomically
from experiments.fingerprints import fingerprints
from experiments.formats.npy_files import read_npz
from experiments.models import Model
from experiments.prediction import COORDINATES, model_inputs, positions
from flare_jax.phases import Enter, Leave, Phases
from geotransolver_jax import GeoTransolver
from parallel.neighbors import Neighbors
from parallel.on_host import points_to_host
from parallel.placement import place, to_host
from parallel.points import padded_size

# Points that go through a layer at a time, for each device that shares them.
POINTS_AT_ONCE = 2**17


class CloudState(NamedTuple):
    """All that further points of a sample need to be predicted.

    Attributes:
        latents: of all layers, of each stream.
        weights: a number that tells the weights of the model that made them.
        context: of GeoTransolver.
        geometry: points of the geometry, as the data has them.
        global_embedding: tokens of global quantities.
    """

    latents: tuple[Float[np.ndarray, "L B H S D"], ...]
    weights: int
    context: Float[np.ndarray, "B H S_c D_c"] | None = None
    geometry: Float[np.ndarray, "M C_geo"] | None = None
    global_embedding: Float[np.ndarray, "G C_g"] | None = None

    def save(self, path: Path) -> None:
        """Writes it as an `.npz` file."""
        arrays: dict[str, Any] = {f"latents_{i}": values for i, values in enumerate(self.latents)}
        rest = self._asdict()
        del rest["latents"]
        arrays |= {name: values for name, values in rest.items() if values is not None}
        write_atomically(path, lambda temporary: np.savez(temporary, **arrays))

    @classmethod
    def load(cls, path: Path) -> "CloudState":
        """Reads what `save` has written.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is something else.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path}: expected the state of a cloud; there is no such file")
        try:
            arrays = read_npz(path)
            count = sum(name.startswith("latents_") for name in arrays)
            latents = tuple(arrays.pop(f"latents_{i}") for i in range(count))
            if not latents:
                raise ValueError("no latents")
            return cls(latents, int(arrays.pop("weights")), **arrays)
        except Exception as error:  # damaged archives reach many decoders
            raise ValueError(f"{path}: expected the state of a cloud; got {error!r}") from error


class WholeCloud:
    """A trained model, compiled for parts of clouds on the mesh of the context."""

    def __init__(
        self, model: Model, statistics: Statistics, points_at_once: int | None = None
    ) -> None:
        """Takes the weights that the model has now.

        Args:
            model: of clouds.
            statistics: by which it normalizes.
            points_at_once: points of a part; by default `POINTS_AT_ONCE` for each device.

        Raises:
            ValueError: the model is of a structured grid, whose points come together only.
        """
        if model.structured_shape is not None:
            raise ValueError(
                "model: expected one of clouds; got one of a grid, which convolves all its points"
            )
        self._model, self._statistics = model, statistics
        self._phases = Phases(model)
        self._graph, self._weights = nnx.split(model)
        leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        numbers = fingerprints({jax.tree_util.keystr(path): leaf for path, leaf in leaves})
        self._number = zlib.crc32(json.dumps(numbers, sort_keys=True).encode())
        self._at_once = padded_size(points_at_once or POINTS_AT_ONCE * padded_size(1))
        self._enter = jax.jit(self._entered, static_argnums=1)
        self._leave = jax.jit(self._left, static_argnums=1)
        self._context = jax.jit(self._made_context)

    def predict(
        self, sample: Sample, key: Key[Array, ""] | None = None
    ) -> tuple[list[Float[np.ndarray, "N C_out"]], CloudState]:
        """The fields of a sample on all of its points, in the units of the targets.

        Args:
            sample: whole, see `Sample`; without targets.
            key: randomness of dropouts; without it there are none.

        Returns:
            The fields of each stream, and what further points can be predicted from.
        """
        keys = [None] * (1 + len(sample.clouds))
        if key is not None:
            keys = list(jax.random.split(key, 1 + len(sample.clouds)))
        around = self._geometry_of(sample)
        context = self._context_of(sample, around, keys[0])
        fields, states = [], []
        for stream, cloud in enumerate(sample.clouds):
            parts, enter, leave, out = self._passes(stream, cloud, around)
            states.append(
                self._phases.latents_of_cloud(parts, enter, leave, context, keys[1 + stream])
            )
            fields.append(out)
        held = None if context is None else to_host(context)
        return fields, CloudState(
            tuple(states), self._number, held, sample.geometry, sample.global_embedding
        )

    def predict_from(
        self, state: CloudState, stream: int, cloud: Cloud
    ) -> Float[np.ndarray, "N C_out"]:
        """The fields of further points of a stream, from what is known of its cloud.

        Raises:
            ValueError: it was made by other weights.
        """
        if state.weights != self._number:
            raise ValueError(
                "state: expected one that these weights have made; got one of another run or step"
            )
        sample = Sample((), state.geometry, 0, state.global_embedding)
        around = self._geometry_of(sample)
        parts, enter, leave, out = self._passes(stream, cloud, around)
        self._phases.points_alone(parts, enter, leave, state.latents[stream], state.context)
        return out

    def _passes(
        self, stream: int, cloud: Cloud, around: Batch
    ) -> tuple[int, Enter, Leave, np.ndarray]:
        total = len(cloud.embedding)
        size = min(self._at_once, padded_size(_rounded(total)))
        width = len(self._statistics.streams[stream].target.mean)
        out = np.empty((total, width), np.float32)

        def enter(number: int) -> tuple[Array, Array | None]:
            rows = slice(number * size, (number + 1) * size)
            held = (getattr(cloud, name) for name in _PARTS)
            parts: Any = (None if each is None else _part(each, rows, size) for each in held)
            part = Stream(*parts)
            mask = place(np.arange(rows.start, rows.stop)[None] < total)
            part = part._replace(mask=mask)
            return self._enter(self._weights, stream, part, around, self._statistics), mask

        def leave(number: int, x: Array) -> None:
            fields = points_to_host(self._leave(self._weights, stream, x, self._statistics))[0]
            start = number * size
            out[start : start + size] = fields[: total - start]

        return -(-total // size), enter, leave, out

    def _geometry_of(self, sample: Sample) -> Batch:
        """Geometry and tokens of a sample on the devices."""
        geometry = mask = tokens = None
        if sample.geometry is not None:
            total = len(sample.geometry)
            size = padded_size(_rounded(total))
            geometry = _part(sample.geometry, slice(0, size), size)
            mask = place(np.arange(size)[None] < total)
        if sample.global_embedding is not None:
            tokens = place(sample.global_embedding[None], split_points=False)
        return Batch((), geometry, mask, tokens)

    def _context_of(self, sample: Sample, around: Batch, key: Array | None) -> Array | None:
        if not isinstance(self._model, GeoTransolver):
            return None
        clouds = None
        if self._model.include_local_features and sample.geometry is not None:
            clouds = [
                self._around_geometry(stream, cloud, sample.geometry)
                for stream, cloud in enumerate(sample.clouds)
            ]
        return self._context(self._weights, clouds, around, self._statistics, key)

    def _around_geometry(
        self, stream: int, cloud: Cloud, geometry: np.ndarray
    ) -> tuple[Array, Array, Neighbors]:
        """The points of a stream near the geometry, and which are near each of its points.

        Other points of the cloud, however many, do not come into the context.
        """
        model: Any = self._model
        scales = model.context.local[stream]
        points = np.ascontiguousarray(positions(cloud), np.float32)
        queries = np.ascontiguousarray(geometry[:, :COORDINATES], np.float32)
        found = nearest_within(queries, points, scales.radius, scales.count)
        used = np.unique(found.indices[found.indices >= 0])
        # As many points as neighbours are looked for, if there are: fewer mean another thing.
        wanted = min(len(points), scales.count)
        if len(used) < wanted:
            rest = np.setdiff1d(np.arange(len(points)), used)[: wanted - len(used)]
            used = np.sort(np.concatenate([used, rest]))
        indices = np.where(found.indices < 0, -1, np.searchsorted(used, found.indices))
        size = padded_size(_rounded(len(queries)))
        extra = [(0, size - len(queries)), (0, 0)]
        near = Neighbors(
            place(np.pad(indices, extra, constant_values=-1)[None].astype(np.int32)),
            place(np.pad(found.distances, extra, constant_values=np.inf)[None]),
        )
        length = padded_size(_rounded(len(used)))
        mask = place(np.arange(length)[None] < len(used))
        return _part(points[used], slice(0, length), length), mask, near

    def _entered(
        self, weights: PyTree, stream: int, part: Stream, around: Batch, statistics: Statistics
    ) -> Array:
        model: Any = nnx.merge(self._graph, weights)
        statistics = statistics._replace(streams=(statistics.streams[stream],))
        inputs = model_inputs(model, statistics, around._replace(streams=(part,)))
        if not isinstance(model, GeoTransolver):
            return model.enter(inputs["fx"], inputs["embedding"], part.mask)
        features = None
        if model.include_local_features:
            scales, geometry = model.context.local[stream], inputs["geometry"]
            found = scales.nearest(inputs["local_positions"], geometry, around.geometry_mask)
            arguments = stream, geometry, around.geometry_mask, found
            features = model.context.local_features(*arguments)
        return model.enter(stream, inputs["local_embedding"], part.mask, features)

    def _left(self, weights: PyTree, stream: int, x: Array, statistics: Statistics) -> Array:
        model: Any = nnx.merge(self._graph, weights)
        own = (stream,) if isinstance(model, GeoTransolver) else ()
        fields = model.leave(*own, x, None).astype(np.float32)
        return statistics.streams[stream].target.restore(fields)

    def _made_context(
        self, weights: PyTree, clouds: Any, around: Batch, statistics: Statistics, key: Array | None
    ) -> Array | None:
        model: Any = nnx.merge(self._graph, weights)
        statistics = statistics._replace(streams=())
        inputs = model_inputs(model, statistics, around)
        geometry = inputs.get("geometry")
        points = found = None
        masks: tuple[Array | None, ...] = ()
        if clouds is not None:
            points, masks, found = zip(*clouds, strict=True)
        return model.make_context(
            points, masks, found, geometry, around.geometry_mask, inputs["global_embedding"], key
        )


_PARTS = ("embedding", "target", "fx", "positions")


def _part(values: np.ndarray, rows: slice, size: int) -> Array:
    """A batch of one sample: some rows of an array, padded to `size`."""
    part = values[rows]
    return place(np.pad(part, [(0, size - len(part)), (0, 0)])[None])


def _rounded(count: int) -> int:
    """The next power of two: clouds of many lengths share a few programs."""
    return 1 << max(0, count - 1).bit_length()


def dropout_moments(
    whole: WholeCloud, sample: Sample, samples: int, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Mean and standard deviation of the fields over draws of the dropouts, of each stream.

    Args:
        whole: a model that has dropouts.
        sample: whole; without targets.
        samples: number of draws, at least 2.
        seed: of the draws.
    """
    means: list = [0.0] * len(sample.clouds)
    squares: list = [0.0] * len(sample.clouds)
    for draw in range(samples):
        fields, _ = whole.predict(sample, jax.random.fold_in(jax.random.key(seed), draw))
        for i, values in enumerate(fields):
            step = values.astype(np.float64) - means[i]
            means[i] = means[i] + step / (draw + 1)
            squares[i] = squares[i] + step * (values - means[i])
    return [
        (mean.astype(np.float32), np.sqrt(square / (samples - 1)).astype(np.float32))
        for mean, square in zip(means, squares, strict=True)
    ]

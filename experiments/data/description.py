"""Names and widths of what a data set holds: all that a model is built by, kept with its run."""

import dataclasses
from pathlib import Path
from typing import Any

from experiments.files import write_json
from experiments.formats.limits import read_json
from experiments.messages import one_line

FILE = "dataset.json"


@dataclasses.dataclass(frozen=True)
class StreamDescription:
    """One cloud that fields are predicted on.

    Attributes:
        name: of the stream.
        embedding: width of the embedding.
        fx: width of the input values; 0 without.
        fields: names of the predicted fields.
        positions: whether coordinates come beside the embedding.
        kind: of a store's points, `surface` or `volume`; `None` elsewhere.
        targets: the fields as entries of a store, `surface_fields.p`; none elsewhere.
        on_cells: whether a store's points are the centres of cells.
    """

    name: str
    embedding: int
    fx: int
    fields: tuple[str, ...]
    positions: bool = False
    kind: str | None = None
    targets: tuple[str, ...] = ()
    # Of a mesh that is sampled at its points as much is learned.
    on_cells: bool = dataclasses.field(default=True, compare=False)


@dataclasses.dataclass(frozen=True)
class Description:
    """A data set without its samples.

    Attributes:
        streams: the clouds that fields are predicted on.
        geometry: width of the geometry; `None` without.
        global_embedding: tokens and their width; `None` without.
        structured_shape: shape of the grid of all samples, if they have one.
    """

    streams: tuple[StreamDescription, ...]
    geometry: int | None = None
    global_embedding: tuple[int, int] | None = None
    structured_shape: tuple[int, ...] | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields of all streams, with their stream's where there are several."""
        several = len(self.streams) > 1
        return tuple(
            f"{stream.name}/{field}" if several else field
            for stream in self.streams
            for field in stream.fields
        )

    def widths(self) -> dict[str, int]:
        """Widths of what has statistics, by name: `0.embedding`, `0.targets`, `0.fx`, ..."""
        widths: dict[str, int] = {}
        for i, stream in enumerate(self.streams):
            widths |= {f"{i}.embedding": stream.embedding, f"{i}.targets": len(stream.fields)}
            widths |= {f"{i}.fx": stream.fx} if stream.fx else {}
        widths |= {} if self.geometry is None else {"geometry": self.geometry}
        tokens = self.global_embedding
        return widths if tokens is None else widths | {"global_embedding": tokens[1]}

    def difference(self, other: "Description") -> str | None:
        """What `other` has that this has not; `None` where they are alike."""
        mine, theirs = self._facts(), other._facts()
        for name, fact in mine.items():
            if theirs.get(name) != fact:
                return f"{name} {_words(theirs.get(name))} instead of {_words(fact)}"
        return None

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"streams": tuple(stream.name for stream in self.streams)}
        for stream in self.streams:
            compared = [each.name for each in dataclasses.fields(stream) if each.compare]
            facts |= {f"{stream.name}.{name}": getattr(stream, name) for name in compared}
        names = ("geometry", "global_embedding", "structured_shape")
        return facts | {name: getattr(self, name) for name in names}

    def _require_types(self) -> None:
        """Refuses what models cannot be built by, nor files be named after."""
        numbers = [self.geometry or 0, *(self.global_embedding or ())]
        numbers += self.structured_shape or ()
        texts = []
        for stream in self.streams:
            numbers += [stream.embedding, stream.fx]
            texts += [stream.name, stream.kind or "", *stream.fields, *stream.targets]
            if {"/", "\\"} & {*stream.name, *(stream.kind or "")}:
                raise ValueError(f"the name {stream.name!r} of a stream")
        for number in numbers:
            if type(number) is not int or number < 0:
                raise ValueError(f"{number!r} for a size")
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"{text!r} for a name")

    def save(self, folder: Path) -> None:
        """Writes it into a run's folder."""
        write_json(folder / FILE, dataclasses.asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Description":
        """Reads that of a run.

        Raises:
            FileNotFoundError: there is none.
            ValueError: the file is damaged.
        """
        path = folder / FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path}: expected the description of a run's data; got none")
        content = read_json(path, "a description of data")
        try:
            streams = tuple(
                StreamDescription(
                    **stream | {name: tuple(stream[name]) for name in ("fields", "targets")}
                )
                for stream in content.pop("streams")
            )
            rest: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in content.items()
            }
            found = cls(streams, **rest)
            found._require_types()
            return found
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path}: expected a description of data; got {one_line(error)}"
            ) from error


def _words(fact: Any) -> str:
    return ", ".join(map(str, fact)) if isinstance(fact, tuple) else str(fact)

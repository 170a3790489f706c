"""Work on an axis in chunks, so that what is computed for all its entries never exists at once."""

from collections.abc import Callable
from typing import TypeVar, overload

import jax
from jax.core import min_dim
from jax.export import is_symbolic_dim

from parallel import mesh as mesh_lib
from parallel.annotations import Position, Size
from parallel.mesh import DATA, HEADS

Carry = TypeVar("Carry")
Tied = TypeVar("Tied")

# Scores (float32 numbers) that one chunk may hold on a device. A CPU wants them in its cache; an
# accelerator wants few, large kernels.
_SCORES_A_CHUNK = {"cpu": 2**20, "gpu": 2**24, "tpu": 2**24}
# Numbers of chunks among which one is looked for that divides the entries.
_CHUNKS_TRIED = 1000


def chunk_length(total: Size, batch: Size, heads: int, scores_an_entry: int) -> Size:
    """Length of the chunks in which to walk over an axis of attention scores.

    Args:
        total: entries of the axis on one shard of the points; symbolic where a program is exported
            for any number of them.
        batch: samples of the whole batch; where it is symbolic a chunk is as long as for one.
        heads: all attention heads.
        scores_an_entry: scores that an entry has in each sample and head.

    Returns:
        A length such that the scores of a chunk stay within a device's budget.
    """
    groups = mesh_lib.axis_size(DATA) * mesh_lib.axis_size(HEADS)
    samples = 1 if is_symbolic_dim(batch) else batch
    scores_an_entry = max(1, samples * heads * scores_an_entry // groups)
    budget = _SCORES_A_CHUNK.get(mesh_lib.platform(), _SCORES_A_CHUNK["gpu"])
    longest = max(1, budget // scores_an_entry)
    if is_symbolic_dim(total):
        return min_dim(longest, total)
    longest = max(1, min(total, longest))
    # Equal chunks, if not many more: a shorter last one is compiled apart.
    fewest = max(1, -(-total // longest))
    most = fewest + min(fewest // 2, _CHUNKS_TRIED)
    equal = (count for count in range(fewest, most + 1) if total % count == 0)
    return max(1, -(-total // next(equal, fewest)))


def for_chunks(total: Size, length: Size, body: Callable, carry: Carry) -> Carry:
    """Folds `carry = body(start, size, carry)` over consecutive chunks of an axis.

    `start` may be traced; `size` is a Python integer, or symbolic where `total` is: `length`, or
    less in the last chunk.
    """
    if is_symbolic_dim(total):
        # Whether entries are left behind chunks of one length is not known. But one always is.
        full = (total - 1) // length
        carry = jax.lax.fori_loop(0, full, lambda i, c: body(i * length, length, c), carry)
        return body(full * length, total - full * length, carry)
    full, rest = divmod(total, length)
    if full == 1:
        carry = body(0, length, carry)
    elif full:
        carry = jax.lax.fori_loop(0, full, lambda i, c: body(i * length, length, c), carry)
    if rest:
        carry = body(full * length, rest, carry)
    return carry


@overload
def take(array: jax.Array, start: Position, size: Size, axis: int) -> jax.Array: ...
@overload
def take(array: None, start: Position, size: Size, axis: int) -> None: ...
def take(array: jax.Array | None, start: Position, size: Size, axis: int) -> jax.Array | None:
    """Entries `start : start + size` of an axis; `None` stays `None` (a mask that is not there)."""
    if array is None:
        return None
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis)


def put(array: jax.Array, chunk: jax.Array, start: Position, axis: int) -> jax.Array:
    """`array` with a chunk of an axis replaced, in place inside a compiled loop."""
    return jax.lax.dynamic_update_slice_in_dim(array, chunk.astype(array.dtype), start, axis)


def tie(positions: Tied, array: jax.Array) -> Tied:
    """A mask or positions, as if they were computed from `array`; `None` stays `None`.

    In the gradient of a scan over layers JAX computes once, before the scan, what depends on no
    layer. Of a mask that would be its broadcast to the scores of every chunk, all of them kept.
    """
    return jax.lax.optimization_barrier((positions, array))[0]

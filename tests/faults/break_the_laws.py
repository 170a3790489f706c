"""`python tests/faults/break_the_laws.py [NAME ...]`: plants faults; the tests must find each.

Every fault breaks one law of docs/laws.md in a copy of the project, by a change of one place of its
code, and the tests named beside it are run there. All take a minute and a half on two cores; what
is left is a line for each fault, and the exit code 1 if one was not found.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("parallel", "flare_jax", "geotransolver_jax", "experiments", "configs", "benchmarks")


class Fault(NamedTuple):
    """A place of the code, what stands there, what is planted, and who should find it."""

    law: int
    file: str
    there: str
    planted: str
    tests: str


FAULTS = {
    "shards-do-not-merge": Fault(
        1,
        "parallel/softmax.py",
        "    if axis is None:\n        return sums\n    maximum",
        "    return sums\n    maximum",
        "test_flare.py -k float32_is_the_same_on_a_mesh",
    ),
    "gradient-without-its-sum": Fault(
        1,
        "parallel/walk.py",
        "d_weights = all_sum(d_weights, mesh_lib.split_axes(*OVER), lead=1)",
        "pass",
        "test_streaming.py",
    ),
    "gradient-of-latents-without-its-sum": Fault(
        1,
        "parallel/walk.py",
        "d_latents = all_sum(d_latents, mesh_lib.split_axes(POINTS), lead=2)",
        "pass",
        "test_streaming.py",
    ),
    "noise-by-the-place-in-a-shard": Fault(
        1,
        "parallel/streaming/shards.py",
        "PLACES = Places._make((P(DATA), P(POINTS)))",
        "PLACES = Places._make((P(DATA), P()))",
        "test_geotransolver.py -k noise",
    ),
    "numbers-drawn-with-the-padding": Fault(
        1,
        "parallel/random.py",
        "jax.random.uniform(key, (points, batch, *rest), dtype).swapaxes(0, 1)",
        "jax.random.uniform(key, (batch, points, *rest), dtype)",
        "test_random.py",
    ),
    "points-gathered": Fault(
        2,
        "flare_jax/mixer.py",
        "    points = _points(x, point_mask)\n    if fused:",
        "    from parallel import mesh as mesh_lib\n\n"
        "    x = mesh_lib.constrain(x, None, None, None)\n"
        "    points = _points(x, point_mask)\n    if fused:",
        "test_collectives.py -k never_gathers",
    ),
    "reduced-twice": Fault(
        3,
        "parallel/softmax.py",
        "    packed = jax.lax.psum(packed * jnp.exp(sums.maximum - maximum)[..., None], axis)\n"
        "    return SoftmaxSums(maximum, packed[..., -1], packed[..., :-1])",
        "    decay = jnp.exp(sums.maximum - maximum)\n"
        "    numerator = jax.lax.psum(sums.numerator * decay[..., None], axis)\n"
        "    packed = jax.lax.psum(packed * decay[..., None], axis)\n"
        "    return SoftmaxSums(maximum, packed[..., -1], numerator)",
        "test_collectives.py -k layer_exchanges",
    ),
    "sums-not-packed": Fault(
        3,
        "parallel/walk.py",
        "groups.setdefault((leaf.shape[:lead], leaf.dtype), []).append(i)",
        "groups.setdefault((leaf.shape[:lead], i), []).append(i)",
        "test_streaming.py -k packed",
    ),
    "mask-of-scores-dropped": Fault(
        4,
        "parallel/softmax.py",
        "    if mask is None:\n        return scores",
        "    return scores",
        "test_flare.py -k padding",
    ),
    "mask-of-slices-dropped": Fault(
        4,
        "geotransolver_jax/slices.py",
        "    if chunk.mask is not None:\n        shares = jnp.where",
        "    if False:\n        shares = jnp.where",
        "test_transolver.py -k padding or length",
    ),
    "mask-of-sums-dropped": Fault(
        4,
        "parallel/reductions.py",
        "    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, 0)",
        "    return x",
        "test_reductions.py -k padding",
    ),
    "loss-with-the-padding": Fault(
        4,
        "experiments/training/steps.py",
        "target], axis=-1)), point_mask)",
        "target], axis=-1)), None)",
        "test_training.py -k padding",
    ),
    "empty-samples-let-through": Fault(
        4,
        "flare_jax/inputs.py",
        "    if empty.size:",
        "    if False:",
        "test_bad_input.py -k empty",
    ),
    "padding-of-keys-seen": Fault(
        4,
        "parallel/attention_tiles.py",
        "    mask = None if key_mask is None else key_mask[:, None, None, :]",
        "    mask = None",
        "test_attention.py",
    ),
    "scores-kept": Fault(
        5,
        "parallel/walk.py",
        "        return chunks.chunk_length(points, batch, self.heads, self.width)",
        "        return points",
        "test_collectives.py -k scores",
    ),
    "chunks-beyond-their-budget": Fault(
        5,
        "parallel/chunks.py",
        "longest = max(1, budget // scores_an_entry)",
        "longest = max(1, budget)",
        "test_streaming.py -k budget",
    ),
    "sums-in-bfloat16": Fault(
        6,
        "parallel/precision.py",
        "return jnp.result_type(jnp.float32, *dtypes)",
        "return jnp.result_type(*dtypes)",
        "test_reductions.py test_contraction.py",
    ),
    "gradients-in-bfloat16": Fault(
        6,
        "parallel/walk.py",
        "lambda leaf: jnp.zeros(leaf.shape, accumulation_dtype(leaf.dtype)), summed",
        "lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), summed",
        "test_streaming.py -k bfloat16",
    ),
    "values-out-of-range-taken": Fault(
        7,
        "experiments/configuration/configs.py",
        "    check_values(merged)",
        "    pass",
        "test_config.py",
    ),
    "values-not-looked-at": Fault(
        7,
        "experiments/meshes/wiring.py",
        "wrong = ~np.isfinite(values).all(0)",
        "wrong = np.zeros(values.shape[1], bool)",
        "test_bad_stores.py",
    ),
}


def found(name: str, fault: Fault, folder: Path) -> bool:
    """Whether a test fails on a copy with the fault."""
    for part in COPIED:
        shutil.rmtree(folder / part, ignore_errors=True)
        shutil.copytree(ROOT / part, folder / part)
    path = folder / fault.file
    text = path.read_text()
    if text.count(fault.there) != 1:
        sys.exit(f"{name}: expected its text once in {fault.file}; got {text.count(fault.there)}")
    path.write_text(text.replace(fault.there, fault.planted))
    files, _, words = fault.tests.partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"tests/{file}" for file in files.split()] + (["-k", words] if words else [])
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    caught = result.returncode == 1 and bool(failed)
    by = failed[0].partition(" - ")[0].split(" ", 1)[1] if failed else f"code {result.returncode}"
    print(f"law {fault.law}: {name}: {'found by' if caught else 'NOT FOUND:'} {by}", flush=True)
    return caught


def main(names: list[str]) -> int:
    """Plants the named faults, or all."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "project"
        ignored = shutil.ignore_patterns(*COPIED, ".*", "runs", "site", "build", "*.egg-info")
        shutil.copytree(ROOT, folder, ignore=ignored)
        results = [found(name, FAULTS[name], folder) for name in names or FAULTS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

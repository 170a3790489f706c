"""`python -m benchmarks.measure flare 16384`: time and memory of one model, in its own process.

Prints one line of JSON. The process measures nothing else, so that its peak memory is the model's.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict

import jax

from benchmarks.cases import DTYPES, MODELS, Case, make_function
from benchmarks.memory import memory_of, peak_mib
from experiments.cli import one_line_errors

MODES = ("forward", "train")


def measure(case: Case, mode: str, repeats: int) -> dict:
    """Compiles and times one model.

    Args:
        case: the model and the size of its input.
        mode: `forward`, or `train`: forward, mean-square loss and backward.
        repeats: calls that are timed, after two that are not.

    Returns:
        The case; seconds, the median and the least of the calls, and those of compiling; bytes of
        temporaries as compiled; the peak resident memory of the process in MiB.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1; got {repeats}")
    weights, function = make_function(case.make_model(), mode)
    inputs = jax.device_put(case.make_inputs())
    started = time.perf_counter()
    compiled = jax.jit(function).lower(weights, inputs).compile()
    compile_seconds = time.perf_counter() - started

    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        jax.block_until_ready(compiled(weights, inputs))
        times.append(time.perf_counter() - started)
    times = times[2:]
    return {
        **asdict(case),
        "mode": mode,
        "median_s": statistics.median(times),
        "min_s": min(times),
        "points_per_s": case.batch * case.points / statistics.median(times),
        "compile_s": compile_seconds,
        "temporary_bytes": memory_of(compiled).temp_size_in_bytes,
        "peak_rss_mib": peak_mib(),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measure", description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("points", type=int)
    parser.add_argument("--mode", choices=MODES, default="train")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--repeats", type=int, default=5)
    options = vars(parser.parse_args())
    mode, repeats = options.pop("mode"), options.pop("repeats")
    print(json.dumps(measure(Case(**options), mode, repeats)))


if __name__ == "__main__":
    one_line_errors(main)

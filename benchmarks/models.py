"""`python -m benchmarks.models`: time and memory of the models, beside those of the reference.

Each figure is measured in a process of its own. With `--peer` the reference is measured in turn
with ours, plain and compiled, since machines are noisy; the ratio is ours over its faster mode.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from benchmarks.cases import DTYPES, MODELS
from benchmarks.measure import MODES
from experiments.cli import one_line_errors
from experiments.files import write_json

_ROOT = Path(__file__).resolve().parents[1]
_PEER_SCRIPT = _ROOT.parent / "shared" / "peer" / "bench.py"
_POINTS = (4096, 16_384, 65_536, 262_144)


def run_json(command: list[str]) -> dict:
    """The last line that a command prints, read as JSON.

    Raises:
        ChildProcessError: the command failed; the last line of its errors says why.
    """
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ChildProcessError(f"{' '.join(command)}: {lines[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_ours(model: str, points: int, mode: str, dtype: str, repeats: int) -> dict:
    """Ours, see `benchmarks.measure`."""
    options = ["--mode", mode, "--dtype", dtype, "--repeats", str(repeats)]
    module = [sys.executable, "-m", "benchmarks.measure"]
    return run_json([*module, model, str(points), *options])


def measure_peer(
    python: Path, script: Path, model: str, points: int, mode: str, repeats: int
) -> dict[str, dict | str]:
    """The reference, plain and compiled; where a mode fails, the reason instead."""
    command = [str(python), str(script), model, str(points), "--mode", mode]
    command += ["--repeats", str(repeats)]
    readings: dict[str, dict | str] = {}
    for name, extra in (("plain", []), ("compiled", ["--compile"])):
        try:
            readings[name] = run_json([*command, *extra])
        except ChildProcessError as error:
            readings[name] = str(error)
    return readings


def compare(ours: dict, peer: dict[str, dict | str]) -> dict:
    """Our time and memory over those of the reference's faster mode."""
    worked = [reading for reading in peer.values() if isinstance(reading, dict)]
    if not worked:
        return {}
    fastest = min(worked, key=lambda reading: reading["median_s"])
    return {
        "peer_s": fastest["median_s"],
        "peer_rss_mib": fastest["peak_rss_mib"],
        "time_ratio": ours["median_s"] / fastest["median_s"],
        "memory_ratio": ours["peak_rss_mib"] / fastest["peak_rss_mib"],
    }


def table(rows: list[dict]) -> str:
    """The figures as a Markdown table."""
    head = [
        "model",
        "points",
        "dtype",
        "mode",
        "s",
        "points/s",
        "compile s",
        "temp MiB",
        "peak MiB",
    ]
    lines = [f"| {' | '.join([*head, 'peer s', 'time ratio', 'memory ratio'])} |"]
    lines.append("| --- | ---: | --- | --- |" + " ---: |" * 8)
    for row in rows:
        ratio = row.get("comparison", {})
        cells = [
            row["model"],
            f"{row['points']:,}",
            row["dtype"],
            row["mode"],
            f"{row['median_s']:.4f}",
            f"{row['points_per_s']:,.0f}",
            f"{row['compile_s']:.1f}",
            f"{row['temporary_bytes'] / 2**20:,.0f}",
            f"{row['peak_rss_mib']:,.0f}",
            f"{ratio['peer_s']:.4f}" if ratio else "",
            f"{ratio['time_ratio']:.2f}" if ratio else "",
            f"{ratio['memory_ratio']:.2f}" if ratio else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--points", nargs="+", type=int, default=_POINTS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", type=Path, help="Python of an environment with the reference")
    parser.add_argument("--peer-script", type=Path, default=_PEER_SCRIPT)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args()
    if options.peer and not options.peer_script.exists():
        raise FileNotFoundError(f"--peer-script: expected a file; {options.peer_script} is none")

    cases = [
        (model, points, mode, dtype)
        for model in options.models
        for points in options.points
        for dtype in options.dtypes
        for mode in options.modes
    ]
    rows = []
    for model, points, mode, dtype in tqdm(cases, "Measuring"):
        row = measure_ours(model, points, mode, dtype, options.repeats)
        if options.peer and dtype == "float32":
            row["peer"] = measure_peer(
                options.peer, options.peer_script, model, points, mode, options.repeats
            )
            row["comparison"] = compare(row, row["peer"])
        rows.append(row)
        if options.json is not None:
            write_json(options.json, rows)
    print(table(rows))


if __name__ == "__main__":
    one_line_errors(main)

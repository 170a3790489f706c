"""`python -m benchmarks.plan h200:8 --num-points 1000000 model=flare`: a cluster run, on a laptop.

Compiles the training step of an experiment for a machine that is not here, and prints what one
device holds, computes, moves and exchanges, how long a step takes at least, and with `--largest`
the most points that fit. The data is described by widths alone; everything else is the
experiment's configuration, changed by `key=value`.
"""

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from benchmarks.flops import matrix_flops
from benchmarks.machines import Machine, machine_of
from benchmarks.memory import memory_of
from benchmarks.program import Program, text_of
from benchmarks.topologies import target_mesh
from experiments.building import build_model
from experiments.cli import one_line_errors
from experiments.configuration import configs
from experiments.configuration.schema import ExperimentConfig, GeoTransolverConfig
from experiments.data.batch import Batch, Statistics, Stream
from experiments.data.dataset import statistics_like
from experiments.data.description import Description, StreamDescription
from experiments.files import write_json
from experiments.finetuning.tuning import Tuning
from experiments.models import Model
from experiments.prediction import predict
from experiments.training.optimizer import make_optimizer
from experiments.training.steps import TrainState, abstract_state, make_step
from geotransolver_jax import Neighborhoods
from parallel import mesh as mesh_lib
from parallel.mesh import DATA, POINTS
from parallel.neighbors import Neighbors
from parallel.parameters import split_weights
from parallel.points import padded_size

# A part of the memory is the runtime's, and lost between arrays.
_USABLE = 0.92
_COMPILES = 12


@dataclass(frozen=True)
class Widths:
    """Widths of the arrays of a sample; 0 where there is none.

    Attributes:
        values: input values at a point.
        positions: positions of a point.
        fields: predicted fields.
        geometry: features of a point of the geometry.
        globals: numbers of the global token.
    """

    values: int = 3
    positions: int = 3
    fields: int = 4
    geometry: int = 0
    globals: int = 0

    def description(self) -> Description:
        """A data set of these widths."""
        fields = tuple(f"field_{i}" for i in range(self.fields))
        return Description(
            (StreamDescription("points", self.positions, self.values, fields),),
            self.geometry or None,
            (1, self.globals) if self.globals else None,
        )

    def batch(self, batch: int, points: int, geometry: int, neighbors: int) -> Batch:
        """Shapes of a batch on the mesh of the context."""
        points, geometry = padded_size(points), padded_size(geometry)

        def array(
            length: int, *rest: int, dtype: jax.typing.DTypeLike = jnp.float32, split: bool = True
        ) -> Any:
            axes = (DATA, POINTS if split else None, *[None] * len(rest))
            sharding = mesh_lib.sharding(*axes)
            return jax.ShapeDtypeStruct((batch, length, *rest), dtype, sharding=sharding)

        def found(length: int) -> Neighbors:
            return Neighbors(array(length, neighbors, dtype=jnp.int32), array(length, neighbors))

        return Batch(
            (
                Stream(
                    array(points, self.positions),
                    array(points, self.fields),
                    array(points, self.values) if self.values else None,
                    mask=array(points, dtype=jnp.bool_),
                    neighborhoods=(
                        Neighborhoods(found(points), found(geometry)) if neighbors else None
                    ),
                ),
            ),
            array(geometry, self.geometry) if self.geometry else None,
            array(geometry, dtype=jnp.bool_) if self.geometry else None,
            array(1, self.globals, split=False) if self.globals else None,
        )


class Plan:
    """The training step of an experiment on a target."""

    def __init__(self, config: ExperimentConfig, target: str, widths: Widths) -> None:
        """Makes the model.

        Args:
            config: the experiment; sizes of its mesh axes, one of them -1, multiply to the devices.
            target: see `benchmarks.topologies.target_mesh`.
            widths: of the data.

        Raises:
            ValueError: the target is not known, or the configuration does not fit it.
        """
        self.config, self.machine, self.widths = config, machine_of(target), widths
        self.mesh = target_mesh(target, config.mesh.data, config.mesh.points, config.mesh.heads)
        self.model = build_model(config.model, widths.description(), config.train.seed)
        self.optimizer = make_optimizer(config.optimizer, config.train.steps)
        self.tuning = Tuning(config.finetune, self.model)
        self.neighbors = (
            max(config.model.neighbors_in_radius)
            if isinstance(config.model, GeoTransolverConfig) and config.model.include_local_features
            else 0
        )

    def lower(self, points: int, geometry: int) -> tuple[Any, TrainState, Batch]:
        """The step for so many points: traced, its state and its batch."""
        average = self.config.optimizer.ema_decay is not None
        state = abstract_state(
            self.model,
            self.optimizer,
            statistics_like(self.widths.description()),
            0,
            average=average,
            shard=self.config.mesh.shard_parameters,
            tuning=self.tuning,
        )
        batch = self.widths.batch(self.config.train.batch_size, points, geometry, self.neighbors)
        step = make_step(
            self.model,
            self.optimizer,
            self.config.optimizer.ema_decay,
            state,
            tuning=self.tuning,
        )
        return step, state, batch

    def compile(self, points: int, geometry: int) -> jax.stages.Compiled:
        """The compiled step for so many points a sample, and points of a geometry."""
        with jax.set_mesh(self.mesh):
            step, state, batch = self.lower(points, geometry)
            return step.lower(state, (batch,)).compile()

    def figures(self, points: int, geometry: int) -> dict:
        """What a step takes on one device."""
        started = time.perf_counter()
        compiled = self.compile(points, geometry)
        seconds = time.perf_counter() - started
        with jax.set_mesh(self.mesh):
            step, state, batch = self.lower(points, geometry)
            flops = matrix_flops(step, state, (batch,)) / self.mesh.size
            kept = _kept(self.model, self.mesh.size, batch, state.statistics)
        program, memory = Program(text_of(compiled)), memory_of(compiled)
        exchanged: Counter[tuple[str, str, int]] = Counter()
        for found, count in program.collectives():
            exchanged[found.kind, " ".join(found.arrays), found.size] += count
        moved = program.bytes_moved()
        return {
            "compile_s": seconds,
            "parameter_bytes": _device_bytes((state.params, state.average)),
            "optimizer_bytes": _device_bytes(state.optimizer),
            "batch_bytes": _device_bytes(batch),
            "activation_bytes": kept,
            "temporary_bytes": memory.temp_size_in_bytes,
            "total_bytes": _total(memory),
            "fits": _total(memory) <= _USABLE * self.machine.memory,
            "flops": flops,
            "bytes_moved": moved,
            "collectives": [
                {"kind": kind, "arrays": arrays, "bytes": size, "times": times}
                for (kind, arrays, size), times in sorted(exchanged.items())
            ],
            "step_s": roofline(
                self.machine,
                self.mesh.size,
                flops,
                moved,
                exchanged,
                narrow=self.config.model.dtype == "bfloat16",
            ),
        }

    def largest(self, points: int, ratio: float) -> int:
        """The most points that fit, within 2 %; the geometry has `ratio` as many."""
        limit = _USABLE * self.machine.memory

        def total(points: int) -> int:
            return _total(memory_of(self.compile(points, int(ratio * points))))

        low, high, held = 0, None, {}
        guess = points
        for _ in range(_COMPILES):
            held[guess] = total(guess)
            if held[guess] <= limit:
                low = guess
            else:
                high = guess
            if high is not None and low and high - low <= 0.02 * low:
                break
            # Memory is all but linear in the points.
            estimate = int(guess * limit / held[guess])
            if high is None:
                guess = max(int(1.01 * low), int(0.995 * estimate))
            else:
                inside = low < int(0.995 * estimate) < high
                guess = int(0.995 * estimate) if inside else (low + high) // 2
        return low


def _total(memory: Any) -> int:
    """Bytes of a device while the step runs; what is donated holds the result too."""
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


def _device_bytes(tree: PyTree) -> int:
    """Bytes of a tree on one device."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _kept(model: Model, devices: int, batch: Batch, like: Statistics) -> int:
    """Bytes on one device of what the forward pass keeps of the points for the gradient."""
    graph, params, rest = split_weights(model)
    points = batch.streams[0].embedding.shape[1]

    def forward(params: nnx.State) -> PyTree:
        ones = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), batch)
        statistics = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), like)
        return predict(nnx.merge(graph, params, rest), statistics, ones)

    kept = jax.eval_shape(lambda params: jax.vjp(forward, params)[1], params)
    return sum(
        leaf.size * leaf.dtype.itemsize // devices
        for leaf in jax.tree.leaves(kept)
        if points in leaf.shape
    )


def roofline(
    machine: Machine, devices: int, flops: float, moved: float, exchanged: Counter, *, narrow: bool
) -> dict[str, float]:
    """Seconds that a step takes at least, by what limits it.

    Products run at their peak rate, memory at its full bandwidth, both at the same time;
    all-reduces send their bytes about twice, over the slowest link, and wait for each other.
    """
    link = machine.link if devices <= machine.near else machine.far_link
    sent = sum(
        times * (2 if kind == "all-reduce" else 1) * size
        for (kind, _, size), times in exchanged.items()
    )
    seconds = {
        "products": flops / (machine.narrow_flops if narrow else machine.wide_flops),
        "memory": moved / machine.bandwidth,
        "exchange": 0.0
        if devices == 1
        else sent * (devices - 1) / devices / link + machine.latency * sum(exchanged.values()),
    }
    return seconds | {"step": max(seconds["products"], seconds["memory"]) + seconds["exchange"]}


def describe(plan: Plan, target: str, points: int, figures: dict) -> str:
    """The figures as Markdown tables."""
    machine, seconds = plan.machine, figures["step_s"]
    sizes = " x ".join(f"{name}={size}" for name, size in plan.mesh.shape.items())
    lines = [
        (
            f"{target}: {sizes}; {plan.config.model.name}, "
            f"{plan.config.train.batch_size} x {points:,} points; "
            f"compiled in {figures['compile_s']:.0f} s\n"
        ),
        "| a device | |\n| --- | ---: |",
    ]
    for name in ("parameter", "optimizer", "batch", "activation", "temporary", "total"):
        size = figures[f"{name}_bytes"] / 2**20
        lines.append(f"| {name}{_NOTES.get(name, '')} | {size:,.1f} MiB |")
    fits = "yes" if figures["fits"] else "no"
    memory = f"{_USABLE:.0%} of {machine.memory / 2**30:.1f} GiB ({machine.name})"
    lines += [
        f"| fits into {memory} | {fits} |",
        f"| operations of matrix products | {figures['flops'] / 1e12:,.2f} TFLOP |",
        f"| bytes read and written | {figures['bytes_moved'] / 2**30:,.1f} GiB |",
        f"| products at their peak | {seconds['products'] * 1e3:,.1f} ms |",
        f"| memory at {machine.bandwidth / 1e12:.2f} TB/s | {seconds['memory'] * 1e3:,.1f} ms |",
        f"| exchange | {seconds['exchange'] * 1e3:,.2f} ms |",
        f"| a step takes at least | {seconds['step'] * 1e3:,.1f} ms |",
        "\n| collective | arrays | bytes | times a step |\n| --- | --- | ---: | ---: |",
    ]
    for each in figures["collectives"]:
        lines.append(f"| {each['kind']} | {each['arrays']} | {each['bytes']:,} | {each['times']} |")
    return "\n".join(lines)


_NOTES = {
    "activation": " (kept for the gradient; part of the temporaries)",
    "total": " (parameters, optimizer, batch and temporaries)",
}


def read_config(overrides: list[str]) -> ExperimentConfig:
    """The experiment that the default configuration and some overrides describe."""
    configs.register_schemas()
    with hydra.initialize_config_dir(str(configs.CONFIG_DIR), version_base="1.3"):
        return configs.typed(hydra.compose("config", overrides=overrides))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("target", help="h200:8, h200:256, tpu:v5e:16x16, ...")
    parser.add_argument("overrides", nargs="*", help="key=value of the experiment's configuration")
    parser.add_argument("--num-points", type=int, default=1_000_000, help="points of a sample")
    parser.add_argument("--num-geometry", type=int, default=300_000, help="points of its geometry")
    parser.add_argument("--largest", action="store_true", help="find the most points that fit, too")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    for name in Widths.__dataclass_fields__:
        default = getattr(Widths, name)
        parser.add_argument(f"--{name}", type=int, default=default, help="width, 0 for none")
    options = parser.parse_intermixed_args()
    for name in ("num_points", "num_geometry"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: expected at least 1; got {getattr(options, name)}")
    # GPUs and TPUs are compiled for, not looked for.
    jax.config.update("jax_platforms", "cpu")
    widths = Widths(**{name: getattr(options, name) for name in Widths.__dataclass_fields__})
    plan = Plan(read_config(options.overrides), options.target, widths)
    figures = plan.figures(options.num_points, options.num_geometry)
    print(describe(plan, options.target, options.num_points, figures), flush=True)
    if options.largest:
        ratio = options.num_geometry / options.num_points if widths.geometry else 0
        figures["largest_points"] = plan.largest(options.num_points, ratio)
        print(f"\nAt most {figures['largest_points']:,} points a sample fit.")
    if options.json is not None:
        write_json(options.json, figures | {"target": options.target})


if __name__ == "__main__":
    one_line_errors(main)

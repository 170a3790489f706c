"""The compiled training step and evaluation of a model."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from experiments.data.batch import Batch, Statistics
from experiments.finetuning.adapters import merged
from experiments.finetuning.tuning import Tuning
from experiments.finetuning.weight_groups import Rates, replaced
from experiments.models import Model
from experiments.prediction import predict
from experiments.results.field_errors import field_errors
from geotransolver_jax.concrete_dropout import regularization_loss
from parallel import masked_sum
from parallel import mesh as mesh_lib
from parallel.parameters import partition_specs, split_weights

# Numbers of skipped steps that a state remembers.
SKIPPED_KEPT = 8


class TrainState(NamedTuple):
    """All that training carries from step to step, as arrays.

    Attributes:
        step: optimizer steps taken.
        params: weights, as nested dictionaries; with adapters beside the kernels, if there are any.
        average: moving average of the weights that train, or `None`.
        optimizer: state of the optimizer.
        key: random key of the run; a step's randomness follows from it and the step.
        statistics: statistics of the training split, by which the model normalizes.
        skipped: number of steps whose loss or gradient was not finite; they change nothing else.
        skipped_steps: the last few of them, later ones over earlier ones.
    """

    step: jax.Array
    params: Any
    average: Any
    optimizer: Any
    key: jax.Array
    statistics: Statistics
    skipped: jax.Array
    skipped_steps: jax.Array

    @property
    def evaluated_params(self) -> Any:
        """The weights that are evaluated: the moving average where there is one.

        Adapters are merged into their kernels.
        """
        return merged(self.params if self.average is None else replaced(self.params, self.average))


class StepMetrics(NamedTuple):
    """What a step reports: its loss, and the norm of the gradient before clipping.

    The loss is the relative L2 error, the mean over samples and the fields of all streams, and what
    is regularized.
    """

    loss: jax.Array
    gradient_norm: jax.Array


def relative_l2(
    prediction: Float[Array, "B N C"],
    target: Float[Array, "B N C"],
    point_mask: Array | None = None,
) -> Float[Array, "B C"]:
    """`||prediction - target|| / ||target||` of each sample and field, over its real points.

    A field that is zero everywhere is compared to the smallest normal number.
    """
    error = prediction.astype(jnp.float32) - target
    sums = masked_sum(jnp.square(jnp.stack([error, target], axis=-1)), point_mask)
    # The tiny number keeps the gradient finite where a prediction is exact.
    norms = jnp.sqrt(sums + jnp.finfo(sums.dtype).tiny)
    return norms[..., 0] / norms[..., 1]


def abstract_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    statistics: Statistics,
    seed: int,
    *,
    average: bool,
    shard: bool = False,
    tuning: Tuning | None = None,
) -> TrainState:
    """Shapes, types and layout of a training state on the mesh of the context.

    Weights lie by their `PartitionSpec`s, and all that has their shape in the optimizer with them.

    Args:
        model: the model; its weights may be anywhere.
        optimizer: the optimizer.
        statistics: statistics of the training split, or their shapes.
        seed: seed of the run's randomness.
        average: whether there is a moving average of the weights.
        shard: split weights, and what goes with them, over `data` as well: each device of that axis
            holds a part, and they are put together where they are needed.
        tuning: which weights train; by default all of them.

    Returns:
        A state of `jax.ShapeDtypeStruct`s that carry their shardings.
    """
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    make = partial(_make_state, optimizer=optimizer, seed=seed, average=average, tuning=tuning)
    specs = {
        jax.tree_util.keystr(path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(
            nnx.to_pure_dict(partition_specs(model)), is_leaf=lambda leaf: isinstance(leaf, P)
        )
    }

    def lay_out(path: tuple[Any, ...], leaf: Any) -> Any:
        """A leaf lies as the parameter whose path ends its own; any other is replicated."""
        ends = (specs.get(jax.tree_util.keystr(path[start:])) for start in range(len(path)))
        spec = next((spec for spec in ends if spec is not None and len(spec) == leaf.ndim), P())
        if shard and len(spec) == leaf.ndim:
            spec = _over_data(spec, leaf.shape)
        sharding = mesh_lib.sharding(*spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(lay_out, jax.eval_shape(make, params, statistics))


def _rates(tuning: Tuning | None) -> Rates:
    return Rates() if tuning is None else tuning.rates


def _over_data(spec: P, shape: tuple[int, ...]) -> P:
    """The longest axis that nothing splits yet, and that divides, goes over `data`."""
    groups = mesh_lib.axis_size(mesh_lib.DATA)
    whole = [axis is None or mesh_lib.axis_size(axis) == 1 for axis in spec]
    free = [i for i in range(len(shape)) if whole[i] and shape[i] % groups == 0]
    if not free:
        return spec
    longest = max(free, key=lambda i: shape[i])
    return P(*(mesh_lib.DATA if i == longest else axis for i, axis in enumerate(spec)))


def initial_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    statistics: Statistics,
    seed: int,
    *,
    average: bool,
    shard: bool = False,
    tuning: Tuning | None = None,
) -> TrainState:
    """The state before the first step, placed on the mesh; arguments as `abstract_state`."""
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    options: dict[str, Any] = dict(average=average, tuning=tuning)
    make = partial(_make_state, optimizer=optimizer, seed=seed, **options)
    state = abstract_state(model, optimizer, statistics, seed, shard=shard, **options)
    return jax.jit(make, out_shardings=layout_of(state))(params, statistics)


def layout_of(state: TrainState) -> TrainState:
    """The shardings of a state, abstract or not; `None` for what lies on no mesh.

    To name the device of such a leaf would commit it: the first step would give back a state of
    another kind than it took, and the second step would be compiled again.
    """

    def on_mesh(leaf: Any) -> NamedSharding | None:
        return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None

    return jax.tree.map(on_mesh, state)


def _make_state(
    params: PyTree,
    statistics: Statistics,
    *,
    optimizer: optax.GradientTransformation,
    seed: int,
    average: bool,
    tuning: Tuning | None,
) -> TrainState:
    if tuning is not None:
        params = tuning.start(params, jax.random.key(seed))
    trained = _rates(tuning).trained(params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        average=trained if average else None,
        optimizer=optimizer.init(trained),
        key=jax.random.key_data(jax.random.key(seed)),
        statistics=statistics,
        skipped=jnp.zeros((), jnp.int32),
        skipped_steps=jnp.zeros((SKIPPED_KEPT,), jnp.int32),
    )


def make_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    ema_decay: float | None,
    state: TrainState,
    *,
    regularization: float = 0.0,
    skip: bool = False,
    tuning: Tuning | None = None,
) -> Callable[[TrainState, tuple[Batch, ...]], tuple[TrainState, StepMetrics]]:
    """Compiles one optimizer step: forward, loss, gradient, update, moving average.

    Args:
        model: the model, in training mode; its weights are those of the state.
        optimizer: the optimizer.
        ema_decay: decay of the moving average, or `None`.
        state: a state, or an abstract one, whose layout on the mesh the step keeps.
        regularization: weight of the regularization loss of concrete dropouts, if there are any.
        skip: go on after a step whose loss or gradient is not finite. If False, all later steps
            change nothing either, so that the last good state is at hand when the host looks.
        tuning: which weights train; that of the state.

    Returns:
        A function of the state, which it consumes, and the batches whose gradients are averaged.
    """
    graph, _, rest = split_weights(model)
    rates = _rates(tuning)

    def loss(
        trained: PyTree, params: PyTree, statistics: Statistics, key: Array, batch: Batch
    ) -> Array:
        params = merged(replaced(params, trained))
        model = nnx.merge(graph, params, jax.tree.map(lambda leaf: leaf, rest))
        nnx.reseed(model, dropout=key)
        prediction = predict(model, statistics, batch)
        errors = jnp.concatenate(
            [
                relative_l2(fields, stream.target, stream.mask)
                for fields, stream in zip(prediction, batch.streams, strict=True)
            ],
            axis=-1,
        )
        return errors.mean() + regularization * regularization_loss(model)

    def step(state: TrainState, batches: tuple[Batch, ...]) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        trained = rates.trained(state.params)

        def differentiate(index: int | Array, batch: Batch) -> PyTree:
            return jax.value_and_grad(loss)(
                trained, state.params, state.statistics, jax.random.fold_in(key, index), batch
            )

        def accumulate(sums: PyTree, indexed_batch: tuple[Array, Batch]) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, sums, differentiate(*indexed_batch)), None

        if len(batches) == 1:
            value, gradient = differentiate(0, batches[0])
        else:
            stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *batches)
            zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained))
            sums, _ = jax.lax.scan(accumulate, zeros, (jnp.arange(len(batches)), stacked))
            value, gradient = jax.tree.map(lambda total: total / len(batches), sums)

        gradient = rates.gradient(gradient)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, trained)
        trained = optax.apply_updates(trained, rates.updates(updates))
        average = state.average
        if ema_decay is not None:
            average = optax.incremental_update(trained, average, 1 - ema_decay)
        norm = optax.tree.norm(gradient)
        good = jnp.isfinite(value) & jnp.isfinite(norm)
        new = state._replace(
            step=state.step + 1,
            params=replaced(state.params, trained),
            average=average,
            optimizer=optimizer_state,
        )
        return _unless_bad(state, new, good, skip=skip), StepMetrics(value, norm)

    return jax.jit(step, donate_argnums=0, out_shardings=(layout_of(state), None))


def _unless_bad(old: TrainState, new: TrainState, good: jax.Array, *, skip: bool) -> TrainState:
    """The new state, or the old one where the step was not good."""
    frozen = jnp.zeros((), bool) if skip else old.skipped > 0
    taken = jax.tree.map(lambda a, b: jnp.where(good & ~frozen, a, b), new, old)
    bad = ~good & ~frozen
    place = old.skipped % SKIPPED_KEPT
    noted = jnp.where(bad, old.step + 1, old.skipped_steps[place])
    return taken._replace(
        # A run that goes on has been through the step.
        step=jnp.where(bad, old.step + 1, taken.step) if skip else taken.step,
        skipped=old.skipped + bad,
        skipped_steps=old.skipped_steps.at[place].set(noted),
    )


def make_evaluation(model: Model) -> Callable[[Any, Statistics, Batch], tuple]:
    """Compiles the prediction of a batch, in evaluation mode, and its errors.

    Returns:
        A function of weights, statistics and a batch: the prediction of each stream in the units
        of its targets, and the `FieldErrors` of all their fields.
    """
    graph, _, rest = split_weights(model)

    def evaluate(params: PyTree, statistics: Statistics, batch: Batch) -> Any:
        model = nnx.merge(graph, params, rest)
        model.eval()
        prediction = predict(model, statistics, batch)
        errors = [
            field_errors(fields, stream.target, stream.mask)
            for fields, stream in zip(prediction, batch.streams, strict=True)
        ]
        return prediction, jax.tree.map(lambda *of: jnp.concatenate(of, axis=-1), *errors)

    return jax.jit(evaluate)

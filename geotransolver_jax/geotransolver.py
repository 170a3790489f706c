"""The GeoTransolver model."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key, PyTree

from flare_jax.block import BlockStack
from flare_jax.checks import (
    check_dropout,
    check_heads,
    check_heads_divide,
    check_positive,
    check_types,
)
from flare_jax.heads import hide
from flare_jax.inputs import PointLayout, check_points
from flare_jax.linear import LayerOptions, Linear
from flare_jax.mlp import MLP
from flare_jax.norm import LayerNorm
from geotransolver_jax.block import GALEBlock
from geotransolver_jax.context import ContextBuilder
from geotransolver_jax.gale import GALE
from geotransolver_jax.gale_fa import GALEFA
from geotransolver_jax.inputs import (
    Inputs,
    Layouts,
    check_inputs,
    pad_neighborhoods,
    taken_width,
    widths,
)
from geotransolver_jax.neighborhoods import Neighborhoods
from geotransolver_jax.scales import check_scales
from parallel import mesh as mesh_lib
from parallel.annotations import AnyArray, Integer
from parallel.mesh import DATA, POINTS
from parallel.neighbors import Neighbors
from parallel.parameters import place_parameters
from parallel.points import grid_shape
from parallel.precision import accumulation_dtype

ATTENTION_TYPES = ("GALE", "GALE_FA")


class GeoTransolver(nnx.Module):
    """GeoTransolver: a transformer over points that attends to their geometry (arXiv 2512.20399).

    The model of `physicsnemo.models.geotransolver.GeoTransolver` 2.2.2 with its arguments, names
    and defaults; there is no Transformer Engine.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> model = GeoTransolver(
        ...     functional_dim=5, out_dim=3, geometry_dim=3, global_dim=2, n_hidden=32,
        ...     rngs=nnx.Rngs(0)
        ... )
        >>> model(
        ...     jnp.ones((1, 100, 5)), geometry=jnp.ones((1, 40, 3)),
        ...     global_embedding=jnp.ones((1, 1, 2)),
        ... ).shape
        (1, 100, 3)
    """

    def __init__(
        self,
        functional_dim: Integer | Sequence[Integer],
        out_dim: Integer | Sequence[Integer],
        geometry_dim: int | None = None,
        global_dim: int | None = None,
        n_layers: int = 4,
        n_hidden: int = 256,
        dropout: float = 0.0,
        n_head: int = 8,
        act: str = "gelu",
        mlp_ratio: int = 4,
        slice_num: int = 32,
        time_input: bool = False,
        plus: bool = False,
        include_local_features: bool = False,
        radii: Sequence[float] | None = None,
        neighbors_in_radius: Sequence[Integer] | None = None,
        n_hidden_local: int = 32,
        structured_shape: Sequence[Integer] | None = None,
        attention_type: str = "GALE",
        concrete_dropout: bool = False,
        state_mixing_mode: str = "weighted",
        *,
        rngs: nnx.Rngs,
        remat: str = "none",
        attention_backend: str = "auto",
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        """Makes the weights and places them on the mesh of the context.

        Args:
            functional_dim: width of the local embedding, one a stream.
            out_dim: width of the prediction, one a stream.
            geometry_dim: width of the geometry's features; `None` for no geometry.
            global_dim: width of the global embedding; `None` for none.
            n_layers: number of blocks.
            n_hidden: width of the points inside, without their local features.
            dropout: dropout rate of the attention layers' outputs; with `concrete_dropout` its
                initial value.
            n_head: attention heads; a divisor of `n_hidden`.
            act: activation, one of `flare_jax.activations`.
            mlp_ratio: hidden width of the blocks' perceptrons, in units of the points' width.
            slice_num: slices (GALE) or latent queries (GALE_FA) of each head.
            time_input: make the weights of the reference's time network, so that its state dicts
                load. Like the reference the model does not use them, and refuses a `time`.
            plus: the slices of Transolver++, see `PhysicsAttention`. GALE_FA has none, its context
                does.
            include_local_features: let points and geometry see each other's neighbourhoods; needs
                `geometry_dim=3`, the coordinates.
            radii: radii of these neighbourhoods, `[0.05, 0.25]` by default.
            neighbors_in_radius: neighbours looked at within each radius, `[8, 32]` by default.
            n_hidden_local: width of the features of one radius.
            structured_shape: shape of a structured grid, 2 or 3 axes, which all streams and the
                geometry then share; `None` for clouds.
            attention_type: `GALE` or `GALE_FA`.
            concrete_dropout: learn the dropout rates, see `concrete_dropout.ConcreteDropout`.
            state_mixing_mode: `weighted` or `concat_project`, see
                `context_attention.ContextAttention`.
            rngs: random streams; `params` makes the weights, `dropout` is drawn from in training.
            remat: what is computed again for the gradient instead of being kept: `none`,
                `attention` or `block`, see `BlockStack`.
            attention_backend: `auto`, `xla` or, for GALE_FA, `cudnn`, see
                `flare_jax.fused.check_backend`.
            dtype: type to compute in, `param_dtype` by default.
            param_dtype: type of the weights.

        Raises:
            ValueError: arguments that do not fit together, or do not fit the mesh.
        """
        functional_dims = widths("functional_dim", functional_dim)
        out_dims = widths("out_dim", out_dim)
        if len(functional_dims) != len(out_dims):
            raise ValueError(
                f"out_dim: expected {len(functional_dims)} widths, as in functional_dim; "
                f"got {len(out_dims)}"
            )
        if structured_shape is not None:
            structured_shape = grid_shape(structured_shape)
        if attention_type not in ATTENTION_TYPES:
            raise ValueError(
                f"attention_type: expected one of {', '.join(ATTENTION_TYPES)}; "
                f"got {attention_type!r}"
            )
        if attention_type != "GALE_FA" and attention_backend not in ("auto", "xla"):
            raise ValueError(
                "attention_backend: expected auto or xla with attention_type='GALE', whose slices "
                f"no other one computes; got {attention_backend!r}"
            )
        check_heads(n_hidden, n_head)
        check_positive(n_layers=n_layers, n_hidden=n_hidden, mlp_ratio=mlp_ratio)
        check_positive(slice_num=slice_num)
        for name, width in (("geometry_dim", geometry_dim), ("global_dim", global_dim)):
            if width is not None:
                check_positive(**{name: width})
        check_dropout(dropout)
        scales = check_scales(
            include_local_features,
            geometry_dim,
            structured_shape,
            radii,
            neighbors_in_radius,
            n_hidden_local,
        )
        dtype = param_dtype if dtype is None else dtype
        check_types(param_dtype=param_dtype, dtype=dtype)

        self.functional_dims = functional_dims
        self.geometry_dim = geometry_dim
        self.global_dim = global_dim
        self.n_head = n_head
        self.structured_shape = structured_shape
        self.include_local_features = include_local_features
        self.noisy = dropout > 0 or concrete_dropout or plus
        self.dtype = dtype
        self.deterministic = False
        self.dropout_rngs = rngs.dropout.fork()

        types: LayerOptions = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.context = ContextBuilder(
            len(functional_dims),
            n_head,
            n_hidden // n_head,
            slice_num,
            geometry_dim=geometry_dim,
            global_dim=global_dim,
            local_features=include_local_features,
            radii=[radius for radius, _ in scales],
            counts=[count for _, count in scales],
            n_hidden_local=n_hidden_local,
            structured_shape=structured_shape,
            plus=plus,
            dropout=dropout,
            concrete_dropout=concrete_dropout,
            **types,
        )
        self.preprocess = nnx.List(
            [
                MLP(width, 2 * n_hidden, n_hidden, act=act, initial="uniform", **types)
                for width in functional_dims
            ]
        )
        dim = n_hidden + n_hidden_local * len(scales)

        def make_block(rngs: nnx.Rngs) -> GALEBlock:
            types: LayerOptions = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
            attention: GALE | GALEFA
            if attention_type == "GALE":
                attention = GALE(
                    dim,
                    n_head,
                    slice_num,
                    plus=plus,
                    structured_shape=structured_shape,
                    context_dim=self.context.dim,
                    state_mixing_mode=state_mixing_mode,
                    dropout=dropout,
                    concrete_dropout=concrete_dropout,
                    **types,
                )
            else:
                attention = GALEFA(
                    dim,
                    n_head,
                    slice_num,
                    attention_backend=attention_backend,
                    context_dim=self.context.dim,
                    state_mixing_mode=state_mixing_mode,
                    dropout=dropout,
                    concrete_dropout=concrete_dropout,
                    **types,
                )
            return GALEBlock(
                attention,
                dim,
                mlp_ratio=mlp_ratio,
                act=act,
                dropout=dropout,
                concrete_dropout=concrete_dropout,
                **types,
            )

        self.stack = BlockStack(make_block, n_layers, remat=remat, rngs=rngs)
        norm = lambda: LayerNorm(dim, dtype=dtype, param_dtype=param_dtype)  # noqa: E731
        self.norm_out = nnx.List([norm() for _ in out_dims])
        self.project_out = nnx.List(
            [Linear(dim, width, initial="uniform", **types) for width in out_dims]
        )
        time_layer = lambda: Linear(n_hidden, n_hidden, initial="uniform", **types)  # noqa: E731
        self.time_in = time_layer() if time_input else None
        self.time_out = time_layer() if time_input else None
        place_parameters(self)

    def __call__(
        self,
        local_embedding: Float[AnyArray, "B *_N _C"] | Sequence[Float[AnyArray, "B *_N _C"]],
        local_positions: Float[AnyArray, "B _N 3"]
        | Sequence[Float[AnyArray, "B _N 3"]]
        | None = None,
        global_embedding: Float[AnyArray, "B G C_g"] | None = None,
        geometry: Float[AnyArray, "B *M C_geo"] | None = None,
        time: None = None,
        *,
        return_embedding_states: bool = False,
        return_point_features: bool = False,
        point_mask: Bool[AnyArray, "B *_N"]
        | Sequence[Bool[AnyArray, "B *_N"] | None]
        | None = None,
        geometry_mask: Bool[AnyArray, "B *_M"] | None = None,
        neighborhoods: Neighborhoods | Sequence[Neighborhoods] | None = None,
    ) -> Any:
        """Predicts the fields at the points of each stream.

        Args:
            local_embedding: values at the points, one array, or a sequence with one a stream; for a
                structured grid flat or spatial.
            local_positions: coordinates of the points, likewise; needed for local features.
            global_embedding: a few tokens of global quantities, with `global_dim`.
            geometry: features of the geometry's points, with `geometry_dim`; their number is
                their own, but on a grid. With local features they are coordinates.
            time: must be `None`, as in the reference.
            return_embedding_states: also return the context, `(B, H, S, D_c)`, or `None` where
                there is none.
            return_point_features: also return the points before the last layer, `(B, N, width)`.
            point_mask: True where a point is real, one a stream, as `parallel.shard_points` makes
                it. Rows that are not change nothing and come out zero.
            geometry_mask: True where a point of the geometry is real.
            neighborhoods: of each stream, where they were found before (by the data pipeline, say)
                at the largest of the radii; nothing is searched then.

        Returns:
            The prediction in the layout of `local_embedding`: an array, or a tuple with one a
            stream where a sequence was given. With one or both flags a tuple of it, the context and
            the point features, as far as asked for.

        Raises:
            NotImplementedError: `time` is given.
            ValueError: an argument is missing, not taken, or of a wrong shape; a sample has no real
                point; or a coordinate is not finite.
        """
        if time is not None:
            raise NotImplementedError("time: expected None, since there is no time input yet")
        check_heads_divide(self.n_head)
        single = hasattr(local_embedding, "ndim")
        inputs, layouts = check_inputs(
            self,
            local_embedding,
            local_positions,
            global_embedding,
            geometry,
            point_mask,
            geometry_mask,
            neighborhoods,
        )
        key = None
        if not self.deterministic and self.noisy:
            key = self.dropout_rngs()
        graph, weights = nnx.split(self)
        arrays = jax.tree.map(mesh_lib.replicate_unsharded, inputs)
        result = _apply(graph, layouts, weights, arrays, key)
        outputs, features = result.outputs, result.point_features
        if single:
            outputs, features = outputs[0], features[0]
        extra = [result.context] if return_embedding_states else []
        extra += [features] if return_point_features else []
        return (outputs, *extra) if extra else outputs

    def _forward(self, layouts: Layouts, inputs: Inputs, key: Key[Array, ""] | None) -> "_Result":
        batch = inputs.embeddings[0].shape[0]
        masks = tuple(
            layout.flatten_mask(mask, batch)
            for layout, mask in zip(layouts.streams, inputs.point_masks, strict=True)
        )
        geometry, geometry_mask = None, None
        if inputs.geometry is not None and layouts.geometry is not None:
            geometry_mask = layouts.geometry.flatten_mask(inputs.geometry_mask, batch)
            geometry = _flatten(layouts.geometry, inputs.geometry, geometry_mask)
        context_key, stack_key = (None, None) if key is None else jax.random.split(key)
        positions, neighborhoods = None, inputs.neighborhoods
        if inputs.positions is not None and geometry is not None and layouts.geometry is not None:
            positions = tuple(map(_flatten, layouts.streams, inputs.positions, masks))
            if neighborhoods is None:
                neighborhoods = self.context.search(positions, geometry, masks, geometry_mask)
            else:
                neighborhoods = tuple(
                    pad_neighborhoods(found, layout, layouts.geometry)
                    for found, layout in zip(neighborhoods, layouts.streams, strict=True)
                )
        found = None
        if neighborhoods is not None:
            found = [of.of_geometry for of in neighborhoods]
        tokens = inputs.global_embedding
        context = self.make_context(
            positions, masks, found, geometry, geometry_mask, tokens, context_key
        )

        streams = []
        for i, (layout, embedding) in enumerate(
            zip(layouts.streams, inputs.embeddings, strict=True)
        ):
            features = None
            if neighborhoods is not None and geometry is not None:
                around = neighborhoods[i].of_points
                features = self.context.local_features(i, geometry, geometry_mask, around)
            x = _flatten(layout, embedding, masks[i])
            streams.append(self.enter(i, x, masks[i], features))
        streams = self.stack(tuple(streams), masks, context, key=stack_key)

        outputs, point_features = [], []
        for i, (layout, x, mask) in enumerate(zip(layouts.streams, streams, masks, strict=True)):
            outputs.append(layout.unflatten(self.leave(i, x, mask)))
            point_features.append(hide(x, mask)[:, : layout.points])
        return _Result(tuple(outputs), context, tuple(point_features))

    def make_context(
        self,
        positions: Sequence[Float[Array, "B _N 3"]] | None,
        point_masks: Sequence[Bool[Array, "B _N"] | None],
        around_geometry: Sequence[Neighbors] | None,
        geometry: Float[Array, "B M C_geo"] | None,
        geometry_mask: Bool[Array, "B M"] | None,
        global_embedding: Float[AnyArray, "B G C_g"] | None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B H S D_c"] | None:
        """What the blocks are given as context; arguments as of `ContextBuilder`."""
        tokens, mask, number = None, None, None
        if global_embedding is not None:
            width = taken_width("global_embedding", self.global_dim, "global_dim")
            layout = check_points("global_embedding", global_embedding, width, None, padded=False)
            mask = layout.flatten_mask(None, global_embedding.shape[0])
            tokens = _flatten(layout, global_embedding, mask)
            tokens, mask, number = _two_rows_a_shard(tokens, mask)
        return self.context(
            positions,
            geometry,
            tokens,
            around_geometry,
            point_masks,
            geometry_mask,
            mask,
            key,
            number,
        )

    def enter(
        self,
        stream: int,
        embedding: Float[Array, "B N C_in"],
        point_mask: Bool[Array, "B N"] | None,
        features: Float[Array, "B N F"] | None = None,
    ) -> Float[Array, "B N C"]:
        """Points of a stream as the first block takes them, with their local features if any."""
        x = self.preprocess[stream](hide(embedding, point_mask).astype(self.dtype))
        return x if features is None else jnp.concatenate([x, features], axis=-1)

    def leave(
        self, stream: int, x: Float[Array, "B N C"], point_mask: Bool[Array, "B N"] | None
    ) -> Float[Array, "B N C_out"]:
        """Fields of the points of a stream that the last block returns."""
        return hide(self.project_out[stream](x, self.norm_out[stream]), point_mask)


class _Result(NamedTuple):
    outputs: tuple[jax.Array, ...]
    context: jax.Array | None
    point_features: tuple[jax.Array, ...]


@partial(jax.jit, static_argnums=(0, 1))
def _apply(
    graph: nnx.GraphDef,
    layouts: Layouts,
    weights: PyTree,
    inputs: Inputs,
    key: Key[Array, ""] | None,
) -> _Result:
    """Compiled once a shape; inside a compiled program it is inlined."""
    return nnx.merge(graph, weights)._forward(layouts, inputs, key)


def _flatten(layout: PointLayout, x: AnyArray, mask: Array | None) -> Array:
    """Points along one axis, in float32 or wider, zero where they are padding."""
    x = layout.flatten(x.astype(accumulation_dtype(x.dtype)))
    return x if mask is None else jnp.where(mask[..., None], x, 0)


def _two_rows_a_shard(
    x: Float[Array, "B N C"], mask: Bool[Array, "B N"] | None
) -> tuple[Array, Array | None, Array | None]:
    """Points padded so that no shard has one alone, their mask, and the number of each.

    XLA's GPU compiler stops at the gradient of a shard that has one sample of one point, as a
    global token easily is (JAX 0.10.2: "Reshape input and output shapes must be the same").
    """
    points, shards = x.shape[1], mesh_lib.axis_size(POINTS)
    if points > shards or shards * mesh_lib.axis_size(DATA) == 1:
        return x, mask, None
    mask = jnp.ones(x.shape[:2], bool) if mask is None else mask

    def beside_padding(array: Array) -> Array:
        """Each row followed by one of zeros, which its shard has at hand."""
        pairs = jnp.stack([array, jnp.zeros_like(array)], axis=2)
        return pairs.reshape(array.shape[0], 2 * points, *array.shape[2:])

    number = jnp.broadcast_to(jnp.arange(2 * points) // 2, (x.shape[0], 2 * points))
    x, mask = beside_padding(x), beside_padding(mask)
    mask, number = (mesh_lib.constrain(array, DATA, POINTS) for array in (mask, number))
    return mesh_lib.constrain(x, DATA, POINTS, None), mask, number

"""Fine-tuning: which weights train, as a configuration says, and what is added beside them."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Key

from experiments.configuration.schema import FinetuneConfig
from experiments.configuration.values import rate_of
from experiments.finetuning import adapters
from experiments.finetuning.weight_groups import Names, Rates, names_of
from experiments.models import Model


class Tuning:
    """What trains of a model."""

    def __init__(self, config: FinetuneConfig, model: Model):
        """Finds the weights that the configuration's patterns name.

        Args:
            config: see `FinetuneConfig`.
            model: the model; shapes are enough.

        Raises:
            ValueError: a pattern matches nothing, or nothing trains.
        """
        self._config = config
        layers = adapters.linear_layers(model) if config.lora_rank else {}
        names = Names(name for of in layers.values() for name in of)
        self._adapted = (
            names.matched("finetune.lora_layers", config.lora_layers) if layers else set()
        )
        self._layers = [path for path, of in layers.items() if self._adapted.intersection(of)]
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        self.rates = self._rates(jax.eval_shape(self.start, params, jax.random.key(0)))

    def start(self, params: Mapping[str, Any], key: Key[Array, ""]) -> Mapping[str, Any]:
        """A model's weights, with adapters beside them if there are to be any."""
        if not self._layers:
            return params
        rank, alpha = self._config.lora_rank, self._config.lora_alpha
        alpha = rank if alpha is None else alpha
        return adapters.with_adapters(params, self._layers, rank, alpha, key)

    def _rates(self, params: Mapping[str, Any]) -> Rates:
        config = self._config
        flat = flatten_dict(params)
        named = {path: names_of(path, leaf.shape) for path, leaf in flat.items()}
        own = Names(name for path, of in named.items() if not _is_adapter(path[-1]) for name in of)
        freeze = config.freeze
        if freeze is None:
            freeze = ["*"] if config.lora_rank else []
        frozen = own.matched("finetune.freeze", freeze)
        frozen -= own.matched("finetune.unfreeze", config.unfreeze)
        frozen |= {f"{layer}.kernel" for layer in self._adapted}
        every = Names(name for of in named.values() for name in of)
        factors: dict[str, float] = {}
        for pattern, factor in map(rate_of, config.learning_rates):
            matched = every.matched("finetune.learning_rates", [pattern])
            factors |= dict.fromkeys(matched, factor)
        for name in (name for of in named.values() for name in of):
            layer, _, last = name.rpartition(".")
            beside = _is_adapter(last) and (last == adapters.SCALE or layer not in self._adapted)
            if name in frozen or beside:
                factors[name] = 0.0
        return Rates.by_name(params, factors) if factors else Rates()


def _is_adapter(name: Any) -> bool:
    return name in (adapters.DOWN, adapters.UP, adapters.SCALE)

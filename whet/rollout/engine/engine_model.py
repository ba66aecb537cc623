"""EngineModel: the model that an embedded engine runs, either the trainer's own or a copy that is sent new weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from whet.errors import ConfigError, EngineError
from whet.models.load import load_model
from whet.models.loaded_model import LoadedModel

__all__ = ["EngineModel"]


class EngineModel:
    """A model that the embedded engine can run, and the update of its weights.

    Args: model: a LoadedModel, or a module to load. own_weights: run a copy, which no optimizer step changes.
    Raises: ConfigError: a critic, or a model that whet's attention does not fit.
    """

    def __init__(self, model: LoadedModel | nn.Module, *, own_weights: bool = False) -> None:
        if isinstance(model, nn.Module):
            model = load_model(model, device=next(model.parameters()).device)
        if model.lm_head.kind == "none":
            raise ConfigError(f"{model.name} is a critic: it has no LM head to generate with; give the actor")
        if model.is_view:
            raise ConfigError(
                f"{model.name} is a read-only view of another model (its adapter switched off); pass that model"
            )
        if not model.packable:
            raise ConfigError(
                f"the embedded engine can't run this model: {'; '.join(model.unpackable_reasons)}; use "
                "rollout_engine 'hf'"
            )
        self.loaded = copy.deepcopy(model) if own_weights else model  # with its heads and adapter
        self.shared = not own_weights
        """Whether the parameters are the trainer's."""
        self.adapted = own_weights and model.adapter is not None
        """Whether an update has only the trained parameters: the copy's base equals the trainer's for good."""
        trained = {n for n, p in model.module.named_parameters() if p.requires_grad}
        self._trained = trained if self.adapted and trained else None
        if own_weights:
            self.loaded.module.requires_grad_(False)
        self._is_complete = True

    def check_complete(self) -> None:
        """Raises EngineError after an update that failed half-way: nothing may be sampled from a mixture."""
        if not self._is_complete:
            raise EngineError("the last update of the engine's weights failed half-way; give it all of them again")

    def check_weights(self, weights: object | None) -> None:
        """Raises EngineError: weights for an engine that shares the trainer's, or none for one that has its own."""
        if weights is not None and self.shared:
            raise EngineError(
                "the engine reads the trainer's own parameters; call update_weights(version) without weights"
            )
        if weights is None and not self.shared:
            which = "trained" if self.adapted else "named"
            raise EngineError(
                f"the engine has weights of its own; call update_weights(version, worker.{which}_weights())"
            )

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        """Copies weights into the parameters, one at a time, in their dtype and on their device.

        Args: weights: (name, tensor); a shared tensor comes under one of its names or under each. Of a model with an
            adapter only the trained parameters. None = the parameters are the trainer's.
        Raises: EngineError: an unknown name, another shape, or a missing parameter.
        """
        if weights is None:
            return
        parameters = dict(self.loaded.module.named_parameters(remove_duplicate=False))
        missing = {id(p): name for name, p in parameters.items() if self._trained is None or name in self._trained}
        self._is_complete = False
        for name, tensor in weights:
            if name not in parameters:
                raise EngineError(f"the engine's model has no parameter {name!r}; give the weights of that model")
            if parameters[name].shape != tensor.shape:
                raise EngineError(f"{name} is {tuple(tensor.shape)}, and {tuple(parameters[name].shape)} in the engine")
            parameters[name].copy_(tensor)
            missing.pop(id(parameters[name]), None)
        if missing:
            first, more = next(iter(missing.values())), len(missing) - 1
            raise EngineError(f"no weights were given for {first!r} and {more} others; an update takes all of them")
        self._is_complete = True

"""SFTLearner: supervised fine-tuning. L = Σ_t w_t · l_t over the trained tokens, l = −log π(a) by default."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from whet.config import SFTConfig
from whet.config.base import check_instance
from whet.config.model import SFT_LR
from whet.data.encoder import Encoder
from whet.data.supervised import SFTEncoder
from whet.learners.from_config import bind_fields, check_call, other_field
from whet.learners.supervised import SupervisedLearner
from whet.ops import LOSS_AGG_MODES, SFT_LOSSES
from whet.train.supervised_models import SupervisedModels
from whet.types import Example, LossInputs
from whet.util.references import resolve_name

__all__ = ["SFTLearner"]


class SFTLearner(SupervisedLearner[SFTConfig]):
    """Teaches a language model what the assistant says in conversations, or what follows prompts.

    Args: models, data, settings, observers: as of SupervisedLearner. algo_config: SFTConfig; None = its defaults.
    Raises: ConfigError: an unknown loss or aggregation, or a loss of a wrong signature.

    Example: SFTLearner(SupervisedModels(actor=folder, tokenizer=folder)).train([{"prompt": "2+2=", "response": "4"}]).
    """

    usual_lr = SFT_LR

    def __init__(self, models: SupervisedModels, algo_config: SFTConfig | None = None, **options: Any) -> None:
        c = check_instance(algo_config or SFTConfig(), SFTConfig, "algo_config")
        super().__init__(models, c, **options)
        self._loss = bind_fields(resolve_name(c.loss_type, SFT_LOSSES, "SFT loss", hint=other_field), c)
        check_call(self._loss, "loss_type", ("x",))
        models.trainer.set_loss(
            self.loss,
            loss_agg_mode=resolve_name(c.loss_agg_mode, LOSS_AGG_MODES, "loss_agg_mode", hint=other_field),
            loss_agg_norm=c.loss_agg_norm,
            entropy=c.log_entropy,
            constants=("correct",),
        )

    @property
    def chance_loss(self) -> float | None:
        """The ln V of a uniform choice among V tokens, where the loss is a mean of −log π."""
        c = self.algo_config
        if c.loss_type != "nll" or c.loss_agg_mode not in ("token-mean", "sequence-mean-token-mean"):
            return None
        return math.log(self.models.trained.loaded.num_ids)

    def encoder(self) -> Encoder[Example]:
        """Conversations, prompts with responses, or plain text."""
        return SFTEncoder(self.models.tokenizer, self.data)

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss at each token, [s], and its metrics."""
        result = self._loss(x)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        if x.entropy is not None:
            metrics = {**metrics, "entropy": x.entropy.detach()}
        if x.correct is not None:
            metrics = {**metrics, "mean_token_accuracy": x.correct.to(loss.dtype)}
        return loss, metrics

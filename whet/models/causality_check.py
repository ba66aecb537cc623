"""Whether a model is causal: its logits at a token may not depend on the tokens after it.

An encoder (BERT and its relatives) runs, samples and trains like any other, on log-probabilities of tokens that it has
seen; its config does not tell it apart, since causal families say is_decoder: false too.
Dim legend: T tokens, d embedding size.
Left out on purpose: parameters made in inference mode, of which there is no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from whet.errors import ConfigError, format_exception
from whet.models.self_check import probe_tokens

__all__ = ["check_causal"]

NUM_TOKENS = 8
"""Run; the log-probabilities of the first half are looked at."""
MAX_GRADIENT_RATIO = 1e-4
"""Of the largest gradient of an earlier token, the largest of a later one: 0 except where masks are not infinite, from
5e-3 in untrained encoders."""


def check_causal(module: PreTrainedModel, name: str) -> None:
    """Runs a few tokens and asks for the gradient of the first ones' log-probabilities with respect to the later ones.

    Args: module: a causal language model of transformers with its own attention; its parts are left in the mode that
        it is in itself. name: for messages.
    Raises: ConfigError: it can't run them, or the gradient is not 0.

    >>> from transformers import BertConfig, BertLMHeadModel
    >>> sizes = dict(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    >>> check_causal(BertLMHeadModel(BertConfig(**sizes, is_decoder=True)), "bert")
    >>> check_causal(BertLMHeadModel(BertConfig(**sizes)), "bert")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.ConfigError: 'bert' (bert) is not causal: ...
    """
    if any(p.is_inference() for p in module.parameters()):
        return
    sizes: dict[str, Any] = vars(module.config)
    try:
        size = _gradient(
            module, probe_tokens(module.config.vocab_size, sizes.get("max_position_embeddings"))[:NUM_TOKENS]
        )
    except Exception as error:  # a model's own code may raise anything
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()})
        several = f"its parameters are {' and '.join(dtypes)}: bring them to one, model.to(dtype)"
        sizes_of = "the sizes in its config.json must fit each other, and its forward must give logits for input_ids"
        raise ConfigError(
            f"{name!r} ({module.config.model_type}) can't run {NUM_TOKENS} tokens: {format_exception(error, 200)}; "
            f"{several if len(dtypes) > 1 else sizes_of}"
        ) from error
    half = len(size) // 2
    if size.isfinite().all() and size[half:].max() > MAX_GRADIENT_RATIO * size[:half].max():
        hint = " (its config says is_decoder: false)" if sizes.get("is_decoder") is False else ""
        raise ConfigError(
            f"{name!r} ({module.config.model_type}) is not causal: its logits at a token depend on the tokens after "
            f"it{hint}, so it gives no probability of a completion; give a model that was trained as a causal language "
            "model"
        )


def _gradient(module: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[T]: how much the log-probabilities that the first half predicts depend on the embedding of each token."""
    embeddings: list[Tensor] = []

    def cut(_: Any, __: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[0].clone()  # some models work on it in place

    layer: Any = module.get_input_embeddings()
    hook = layer.register_forward_hook(cut)
    training = module.training
    module.eval()  # activation checkpointing may take no gradient of what goes in
    try:
        with torch.inference_mode(False), torch.enable_grad():
            ids = torch.tensor([tokens], device=layer.weight.device)
            half = len(tokens) // 2
            logits = module(input_ids=ids, use_cache=False).logits[0, :half]
            loss = F.cross_entropy(logits.float(), ids[0, 1 : half + 1])
            (found,) = torch.autograd.grad(loss, embeddings[:1])
    finally:
        hook.remove()
        module.train(training)
    return found.float().abs().reshape(len(tokens), -1).amax(1)

"""Checks that a model is causal: its logits at a token must not depend on later tokens.

An encoder such as BERT samples and trains without an error, although it has already seen the tokens that it predicts.
Its config does not show that it is an encoder, because causal models may have is_decoder: false too.
Dim legend: T tokens, d embedding size.
Left out on purpose: models with parameters that were created in inference mode, which have no gradient.
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
"""Tokens of the test run; the log-probabilities of the first half are checked."""
MAX_GRADIENT_RATIO = 1e-4
"""The largest gradient of a later token, relative to the largest gradient of an earlier one, that is still causal. With
infinite masks it is 0; untrained encoders have at least 5e-3."""


def check_causal(module: PreTrainedModel, name: str) -> None:
    """Runs a few tokens, and checks that the log-probabilities of the first have no gradient in the later ones.

    Args: module: a causal language model of transformers with its own attention. Afterwards its submodules are all in
        the module's own mode (train or eval). name: for messages.
    Raises: ConfigError: the model can't run the tokens, or the gradient is not 0.

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
        gradients = _embedding_gradients(
            module, probe_tokens(module.config.vocab_size, sizes.get("max_position_embeddings"))[:NUM_TOKENS]
        )
    except Exception as error:  # a model's own code may raise anything
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()})
        mixed = f"its parameters are {' and '.join(dtypes)}: convert them to one dtype with model.to(dtype)"
        other = "the sizes in its config.json must fit each other, and its forward must return logits for input_ids"
        raise ConfigError(
            f"{name!r} ({module.config.model_type}) can't run {NUM_TOKENS} tokens: {format_exception(error, 200)}; "
            f"{mixed if len(dtypes) > 1 else other}"
        ) from error
    half = len(gradients) // 2
    if gradients.isfinite().all() and gradients[half:].max() > MAX_GRADIENT_RATIO * gradients[:half].max():
        hint = " (its config says is_decoder: false)" if sizes.get("is_decoder") is False else ""
        raise ConfigError(
            f"{name!r} ({module.config.model_type}) is not causal: its logits at a token depend on later tokens"
            f"{hint}, so they are not the probabilities of a completion; give a model that was trained as a causal "
            "language model"
        )


def _embedding_gradients(module: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[T]: the largest gradient, in each token's embedding, of the log-probabilities of the first half."""
    embeddings: list[Tensor] = []

    def detach_output(_: Any, __: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[0].clone()  # some models change it in place

    layer: Any = module.get_input_embeddings()
    hook = layer.register_forward_hook(detach_output)
    training = module.training
    module.eval()  # with activation checkpointing there may be no gradient of the embeddings
    try:
        with torch.inference_mode(False), torch.enable_grad():
            ids = torch.tensor([tokens], device=layer.weight.device)
            half = len(tokens) // 2
            logits = module(input_ids=ids, use_cache=False).logits[0, :half]
            loss = F.cross_entropy(logits.float(), ids[0, 1 : half + 1])
            (gradient,) = torch.autograd.grad(loss, embeddings[:1])
    finally:
        hook.remove()
        module.train(training)
    return gradient.float().abs().reshape(len(tokens), -1).amax(1)

"""Prompt tuning with PEFT's module: learned virtual tokens before every row (prompt tuning and p-tuning), or learned
keys and values in every layer (prefix tuning).

    adapter_config.json, adapter_model.safetensors    PEFT's files, with the final virtual tokens
    prompt_encoder.safetensors                        the encoder of the virtual tokens, from which training continues

The model is PEFT's PeftModel around a frozen language model or classifier. It trains padded, since a layout of packed
rows has no place for the virtual tokens. The "hf" engine samples from it.
Dim legend: B rows, T tokens, v virtual tokens.
Left out on purpose: several prompts at once.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from whet.errors import ConfigError
from whet.models.lora_layers import Adapter

__all__ = [
    "ENCODER",
    "KINDS",
    "PromptAdapter",
    "is_prompt_tuned",
    "num_virtual_tokens",
    "prompt_in_generate",
    "save_prompt",
]

ENCODER = "prompt_encoder.safetensors"
"""The file of the encoder of the virtual tokens."""
KINDS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
"""The kinds of prompt learning that can be trained."""


def is_prompt_tuned(model: object) -> bool:
    """Returns whether a model is a PEFT model with a learned prompt.

    >>> is_prompt_tuned(nn.Linear(2, 2))
    False
    """
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning


def num_virtual_tokens(model: Any) -> int:
    """Returns the number of positions before each row that a learned prompt takes; 0 for other models.

    >>> num_virtual_tokens(nn.Linear(2, 2))
    0
    """
    return model.active_peft_config.num_virtual_tokens if is_prompt_tuned(model) else 0


class PromptAdapter(Adapter):
    """The learned prompt of a model. The model's decoder reads it before each row, and returns the states of the row.

    Args: model: PEFT's model. new: the prompt is untrained, so the reference is the model without it.
    Raises: ConfigError: a kind that is not in `KINDS`.
    """

    def __init__(self, model: Any, *, new: bool) -> None:
        super().__init__({})
        self.kind: str = model.active_peft_config.peft_type.value
        if self.kind not in KINDS:
            raise ConfigError(f"peft_type {self.kind} is not supported; use one of {', '.join(KINDS)}, or LoRA")
        self.model, self.new, self.on = model, new, True
        vars(model)["get_decoder"] = lambda: self.states

    def parameters(self) -> Iterator[nn.Parameter]:
        """Returns the parameters of the prompt's encoder."""
        return self.model.prompt_encoder.parameters()

    @property
    def name(self) -> str:
        """The name of the active adapter."""
        return self.model.active_adapter

    def is_untrained(self) -> bool:
        """Returns whether the prompt is untrained, so the reference is the model without it."""
        return self.new

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Runs the model without the prompt inside the context."""
        was_on, self.on = self.on, False
        try:
            yield
        finally:
            self.on = was_on

    def states(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> Any:
        """Returns the decoder's output for some rows, without the virtual tokens.

        Args: input_ids, attention_mask: [B T]. kwargs: for the decoder.
        """
        decoder = self.model.get_base_model().get_decoder()
        if not self.on:
            return decoder(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        count = self.model.active_peft_config.num_virtual_tokens
        prompt = self.model.get_prompt(len(input_ids))
        mask = torch.cat([attention_mask.new_ones(len(input_ids), count), attention_mask], 1)
        if self.kind == "PREFIX_TUNING":
            return decoder(input_ids=input_ids, attention_mask=mask, **{_cache_name(decoder): prompt}, **kwargs)
        tokens = decoder.get_input_embeddings()(input_ids)
        output = decoder(inputs_embeds=torch.cat([prompt.to(tokens.dtype), tokens], 1), attention_mask=mask, **kwargs)
        output.last_hidden_state = output.last_hidden_state[:, count:]
        return output


@contextmanager
def prompt_in_generate(model: Any) -> Iterator[None]:
    """Lets a model's `generate` read its learned prompt inside the context.

    PEFT up to 0.21.2 looks for the cache under the name it had before transformers 5.24, does not find it, and leaves
    the prompt out without a word. The context gives the cache its old name where PEFT looks for it.

    Args: model: any model; one without a learned prompt, or with an older transformers, stays as it is.
    """
    if not is_prompt_tuned(model) or _cache_name(model.get_base_model()) == "past_key_values":
        yield
        return
    prepare = model.base_model_prepare_inputs_for_generation

    def prepare_with_old_name(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(*args, **kwargs)
        if "cache" in inputs:
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs

    model.base_model_prepare_inputs_for_generation = prepare_with_old_name
    try:
        yield
    finally:
        model.base_model_prepare_inputs_for_generation = prepare


def _cache_name(module: nn.Module) -> str:
    """Returns the name of the argument that takes the cache: `cache` from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


@torch.no_grad()
def save_prompt(model: Any, folder: Path, masters: Mapping[str, Tensor] | None = None) -> None:
    """Writes a learned prompt; PeftModel.from_pretrained(base, folder) loads it.

    Args: model: PEFT's model. folder: an existing folder. masters: fp32 tensors that replace parameters, by the
        parameters' names.
    """
    parameters: dict[str, Tensor] = {**dict(model.named_parameters()), **(masters or {})}
    by_name = {n: t.detach() for n, t in parameters.items() if n.startswith("prompt_enc")}
    encoder = {n: t.cpu().contiguous().clone() for n, t in by_name.items()}
    save_file(encoder, folder / ENCODER, metadata={"format": "pt"})
    params = dict(model.named_parameters())
    originals = {n: params[n].data for n in by_name}
    try:
        for name, tensor in by_name.items():
            params[name].data = tensor
        embeddings = model.get_prompt_embedding_to_save(model.active_adapter)
    finally:
        for name, data in originals.items():
            params[name].data = data
    save_file({"prompt_embeddings": embeddings.cpu().contiguous()}, folder / "adapter_model.safetensors")
    config = copy.deepcopy(model.active_peft_config)
    config.inference_mode = True
    config.save_pretrained(str(folder))

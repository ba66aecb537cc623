"""TRL's helpers for models: they install a chat template with its tokens, or copy a model as a frozen reference."""

from __future__ import annotations

import copy
from typing import Any

from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError, lookup_error

__all__ = ["clone_chat_template", "create_reference_model", "setup_chat_format"]

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def clone_chat_template(
    model: Any, tokenizer: Any, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[Any, Any, list[int]]:
    """Gives a model and its tokenizer the chat template of another tokenizer, with its end token and added tokens.

    Args: source_tokenizer_path: a hub name or a folder. resize_to_multiple_of: the embeddings are padded to a multiple
        of this; padding rows get the tokens <extra_id_0> and so on. None = no padding.
    Returns: the model, the tokenizer, and the ids of the new tokens.
    """
    source: Any = load_tokenizer(source_tokenizer_path)
    tokenizer.chat_template = source.get_chat_template()
    new = [token for token in source.added_tokens_decoder.values() if token.content not in tokenizer.get_vocab()]
    tokenizer.add_tokens(new)
    tokenizer.eos_token = source.eos_token
    _resize(model, tokenizer, resize_to_multiple_of)
    names, number = [token.content for token in new], 0
    while len(tokenizer) < model.get_input_embeddings().num_embeddings:
        name = f"<extra_id_{number}>"
        names += [name] * tokenizer.add_tokens(name)
        number += 1
    return model, tokenizer, tokenizer.convert_tokens_to_ids(names)


def setup_chat_format(
    model: Any, tokenizer: Any, format: str = "chatml", resize_to_multiple_of: int | None = None
) -> tuple[Any, Any]:
    """Gives a base model and its tokenizer ChatML: the template, <|im_start|> and <|im_end|>, and their embeddings.

    Args: format: "chatml". resize_to_multiple_of: the embeddings are padded to a multiple of this; None = no padding.
    Returns: the model and the tokenizer.
    Raises: ConfigError: another format; a tokenizer that has a chat template already.
    """
    if format != "chatml":
        raise lookup_error("chat format", format, ["chatml"])
    if tokenizer.chat_template is not None:
        raise ConfigError(
            "Chat template is already added to the tokenizer; to replace it, set tokenizer.chat_template = None first"
        )
    begin, end = "<|im_start|>", "<|im_end|>"
    tokenizer.add_special_tokens({"bos_token": begin, "eos_token": end, "pad_token": end})
    tokenizer.chat_template = _CHATML
    _resize(model, tokenizer, resize_to_multiple_of)
    for config in (model.config.get_text_config(), model.generation_config):
        if config is not None:
            config.pad_token_id, config.bos_token_id = tokenizer.pad_token_id, tokenizer.bos_token_id
    return model, tokenizer


def _resize(model: Any, tokenizer: Any, multiple: int | None) -> None:
    """Resizes the embeddings to the tokenizer, and sets the tokenizer's end token in the model's configurations."""
    model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    if model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=multiple)


def create_reference_model(model: Any, num_shared_layers: int | None = None, pattern: str | None = None) -> Any:
    """Returns a frozen copy of a model. The trainers make their reference themselves.

    Raises: ConfigError: num_shared_layers or pattern: layers can't be shared.
    """
    if num_shared_layers is not None or pattern is not None:
        raise ConfigError(
            "num_shared_layers and pattern are not supported: the reference is a full copy; leave them out"
        )
    return copy.deepcopy(model).requires_grad_(False).eval()

"""Applies eos_token, pad_token and chat_template_path to the tokenizer, and the end token to the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError

__all__ = ["prepare_tokenizer", "set_eos_token"]


def prepare_tokenizer(tokenizer: Any, args: Any) -> None:
    """Sets chat template, end token and padding token. Raises ConfigError: a token that is not in the vocabulary."""
    template = args.chat_template_path if "chat_template_path" in args.TABLE else None
    if template is not None:
        _load_template(tokenizer, str(template))
    for name in ("eos_token", "pad_token"):
        token = getattr(args, name) if name in args.TABLE else None
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise ConfigError(
                f"The specified `{name}` ('{token}') is not found in the vocabulary of the given `processing_class` "
                f"({type(tokenizer).__name__}). Ensure that the `{name}` exists in the vocabulary before using it."
            )
        setattr(tokenizer, name, token)


def _load_template(tokenizer: Any, path: str) -> None:
    """Takes the chat template from a file or from another model's tokenizer, whose added tokens must exist."""
    if Path(path).is_file() and path.endswith((".jinja", ".j2")):
        tokenizer.chat_template = Path(path).read_text()
        return
    source: Any = load_tokenizer(path)
    if missing := sorted(set(source.get_added_vocab()) - set(tokenizer.get_vocab())):
        raise ConfigError(
            f"chat_template_path={path!r}: the template uses tokens that the model's tokenizer lacks "
            f"({', '.join(missing[:3])} ...), and embeddings are not resized here; add the tokens to model and "
            "tokenizer first, or give a .jinja file"
        )
    tokenizer.chat_template, tokenizer.eos_token = source.chat_template, source.eos_token


def set_eos_token(model: Any, tokenizer: Any, args: Any) -> None:
    """Sets the tokenizer's end token in the model's configuration if eos_token or chat_template_path chose it."""
    is_set = any(n in args.TABLE and getattr(args, n) is not None for n in ("eos_token", "chat_template_path"))
    if not is_set or tokenizer.eos_token_id is None:
        return
    model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    generation = model.generation_config
    if generation is None:
        return
    ids = generation.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    if tokenizer.eos_token_id not in ids:
        generation.eos_token_id = [tokenizer.eos_token_id, *ids]

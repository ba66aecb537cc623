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
        _take_template(tokenizer, str(template))
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


def _take_template(tokenizer: Any, path: str) -> None:
    """The chat template of a file, or of another model's tokenizer, whose tokens have to be there."""
    if Path(path).is_file() and path.endswith((".jinja", ".j2")):
        tokenizer.chat_template = Path(path).read_text()
        return
    source: Any = load_tokenizer(path)
    if lacking := sorted(set(source.get_added_vocab()) - set(tokenizer.get_vocab())):
        raise ConfigError(
            f"chat_template_path={path!r}: its template is made of tokens that the model's tokenizer lacks "
            f"({', '.join(lacking[:3])} ...), and embeddings are not resized here; add them to model and tokenizer "
            "first, or give a .jinja file"
        )
    tokenizer.chat_template, tokenizer.eos_token = source.chat_template, source.eos_token


def set_eos_token(model: Any, tokenizer: Any, args: Any) -> None:
    """Makes the model's configuration agree with the end token that was chosen, for what is made with it later."""
    chosen = [n for n in ("eos_token", "chat_template_path") if n in args.TABLE and getattr(args, n) is not None]
    if not chosen or tokenizer.eos_token_id is None:
        return
    model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    generation = model.generation_config
    if generation is None:
        return
    ids = generation.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    if tokenizer.eos_token_id not in ids:
        generation.eos_token_id = [tokenizer.eos_token_id, *ids]

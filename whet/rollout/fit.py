"""Whether prompts fit the model at all, asked before the first rollout: a run would end at the step that meets one.

Left out on purpose: streams, whose prompts nobody has seen yet; the engine refuses theirs one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from whet.errors import DataError
from whet.models.modes import max_positions
from whet.types import Prompt

__all__ = ["check_fit"]


def check_fit(prompts: Iterable[Prompt], module: nn.Module, max_tokens: int) -> None:
    """Refuses a prompt that the model could never complete.

    Args: prompts: encoded. module: a model of transformers. max_tokens: new tokens that may be asked for, as
        max_tokens_to_generate says.
    Raises: DataError: prompt and completion have more tokens than the model has positions, or an id that is outside
        its vocabulary; with the row and the numbers.

    >>> import numpy as np
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, n_positions=16, vocab_size=32))
    >>> p = Prompt(tokens=np.arange(10), source="", row=3)
    >>> check_fit([p], model, max_tokens=6)
    >>> check_fit([p], model, max_tokens=7)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.DataError: row 3: 10 prompt tokens + rollout.max_tokens_to_generate 7 = 17, but ...
    """
    positions = max_positions(module)
    vocabulary = int(module.get_input_embeddings().weight.shape[0])  # pyright: ignore
    for p in prompts:
        length, highest = len(p.tokens), int(p.tokens.max())
        if positions is not None and length + max_tokens > positions:
            room = max(positions - max_tokens, 0)
            raise DataError(
                f"row {p.row}: {length} prompt tokens + rollout.max_tokens_to_generate {max_tokens} = "
                f"{length + max_tokens}, but the model has {positions} positions (max_position_embeddings); set "
                f"rollout.max_prompt_length to {room} with on_long_prompt drop or truncate_left, or lower "
                "max_tokens_to_generate"
            )
        if highest >= vocabulary:
            raise DataError(
                f"row {p.row}: token {highest} is outside the model's vocabulary of {vocabulary}; the tokenizer is "
                "another model's: set tokenizer to this one's"
            )

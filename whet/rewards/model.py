"""RewardModel: a trained reward model, called as a reward function.

What it reads is the policy's own token ids where both have one vocabulary, and the same words by the reward model's own
tokenizer and chat template where they don't. Left out on purpose: how it is loaded and run, which is a worker's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from whet.data.row_schema import message_text
from whet.errors import ConfigError
from whet.types import Example, Message, TokenBatch, TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RewardModel", "Scorer"]


class Scorer(Protocol):
    """What runs the model; a ModelWorker is one."""

    def scores(self, batch: TokenBatch) -> Tensor:
        """The score at the last token of each sequence: [N]."""
        ...


class RewardModel:
    """Gives each completion the score that a reward model has at its last token.

    Where prompts are messages, or `apply_chat_template` made them a turn, the words are those of the reward model's own
    chat template if it has another one than the policy; else the prompt and the completion end to end. A completion
    that has no token besides its prompt's single one is not judged.

    Args:
        worker: runs the model.
        name: of its column in the table of rewards.
        policy_tokenizer: whose ids completions are made of.
        tokenizer: the reward model's; None = the policy's.
        apply_chat_template, system_prompt: how texts became prompts, as the data section says.

    Example: RewardModel(worker, name="rm", policy_tokenizer=t)(prompts=["1+1="], completions=["2"],
    prompt_ids=[[49, 43, 49, 61]], completion_ids=[[50, 256]]) -> [0.25]
    """

    def __init__(
        self,
        worker: Scorer,
        *,
        name: str,
        policy_tokenizer: PreTrainedTokenizerBase,
        tokenizer: PreTrainedTokenizerBase | None = None,
        apply_chat_template: bool = False,
        system_prompt: str | None = None,
    ) -> None:
        self.worker = worker
        self.name = name
        self.tokenizer = policy_tokenizer if tokenizer is None else tokenizer
        own, theirs = self.tokenizer, policy_tokenizer
        self.same_ids = own is theirs or own.get_vocab() == theirs.get_vocab()
        """Whether an id means the same to both models."""
        self.same_template = own.chat_template in (None, theirs.chat_template)
        self.apply_chat_template = apply_chat_template
        self.system_prompt = system_prompt or None

    def __call__(
        self,
        *,
        prompts: Sequence[str | list[Message]],
        completions: Sequence[str | list[Message]],
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
    ) -> list[float | None]:
        """The scores, one for each completion; None where there is nothing to judge.

        Raises: ConfigError: messages, and a vocabulary but no chat template of its own.
        """
        pairs: list[tuple[Sequence[int], Sequence[int]]] = []
        for prompt, text, before, after in zip(prompts, completions, prompt_ids, completion_ids, strict=True):
            chat = self.apply_chat_template or not isinstance(prompt, str)
            if self.same_ids and (self.same_template or not chat):
                pairs.append((before, after))
            else:
                ids = self._chat(prompt, text) if chat else self._text(prompt, text)
                pairs.append((ids[:-1], ids[-1:]))
        judged = [i for i, (before, after) in enumerate(pairs) if len(before) and len(after)]
        found: list[float | None] = [None] * len(pairs)
        if judged:
            scores = self.worker.scores(_batch([pairs[i] for i in judged])).tolist()
            for i, score in zip(judged, scores, strict=True):
                found[i] = score
        return found

    def _text(self, prompt: Any, completion: Any) -> list[int]:
        """The ids of prompt and completion as one text."""
        return list(self.tokenizer(prompt + completion, verbose=False).input_ids)

    def _chat(self, prompt: str | list[Message], completion: str | list[Message]) -> list[int]:
        """The ids of the conversation, closed."""
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer of the reward model {self.name} has no chat template, which messages need; set its "
                "chat_template, or train on plain text prompts"
            )
        turns: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        turns = [{**m, "content": message_text(m)} if isinstance(m.get("content"), list | tuple) else m for m in turns]
        if self.system_prompt is not None and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": self.system_prompt}, *turns]
        said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
        if turns[-1]["role"] == "assistant" and said:  # the policy has continued that turn
            first: Mapping[str, Any] = said[0]
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}{first['content']}"}
            said = said[1:]
        ids: Any = self.tokenizer.apply_chat_template([*turns, *said], tokenize=True, return_dict=False)
        return list(ids)


def _batch(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TokenBatch:
    """The sequences as a batch, those of one prompt that follow each other as a group, which is run once.

    >>> _batch([([5, 6], [7]), ([5, 6], [8, 9])]).prefix_of.tolist()
    [0, 0]
    """
    examples = [
        Example(
            sequences=tuple(
                TrainSequence(
                    prefix=np.asarray(before, np.int32),
                    tokens=np.asarray(after, np.int32),
                    mask=np.ones(len(after), bool),
                )
                for _, after in of_one
            )
        )
        for before, of_one in itertools.groupby(pairs, key=lambda pair: list(pair[0]))
    ]
    return TokenBatch.from_examples(examples)

"""RewardModel: a trained reward model, called as a reward function.

It reads the policy's token ids if both models have the same vocabulary, else the same text by its own tokenizer and
chat template. A worker loads and runs the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.data.row_schema import message_text
from whet.errors import ConfigError
from whet.types import Example, Message, TokenBatch, TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from whet.train.worker import ModelWorker

__all__ = ["RewardModel"]


class RewardModel:
    """Scores each completion by the reward model's output at its last token.

    For conversations (messages, or texts with `apply_chat_template`), the model reads its own chat template if it
    differs from the policy's; otherwise it reads the prompt and the completion end to end. There is no score for an
    empty prompt or completion.

    Args:
        worker: runs the model.
        name: the reward's name.
        policy_tokenizer: the tokenizer of the completions.
        tokenizer: the reward model's tokenizer; None = the policy's.
        apply_chat_template, system_prompt: the data section's fields, which make conversations of texts.

    Example: RewardModel(worker, name="rm", policy_tokenizer=t)(prompts=["1+1="], completions=["2"],
    prompt_ids=[[49, 43, 49, 61]], completion_ids=[[50, 256]]) -> [0.25]
    """

    def __init__(
        self,
        worker: ModelWorker,
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
        self.same_ids = self.tokenizer is policy_tokenizer or self.tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        """Whether both models have the same vocabulary."""
        self.same_template = self.tokenizer.chat_template in (None, policy_tokenizer.chat_template)
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
        """Scores completions; None for an empty prompt or completion.

        Raises: ConfigError: messages, and a tokenizer with another vocabulary and no chat template.
        """
        pairs: list[tuple[Sequence[int], Sequence[int]]] = []
        for prompt, text, before, after in zip(prompts, completions, prompt_ids, completion_ids, strict=True):
            chat = self.apply_chat_template or not isinstance(prompt, str)
            if self.same_ids and (self.same_template or not chat):
                pairs.append((before, after))
                continue
            if chat:
                ids = self._encode_chat(prompt, text)
            else:
                ids = self.tokenizer(f"{prompt}{text}", verbose=False).input_ids
            pairs.append((ids[:-1], ids[-1:]))
        scored = [i for i, (before, after) in enumerate(pairs) if len(before) and len(after)]
        rewards: list[float | None] = [None] * len(pairs)
        if scored:
            scores = self.worker.scores(_batch([pairs[i] for i in scored])).tolist()
            for i, score in zip(scored, scores, strict=True):
                rewards[i] = score
        return rewards

    def _encode_chat(self, prompt: str | list[Message], completion: str | list[Message]) -> list[int]:
        """Returns the ids of the conversation in the reward model's chat template."""
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer of the reward model {self.name} has no chat template, which messages need; set its "
                "chat_template, or train on plain text prompts"
            )
        turns: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        turns = [{**m, "content": message_text(m)} if isinstance(m.get("content"), list | tuple) else m for m in turns]
        if self.system_prompt is not None and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": self.system_prompt}, *turns]
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
        if turns[-1]["role"] == "assistant" and answer:  # the policy has continued this turn
            first: Mapping[str, Any] = answer[0]
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}{first['content']}"}
            answer = answer[1:]
        ids: Any = self.tokenizer.apply_chat_template([*turns, *answer], tokenize=True, return_dict=False)
        return list(ids)


def _batch(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TokenBatch:
    """Makes a batch. Consecutive pairs with the same prompt form a group, whose prompt is computed once.

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

"""GRPO from scratch: a two-layer Qwen3 learns to write the letter in its prompt.

The whole algorithm in one file, with torch for the tensors, transformers for the model and whet.ops for the maths.
There is no engine, no padding trick and no parallelism: read it from main() down. It takes seconds on a laptop's CPU.

    python examples/grpo_from_scratch.py

Dim letters: N completions of a step, P prompt tokens, C completion tokens (padded), S completion tokens (not padded),
V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from whet.ops import (
    LogitsProcessors,
    LossInputs,
    aggregate,
    clipped_surrogate,
    draw,
    grpo_advantages,
    hash_rng_key,
    process_logits,
    selective_log_softmax,
    token_weights,
    uniform,
)

# --- the task -------------------------------------------------------------------------------------------------------

LETTERS = "abcdefgh"
PROMPTS = [f"{letter}=" for letter in LETTERS]
"""The prompts: the right answer to "a=" is the letter a."""


def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The share of the completion that is the letter in the prompt; 0 for an empty completion."""
    return [text.count(prompt[0]) / max(len(text), 1) for prompt, text in zip(prompts, completions, strict=True)]


# --- the tokenizer: one token per character, and one token that ends the completion -----------------------------------

VOCABULARY = LETTERS + "=."
END = VOCABULARY.index(".")


def encode(text: str) -> list[int]:
    """Ids of a text."""
    return [VOCABULARY.index(c) for c in text]


def decode(ids: list[int]) -> str:
    """Text of ids, without the end token."""
    return "".join(VOCABULARY[i] for i in ids if i != END)


# --- the settings ---------------------------------------------------------------------------------------------------

STEPS = 60
GENERATIONS = 8  # completions per prompt; each is compared with the others
MAX_COMPLETION = 4
ITERATIONS = 2  # updates per rollout; the second is slightly off-policy, so it needs the clip
LEARNING_RATE = 3e-3
SUPPORT = LogitsProcessors(temperature=1.0)  # the sampling distribution, the same in rollout and in training


def build_model(seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 43,000 parameters, with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=16,
    )
    return Qwen3ForCausalLM(config)


# --- rollout: ids in, ids out ---------------------------------------------------------------------------------------


@torch.no_grad()
def rollout(model: Qwen3ForCausalLM, prompts: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Samples a completion for every row.

    Args:
        prompts: Long [N, P].
        keys: Long [N], the hashed key of each completion. Its random numbers depend on this key and the position alone.
    Returns: the completions, Long [N, C], and their lengths, Long [N]; the end token is part of a completion.
    """
    ids = prompts
    lengths = torch.full((len(prompts),), MAX_COMPLETION)
    for t in range(MAX_COMPLETION):
        position = torch.full((len(prompts),), t)
        logits = process_logits(model(ids).logits[:, -1], SUPPORT, position=position)
        token = draw(logits, uniform(keys, position))
        ended_now = (token == END) & (lengths == MAX_COMPLETION)
        lengths = torch.where(ended_now, t + 1, lengths)
        ids = torch.cat([ids, token[:, None]], 1)  # ended rows continue, but nothing reads their new tokens
    return ids[:, prompts.shape[1] :], lengths


# --- training: the completion tokens of all rows, end to end, are one axis of S tokens ------------------------------


def token_logprobs(model: Qwen3ForCausalLM, prompts: Tensor, completions: Tensor, places: Tensor) -> Tensor:
    """Logprobs of the completion tokens, with gradient.

    Args:
        prompts: Long [N, P].
        completions: Long [N, C].
        places: Long [S], the positions of the real tokens in the flattened [N * C].
    Returns: [S].
    """
    logits = model(torch.cat([prompts, completions], 1)).logits  # [N P+C V]
    logits = logits[:, prompts.shape[1] - 1 : -1].flatten(0, 1)  # the logits at one place predict the next token
    # index_select, not logits[places]: on two threads only the gradient of index_select is repeatable bit for bit
    logits = logits.index_select(0, places)
    targets = completions.flatten().index_select(0, places)
    position = places % completions.shape[1]
    return selective_log_softmax(process_logits(logits, SUPPORT, position=position, keep=targets), targets)


def update(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    prompts: Tensor,
    completions: Tensor,
    lengths: Tensor,
    advantages: Tensor,
) -> None:
    """A few optimizer steps on one rollout."""
    inside = torch.arange(completions.shape[1]) < lengths[:, None]  # [N C]
    places = inside.flatten().nonzero().squeeze(1)
    sequence = places // completions.shape[1]
    mask = torch.ones_like(places, dtype=torch.bool)
    # The loss is per token. The weights decide, once, which mean is taken.
    weights = token_weights(mask, sequence, "token-mean")
    old_logprobs = None
    for _ in range(ITERATIONS):
        logprobs = token_logprobs(model, prompts, completions, places)
        if old_logprobs is None:
            old_logprobs = logprobs.detach()  # logprobs of the policy that sampled
        x = LossInputs(
            sequence=sequence,
            mask=mask,
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            advantages=advantages.index_select(0, sequence),  # all tokens of a completion have its advantage
        )
        loss, _ = clipped_surrogate(x, epsilon=0.2)
        optimizer.zero_grad()
        aggregate(loss, weights).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


# --- the loop -------------------------------------------------------------------------------------------------------


def main(seed: int = 0) -> float:
    """Trains, and returns the mean reward of the last five steps; chance is about 1/10."""
    model = build_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    texts = [text for text in PROMPTS for _ in range(GENERATIONS)]
    prompts = torch.tensor([encode(text) for text in texts])
    group_ids = torch.arange(len(PROMPTS)).repeat_interleave(GENERATIONS)
    history: list[float] = []
    for step in range(STEPS):
        keys = torch.tensor([hash_rng_key(seed, step, p, g) for p in range(len(PROMPTS)) for g in range(GENERATIONS)])
        completions, lengths = rollout(model, prompts, keys)
        answers = [decode(row[:n].tolist()) for row, n in zip(completions, lengths, strict=True)]
        rewards = torch.tensor(reward(texts, answers))
        update(model, optimizer, prompts, completions, lengths, grpo_advantages(rewards, group_ids))
        history.append(rewards.mean().item())
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  reward {history[-1]:.3f}  {texts[0]}{answers[0]}  {texts[-1]}{answers[-1]}")
    return sum(history[-5:]) / 5


if __name__ == "__main__":
    torch.set_num_threads(1)  # matrices this small are slower on two threads
    main()

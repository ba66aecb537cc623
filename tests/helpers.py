"""Tiny models, batches and clusters that several test files build on."""

from __future__ import annotations

import functools
import itertools
import os

import numpy as np
import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

import whet
import whet.tunix
from whet.config import Mode, OptimConfig
from whet.data.tokenizer import byte_tokenizer
from whet.ops import AdvantageInputs, PolicyObjective, clipped_surrogate, reference_kl, sampler_importance
from whet.rewards.call import RewardInputs
from whet.rewards.reward_batch import RewardBatch
from whet.rollout.base import EngineCaps, Output
from whet.rollout.queue_engine import QueueEngine
from whet.types import Completion, Group, Prompt, TokenBatch

VOCABULARY = 264
END, PAD = 256, 257


def full(*values):
    """A set of parameters that `make check-full` alone runs."""
    return pytest.param(*values, marks=pytest.mark.full)


def spread(cases, n):
    """Picks cases, each a tuple of values: at least n (or all), and as many more as show every value once.

    Returns: their indices. Each is the first of those that show the most new values, then the most new pairs.
    """
    kept, values, pairs = set(), set(), set()
    pairs_of = [{*itertools.combinations(case, 2)} for case in cases]
    while len(kept) < len(cases) and (len(kept) < n or values < {v for case in cases for v in case}):
        left = (i for i in range(len(cases)) if i not in kept)
        best = max(left, key=lambda i: (len({*cases[i]} - values), len(pairs_of[i] - pairs)))
        kept.add(best)
        values |= {*cases[best]}
        pairs |= pairs_of[best]
    return kept


def examples(n):
    """How many examples hypothesis tries: n, and in `make check-full` ten times as many."""
    return n * (10 if os.environ.get("WHET_CHECK_FULL") else 1)


def tiny_model(seed=0, *, gain=4.0, dtype=torch.float32, **fields):
    """A random Qwen3 over bytes whose logits are far from flat."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": END,
            "pad_token_id": PAD,
            **fields,
        }
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(gain)
            else:
                p.add_(torch.randn_like(p) * 0.1)
    return model.to(dtype)


def exact_model():
    """A tiny Phi in float64; its norms stay there, whereas Qwen3's go through fp32."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = PhiForCausalLM(PhiConfig(vocab_size=VOCABULARY, **sizes))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4) if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.1)
    return model.double()


def prompt(tokens, row=0, **columns):
    """A Prompt of text or ids."""
    ids = list(tokens.encode()) if isinstance(tokens, str) else tokens
    source = tokens if isinstance(tokens, str) else ""
    return Prompt(tokens=np.array(ids, np.int32), source=source, columns=columns, row=row)


def completion(tokens, generation=0, *, version=0, prefix=None, finish="stop", logprobs=None):
    """A Completion; `version` is one for all tokens or one each."""
    n = len(tokens)
    return Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(n, np.float32) if logprobs is None else np.array(logprobs, np.float32),
        versions=np.broadcast_to(np.array(version, np.int32), n),
        finish_reason=finish,
        generation=generation,
        prefix=None if prefix is None else np.array(prefix, np.int32),
    )


def grpo_objective(x, *, surrogate=clipped_surrogate, beta=0.0, kl_mode="kl", kl_clamp=None, sampler_is_threshold=None):
    """GRPO's objective, composed by hand."""
    weight = functools.partial(sampler_importance, sampler_is_threshold=sampler_is_threshold)
    return PolicyObjective(
        surrogate=surrogate,
        factors=() if sampler_is_threshold is None else (weight,),
        kl=functools.partial(reference_kl, kl_loss_mode=kl_mode, kl_clamp_value=kl_clamp),
        beta=beta,
    )(x)


def advantage_inputs(rewards, groups, lengths=None, mask=None, **columns):
    """AdvantageInputs of trajectories of these lengths (1 each), their tokens in order."""
    rewards, groups = torch.as_tensor(rewards, dtype=torch.float64), torch.as_tensor(groups)
    lengths = torch.ones(len(rewards), dtype=torch.long) if lengths is None else torch.as_tensor(lengths)
    trajectory = torch.repeat_interleave(torch.arange(len(rewards)), lengths)
    size, number = len(trajectory), int(groups.max()) + 1 if len(groups) else 0
    columns = {"values": torch.zeros(size), "greedy_rewards": torch.zeros(number, dtype=torch.float64), **columns}
    return AdvantageInputs(
        rewards=rewards,
        group_of=groups,
        trajectory=trajectory,
        mask=torch.ones(size, dtype=torch.bool) if mask is None else torch.as_tensor(mask),
        **columns,
    )


def reward_batch(total, groups=None, **columns):
    """A RewardBatch of these totals. Args: groups: of each trajectory, in order; None = one group of all."""
    total = torch.as_tensor(total, dtype=torch.float64).numpy()
    each = [0] * len(total) if groups is None else [int(g) for g in groups]
    sizes = [each.count(g) for g in range(max(each) + 1)]
    made = [Group(prompt=prompt("a", g), completions=tuple(completion([5], i) for i in range(n)))
            for g, n in enumerate(sizes)]  # fmt: skip
    texts = [["x"] * n for n in sizes]
    inputs = RewardInputs(prompts=["a"] * len(total), completions=["x"] * len(total),
                          completion_ids=[[5]] * len(total), trajectory_ids=["0_0"] * len(total))  # fmt: skip
    return RewardBatch(
        groups=made, texts=texts, inputs=inputs, **{"table": {"reward": total}, "total": total, **columns}
    )


def random_batch(*shapes, seed=0, masked=False):
    """A TokenBatch of random ids with random advantages; a shape is (prompt length, completion lengths)."""
    rng = np.random.default_rng(seed)
    groups = []
    for row, (p, lengths) in enumerate(shapes):
        done = tuple(
            completion(rng.integers(0, 256, n), g, version=rng.integers(-1, 1, n) if masked and n > 1 else 0)
            for g, n in enumerate(lengths)
        )
        groups.append(Group(prompt=prompt(rng.integers(0, 256, p).tolist(), row), completions=done))
    batch = TokenBatch.from_groups(groups)
    advantages = torch.from_numpy(rng.normal(size=batch.num_sequences)).index_select(0, batch.sequence)
    return batch.replace(advantages=advantages)


def forest(seed, n, *, piece=40, vocab=60):
    """A TokenBatch of n sequences, most of which begin as an earlier one does: forks, later turns, repeats."""
    rng = np.random.default_rng(seed)
    ids = lambda most: rng.integers(2, vocab, rng.integers(0, most + 1)).tolist()
    whole, groups = [], []
    for row in range(n):
        start = whole[rng.integers(len(whole))] if whole and rng.random() < 0.8 else []
        start = start[: len(start) if rng.random() < 0.4 else rng.integers(len(start) + 1)]
        tokens = start + ids(piece)
        tokens += rng.integers(2, vocab, max(0, 2 - len(tokens))).tolist()
        whole.append(tokens)
        cut = int(rng.integers(1, len(tokens)))
        own = [tokens[cut:]] + [tokens[cut:][: rng.integers(len(tokens) - cut)] + ids(piece) for _ in range(row % 3)]
        done = tuple(completion(c or [2], g, version=rng.integers(-1, 1, len(c) or 1)) for g, c in enumerate(own))
        groups.append(Group(prompt=prompt(tokens[:cut], row), completions=done))
    batch = TokenBatch.from_groups(groups)
    return batch.select(torch.arange(n))


def places_seen(micro, place):
    """The places of a micro-batch's input that the state at a place sees, in order."""
    if micro.layout is None:
        width = micro.input_ids.shape[1]
        return list(range(place - place % width, place + 1))
    starts = np.cumsum([0, *micro.layout.lengths])
    k = int(np.searchsorted(starts, place, side="right")) - 1
    found = list(range(int(starts[k]), place + 1))
    while (k := micro.layout.parents[k]) >= 0:
        found = list(range(int(starts[k]), int(starts[k + 1]))) + found
    return found


def seen(micro, target):
    """The tokens that a target of a micro-batch is predicted from."""
    return micro.input_ids.flatten()[places_seen(micro, int(micro.hidden_index[target]))].tolist()


def one_by_one(model, batch, temperature=1.0):
    """The oracle: transformers' own forward on each sequence alone; [S] logprobs with gradient."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # eager takes its softmax in fp32 whatever the model's dtype
    out = []
    for i, (end, n) in enumerate(zip(batch.ends.tolist(), batch.lengths.tolist())):
        prefix, own = batch.prefix(i), batch.tokens[end - n : end]
        logits = model(input_ids=torch.cat([prefix, own])[None], use_cache=False).logits[0, len(prefix) - 1 : -1]
        out.append((logits / temperature).log_softmax(-1).gather(1, own[:, None]).squeeze(1))
    model.set_attn_implementation(before)
    return torch.cat(out)


def weights_of(model):
    """A copy of the parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    """Whether two dicts of tensors are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def gap(a, b):
    """Largest difference between two dicts of tensors."""
    assert a.keys() == b.keys()
    return max((a[k] - b[k]).abs().max().item() for k in a)


def cluster(
    actor=None,
    *,
    reference=None,
    critic=None,
    reward=None,
    reward_tokenizer=None,
    teacher=None,
    engine="embedded",
    rollout=None,
    tokenizer=None,
    lr=1e-2,
    front=whet,
    **training,
):
    """A cluster of tiny models; `training` are fields of RLTrainingConfig, `rollout` those of RolloutConfig, or one
    for each Mode; `front` has the classes: whet or whet.tunix."""
    options = {"actor_optimizer": OptimConfig(lr=lr), "pbar_description": None, **training}
    if not any(isinstance(k, Mode) for k in rollout or {}):
        rollout = front.RolloutConfig(**{"max_tokens_to_generate": 8, "temperature": 1.0, **(rollout or {})})
    return front.RLCluster(
        actor=tiny_model() if actor is None else actor,
        reference=reference,
        critic=critic,
        reward=reward,
        reward_tokenizer=reward_tokenizer,
        teacher=teacher,
        tokenizer=tokenizer or byte_tokenizer(),
        cluster_config=front.ClusterConfig(
            rollout_engine=engine, rollout_config=rollout, training_config=front.RLTrainingConfig(**options)
        ),
    )


tunix_cluster = functools.partial(cluster, front=whet.tunix)


def drawn(c, texts, *, mode=Mode.TRAIN, **options):
    """The token ids that a cluster draws for texts: a list for each."""
    encode = c.encoder(mode)
    prompts = [encode({"prompt": text}, i) for i, text in enumerate(texts)]
    return [g.completions[0].tokens.tolist() for g in c.sample(prompts, mode=mode, **options)]


def length_reward(completions, **_):
    """A reward with spread within nearly every group of random completions."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def rows(count, **columns):
    """Plain prompts, with columns given as lists."""
    return [{"prompt": f"{i}+1=", **{name: column[i] for name, column in columns.items()}} for i in range(count)]


def rounding(program, inputs, *, roundings, dtype=torch.float32):
    """How far rounding alone brings each result of a program in `dtype` from the exact one: 2 √n eps κ.

    A sum in floating point is the exact sum of numbers that are moved a little; n moves in a row, of random signs, are
    rarely more than 2 √n eps of each (Higham and Mary, 2019). κ is what a result moves by where every number of the
    inputs is moved by a relative 1 of either sign; measured with 2⁻¹², far above the rounding of fp32.

    Args:
        program: () -> the results, tensors; of the inputs as they stand.
        inputs: tensors, moved in place and restored.
        roundings: n, the operations in a row between an input and a result, a sum of m numbers counting as m.
    Returns: a bound for each result, of its largest difference.
    """
    step, before = 2.0**-12, [x.detach().clone() for x in inputs]
    exact = [y.detach().double() for y in program()]
    moved = [0.0] * len(exact)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for x, old in zip(inputs, before, strict=True):
                x.copy_(old * (1 + step * (2 * torch.randint(0, 2, x.shape, generator=g) - 1)))
        moved = [max(m, float((y.double() - e).abs().max())) for m, y, e in zip(moved, program(), exact, strict=True)]
    with torch.no_grad():
        for x, old in zip(inputs, before, strict=True):
            x.copy_(old)
    eps = torch.finfo(dtype).eps
    return [2 * roundings**0.5 * eps * (m / step + float(e.abs().max())) for m, e in zip(moved, exact, strict=True)]


class Events(TrainerCallback):
    """What is told, with the step."""

    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda args, state, control, **_: self.seen.append((name, state.global_step))


class Replay(QueueEngine):
    """An engine that returns given completions in their order."""

    caps = EngineCaps(shared_weights=True)

    def __init__(self, loaded, decode, outputs=()):
        super().__init__("replay")
        self.outputs, self.closed = outputs, False

    def step(self, timeout_s=None):
        taken = [self.queue.popleft() for _ in range(len(self.queue))]
        return [
            Output(
                id=r.id,
                tokens=tokens,
                logprobs=np.zeros(len(tokens), np.float32),
                versions=np.zeros(len(tokens), np.int32),
                finish_reason="stop" if tokens[-1] == END else "length",
            )
            for r, tokens in zip(taken, self.outputs)
        ]

    def close(self):
        self.closed = True


def error_message(error, call, *args, **options):
    """The message of the error that a call raises."""
    with pytest.raises(error) as raised:
        call(*args, **options)
    return str(raised.value)


def limit_passes(monkeypatch, worker, most, seen):
    """Passes of more tokens run out of memory."""
    run = worker._stats

    def stats(micro, *args, **options):
        seen.append(micro.num_tokens)
        if micro.num_tokens > most:
            raise torch.OutOfMemoryError("planted")
        return run(micro, *args, **options)

    monkeypatch.setattr(worker, "_stats", stats)

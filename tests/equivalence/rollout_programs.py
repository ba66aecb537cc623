"""Completions of a cluster: in this process alone, or of several that divide the model's matrices."""

import datetime

import numpy as np
import torch
import torch.distributed as dist
from helpers import cluster, tiny_model
from mesh_programs import biased_model
from transformers import Gemma2Config, Gemma2ForCausalLM

from whet.config.lora import LoraConfig
from whet.models.lora import add_adapter
from whet.rollout.driver import completion
from whet.rollout.external_calls import ExternalCall

TIMEOUT = datetime.timedelta(seconds=60)


def adapted_model():
    """An adapter that is not 0."""
    model = tiny_model()
    add_adapter(model, LoraConfig(r=2))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    return model


def unfused_model():
    """Windows, soft-capped scores, and norms that only the module itself runs."""
    torch.manual_seed(5)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, sliding_window=8, pad_token_id=0, eos_token_id=1))


MODELS = {
    "fused": tiny_model,
    "one KV head": biased_model,
    "module": unfused_model,
    "adapter": adapted_model,
    "bf16": lambda: tiny_model().bfloat16(),
}


def two_turns(calls, fails):
    """An episode with a tool between its turns. Args: calls: the tool notes them there. fails: the tool raises."""

    def run(episode, sampling):
        def tool():
            calls.append(episode.rng_key[2:])
            if fails:
                raise RuntimeError("the tool is broken")
            return np.array([55, 56], np.int32)

        first = yield episode.request(episode.prompt.tokens, sampling)
        answer = yield ExternalCall(function=tool, name="tool")
        context = np.concatenate([episode.prompt.tokens, first.tokens, answer])
        second = yield episode.request(context, sampling)
        return completion(first, answer, second, generation=episode.generation)

    return run


def sampled(model, tensor=1):
    """What a cluster draws, before and after its weights change; and what this process holds for that."""
    c = cluster(model, tensor_parallel_size=tensor, seed=3, rollout={"max_tokens_to_generate": 10, "top_k": 50})
    encode, calls = c.encoder(), []
    prompts = [encode({"prompt": f"{i}+{'1' * i}="}, i) for i in range(5)]
    drawn = c.sample(prompts, num_generations=3, greedy=True, at_once=2)
    held = {"kv": c.engine.kv_bytes, "backbone": c.engine.backends["backbone"]}
    with c.actor.rollout_weights(parts=tensor > 1):
        held["weights"] = sum(p.nbytes for p in c.actor.module.parameters())
    with c.actor.placement.during("step"), torch.no_grad():
        for p in c.actor.module.parameters():
            p.mul_(0.9)
    c.actor.version += 1
    c.sync_weights()
    drawn += c.sample(prompts, num_generations=2, step=1, run_episode=two_turns(calls, fails=False))
    found = [
        (x.tokens.tolist(), x.logprobs.tolist()) for g in drawn for x in (*g.completions, *filter(None, [g.greedy]))
    ]
    try:
        c.sample(prompts, step=2, run_episode=two_turns([], fails=True))
    except Exception as error:
        held["error"] = f"{type(error).__name__}: {error}"
    again = c.sample(prompts[:1], step=3)[0].completions[0].tokens.tolist()
    return {"drawn": found, "again": again, "calls": sorted(calls), **held}


def sample_together(rank, size, folder, names, tensor):
    """The same as one of several processes; what came of it lies in the folder."""
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=TIMEOUT)
    torch.save({name: sampled(MODELS[name](), tensor) for name in names}, folder / f"{rank}.pt")
    dist.destroy_process_group()

"""The naive engine runs a token once where the model keeps a cache, whatever the model calls it."""

import numpy as np
import pytest
import torch
import transformers as tf
from tiny import COMMON

from whet.errors import ConfigError, EngineError
from whet.ops.counter_rng import hash_rng_key, uniform
from whet.rollout.base import Request, Sampling
from whet.rollout.engine.sampling import sample_rows
from whet.rollout.generate_options import freeze_options
from whet.rollout.hf import HFEngine
from whet.rollout.requests import make_plan

ENDS = {"vocab_size": 40, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
MODELS = {
    "past_key_values": lambda: tf.BloomForCausalLM(tf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **ENDS)),
    "cache_params": lambda: tf.MambaForCausalLM(
        tf.MambaConfig(hidden_size=16, num_hidden_layers=2, state_size=4, initializer_range=0.5, **ENDS)
    ),
}
NEW, ADDRESSES = 6, [(0, 0, 0, 0), (0, 0, 0, 1)]


def naive(model, ids):
    """Each token from the whole context, run again; every logit of it is made."""
    sampling = Sampling(max_tokens=NEW)
    keys, found = torch.tensor([hash_rng_key(*a) for a in ADDRESSES]), []
    for step in range(NEW):
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        place = torch.full((2,), step)
        token, logprob = sample_rows(logits, make_plan(sampling), u=uniform(keys, place), position=place, seen=None)
        ids = torch.cat([ids, token[:, None]], 1)
        found.append((token, logprob))
    return tuple(torch.stack(column, 1) for column in zip(*found, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_token_is_run_once_under_every_name_of_a_cache(name, monkeypatch):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    prompt = np.arange(1, 12, dtype=np.int32)
    tokens, logprobs = naive(model, torch.from_numpy(np.stack([prompt, prompt])).long())
    seen, forward = [], type(model).forward

    def watched(self, input_ids=None, logits_to_keep=0, **kwargs):
        out = forward(self, input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)
        seen.append((input_ids.shape[1], out.logits.shape[1]))
        return out

    engine = HFEngine(model)
    monkeypatch.setattr(type(model), "forward", watched)
    sampling = Sampling(max_tokens=NEW)
    engine.submit(
        [Request(id=i, tokens=prompt, sampling=sampling, group=0, rng_key=a) for i, a in enumerate(ADDRESSES)]
    )
    outputs = sorted(engine.step(), key=lambda o: o.id)
    assert seen == [(11, 1)] + [(1, 1)] * (NEW - 1)  # tokens that are run, and logits that are made
    assert [o.tokens.tolist() for o in outputs] == tokens.tolist()
    torch.testing.assert_close(torch.tensor(np.stack([o.logprobs for o in outputs])), logprobs, atol=1e-5, rtol=0)


@torch.no_grad()
def naive_search(model, ids, *, num_beams=1, no_repeat_ngram_size=0):
    """The best row after NEW tokens, each prefix run again from its start: generate of some versions drops a prompt."""
    beams = [(0.0, ids[0])]
    for _ in range(NEW):
        found = []
        for score, row in beams:
            logprobs = model(input_ids=row[None]).logits[0, -1].log_softmax(-1)
            if no_repeat_ngram_size == 1:
                logprobs[row] = -torch.inf
            best = logprobs.topk(num_beams)
            pairs = zip(best.values.tolist(), best.indices, strict=True)
            found += [(score + value, torch.cat([row, token[None]])) for value, token in pairs]
        beams = sorted(found, key=lambda pair: pair[0], reverse=True)[:num_beams]
    return beams[0][1]


@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 1}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
def test_a_learned_prompt_is_read_as_peft_s_forward_reads_it(kind, options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = tf.Qwen3ForCausalLM(tf.Qwen3Config(**{**COMMON, "initializer_range": 0.2, "max_position_embeddings": 20}))
    model = peft.get_peft_model(base, getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")).eval()
    prompt = np.arange(1, 12, dtype=np.int32)
    ids = torch.from_numpy(prompt[None]).long()
    expected = naive_search(model, ids, **options)
    with torch.no_grad():
        logits = model(expected[None]).logits[0, -NEW - 1 : -1].log_softmax(-1)
    engine = HFEngine(model)
    sampling = Sampling(max_tokens=NEW, temperature=0.0, generation_kwargs=freeze_options(options))
    engine.submit([Request(id=0, tokens=prompt, sampling=sampling, group=0, rng_key=ADDRESSES[0])])
    (output,) = engine.step()
    assert output.tokens.tolist() == expected[len(prompt) :].tolist()
    if "no_repeat_ngram_size" not in options:  # whose logprobs are those of the processed logits
        logprobs = logits.gather(1, expected[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(output.logprobs), logprobs, atol=1e-5, rtol=1e-5)
    long = Request(id=1, tokens=prompt, sampling=Sampling(max_tokens=7), group=0, rng_key=ADDRESSES[0])
    with pytest.raises((ConfigError, EngineError), match="17"):  # 20 positions, 3 of them for virtual tokens
        engine.submit([long])

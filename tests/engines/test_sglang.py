"""The SGLang adapter over a stand-in of the package: the offline Engine's calls and outputs as SGLang 0.5.23 has them.

The stand-in holds a model of transformers, loads what it is sent by name, and draws by (seed, place in the sequence).
"""

import asyncio
import sys
import types

import numpy as np
import pytest
import torch
from contract import *  # noqa: F403
from tiny import build, letters, prompts, requests, run
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from whet.config import RolloutConfig
from whet.errors import ConfigError, EngineError
from whet.rollout.base import Sampling
from whet.rollout.sglang import SGLangEngine
from whet.util.experimental import warn_experimental

SEEDED = RolloutConfig(sglang={"enable_deterministic_sampling": True})


class Tokenizers:
    """tokenizer_manager: knows the requests under way, and ends them."""

    def __init__(self):
        self.live, self.ended = {}, set()

    def abort_request(self, rid="", abort_all=False):
        if rid in self.live:
            self.ended.add(rid)


class Engine:
    """sglang.Engine, one token of every request per round of the loop."""

    def __init__(self, **arguments):
        self.arguments, self.calls, self.rows = arguments, [], {}
        self.loop, self.tokenizer_manager = asyncio.new_event_loop(), Tokenizers()
        torch.manual_seed(99)
        config = AutoConfig.from_pretrained(arguments["model_path"])
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        assert arguments["load_format"] == "dummy"

    @torch.no_grad()
    def logits(self, *rows):
        padded = pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True)
        return [x[: len(ids)] for x, ids in zip(self.model(padded, use_cache=False).logits, rows)]

    def next(self, ids):
        """Logits behind a live sequence; those of all that live are computed at once."""
        if tuple(ids) not in self.rows:
            asked = [x for x in self.tokenizer_manager.live.values() if tuple(x) not in self.rows]
            self.rows |= {tuple(x): found[-1].double() for x, found in zip(asked, self.logits(*asked))}
        return self.rows[tuple(ids)].clone()

    async def async_generate(self, *, input_ids, sampling_params, return_logprob, logprob_start_len, rid):
        assert return_logprob and logprob_start_len == -1 and rid not in self.tokenizer_manager.live
        p, ids, made = sampling_params, list(input_ids), []
        self.tokenizer_manager.live[rid] = ids
        reason = {"type": "length", "length": p["max_new_tokens"]}
        while len(made) < p["max_new_tokens"]:
            await asyncio.sleep(0)
            if rid in self.tokenizer_manager.ended:
                reason = {"type": "abort", "message": "Aborted"}
                break
            token, logprob = self.draw(ids, p, len(made))
            ids.append(token)
            made.append((logprob, token, None))
            if token in p["stop_token_ids"]:
                reason = {"type": "stop", "matched": token}
                break
        del self.tokenizer_manager.live[rid]
        meta = {"id": rid, "finish_reason": reason, "cached_tokens": 0}
        return {
            "output_ids": [m[1] for m in made],
            "meta_info": meta | ({"output_token_logprobs": made} if made else {}),
        }

    def draw(self, ids, p, count):
        logits = self.next(ids)
        for i, bias in p.get("logit_bias", {}).items():
            logits[int(i)] += bias
        if count < p["min_new_tokens"]:
            logits[p["stop_token_ids"]] = -torch.inf
        logprobs = (logits / (p["temperature"] or 1.0)).log_softmax(-1)
        if p["temperature"] == 0:
            token = int(logprobs.argmax())
        else:
            u = np.random.default_rng([p["sampling_seed"], len(ids)]).random()
            token = int(torch.searchsorted(logprobs.exp().cumsum(0), u).clamp(max=len(logits) - 1))
        return token, float(logprobs[token])

    def generate(self, *, input_ids, sampling_params, return_logprob, logprob_start_len):
        assert return_logprob and logprob_start_len == 0
        rows = self.logits(input_ids)[0][:-1].log_softmax(-1)
        found = [(None, input_ids[0], None)]
        found += [(float(row[t]), t, None) for row, t in zip(rows, input_ids[1:])]
        return {"meta_info": {"input_token_logprobs": found}}

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        assert not self.tokenizer_manager.live, "SGLang would wait for ever"
        self.calls.append(("update", [n for n, _ in named_tensors], load_format, flush_cache))
        if any(t.isnan().any() for _, t in named_tensors):
            return False, "nan"
        self.model.load_state_dict(dict(named_tensors), strict=False)
        self.rows.clear()
        return True, "Success"

    def release_memory_occupation(self, tags=None):
        assert not self.tokenizer_manager.live, "release_memory_occupation should be called only when server is idle."
        self.calls.append(("release", tags))

    def resume_memory_occupation(self, tags=None):
        self.calls.append(("resume", tags))

    def shutdown(self):
        self.loop.close()


@pytest.fixture(autouse=True)
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(Engine=Engine, __version__="0.5.23"))


@pytest.fixture
def policy():
    return build(gain=3.0)


@pytest.fixture
def rounding():
    return 1e-5


@pytest.fixture
def engine(policy):
    made = SGLangEngine(policy, decode=letters, config=SEEDED)
    yield made
    made.close()


def make(model, **fields):
    return SGLangEngine(model, decode=letters, config=RolloutConfig(**fields))


def greedy(engine):
    return {
        i: o.tokens.tolist()
        for i, o in run(engine, requests(prompts(), Sampling(max_tokens=8, temperature=0.0))).items()
    }


def test_it_starts_without_weights_and_takes_the_actors(policy):
    made = make(policy)
    assert made._engine.arguments["load_format"] == "dummy" and made._engine.calls[0][0] == "update"
    assert "lm_head.weight" in made._engine.calls[0][1] and made._engine.calls[0][2:] == (None, True)
    assert made.backends["sglang"] == "0.5.23" and float(made.backends["logprobs apart"]) < 1e-6
    made.close()


def test_it_is_experimental_and_this_is_logged_once(policy, caplog):
    warn_experimental.cache_clear()
    for _ in range(2):
        made = make(policy)
        assert made.caps.experimental
        made.close()
    assert caplog.text.count("rollout_engine 'sglang' is experimental") == 1


def test_a_config_that_is_not_the_actors_is_refused(policy, tmp_path):
    build(rope_parameters={"rope_type": "default", "rope_theta": 50.0}).config.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="sglang does not compute this model"):
        make(policy, sglang={"model_version": str(tmp_path)})


@pytest.mark.parametrize("tied", [True, False])
def test_new_weights_replace_all_of_the_old(tied):
    a, b = build(seed=0, tie_word_embeddings=tied), build(seed=1, tie_word_embeddings=tied)
    made, of_b = make(a), make(b)
    before, after = greedy(made), greedy(of_b)
    assert before != after
    made.update_weights(1, b.named_parameters())
    assert greedy(made) == after
    made.update_weights(2, a.named_parameters(remove_duplicate=False))
    assert greedy(made) == before


def test_weights_go_in_buckets_and_the_last_one_drops_the_cache(monkeypatch):
    monkeypatch.setattr("whet.rollout.sglang.BUCKET", 10_000)
    model = build()
    made = make(model)
    made._engine.calls.clear()
    made.update_weights(1, model.named_parameters())
    flush = [c[3] for c in made._engine.calls]
    assert len(flush) > 2 and flush == [False] * (len(flush) - 1) + [True]
    names = [n for c in made._engine.calls for n in c[1]]
    assert sorted(names) == sorted(dict(model.named_parameters(remove_duplicate=False)))


def test_weights_in_the_middle_of_completions_make_the_rest():
    a, b = build(seed=0), build(seed=1)
    made = make(a)
    work = requests(prompts(), Sampling(max_tokens=24, temperature=0.0))
    through = run(made, work)
    made.submit(work)
    for _ in range(2):
        made._engine.loop.run_until_complete(asyncio.sleep(0))
    made.update_weights(1, b.named_parameters())
    done = {o.id: o for o in iter_all(made)}
    of_b = make(b)
    for i, o in done.items():
        old = int((o.versions == 0).sum())
        assert 0 < old < 24 and sorted(o.versions.tolist()) == o.versions.tolist()
        assert o.tokens[:old].tolist() == through[i].tokens[:old].tolist()
        context = np.concatenate([work[i].tokens, o.tokens[:old]])
        rest = requests([context], Sampling(max_tokens=24 - old, temperature=0.0))
        assert run(of_b, rest)[0].tokens.tolist() == o.tokens[old:].tolist()


def iter_all(engine):
    while outputs := engine.step():
        yield from outputs


def test_sleep_frees_the_kv_cache_alone_and_keeps_what_was_made(engine):
    engine.submit(requests(prompts(), Sampling(max_tokens=12)))
    engine.sleep()
    engine.sleep()
    engine.wake_up()
    assert engine._engine.calls[-2:] == [("release", ["kv_cache"]), ("resume", ["kv_cache"])]
    assert len(list(iter_all(engine))) == 5


def test_stop_strings_cut_a_completion_after_the_fact(engine):
    whole = run(engine, requests(prompts(), Sampling(max_tokens=12, temperature=0.0)))
    text = letters(whole[1].tokens)
    cut = run(engine, requests(prompts(), Sampling(max_tokens=12, temperature=0.0, stop=(text[4:6],))))
    assert cut[1].finish_reason == "stop" and letters(cut[1].tokens) == text[: text.index(text[4:6]) + 2]


def test_refused_weights_and_failed_requests_are_errors(engine, monkeypatch):
    model = build()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match=r"SGLang refused the weights .*: nan"):
        engine.update_weights(3, model.named_parameters(remove_duplicate=False))
    with pytest.raises(EngineError, match="holds its own copy"):
        engine.update_weights(3)

    async def fails(**_):
        raise ValueError("too long")

    monkeypatch.setattr(engine._engine, "async_generate", fails)
    engine.submit(requests(prompts((3,)), Sampling()))
    with pytest.raises(EngineError, match=r"request 0: ValueError\('too long'\)"):
        engine.step()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"sglang": {"kwargs": {"model_path": "x"}}}, "whet sets it"),
        ({"top_k": 5}, "before top_k"),
        ({"top_k": 5, "top_p": 0.9, "logprobs_mode": "full"}, "of the whole distribution"),
        ({"repetition_penalty": 1.1}, "only tokens of the completion"),
        ({"eval": {"top_p": 0.5}}, "before top_k"),
    ],
)
def test_what_sglang_can_not_do_is_refused_when_it_is_built(policy, fields, word):
    with pytest.raises(ConfigError, match=word):
        make(policy, **fields)

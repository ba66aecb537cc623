"""The trainer computes the distribution that a constrained sampler draws from."""

import json
import re

import pytest
import torch
from helpers import cluster, drawn, random_batch, tiny_model
from transformers import AutoTokenizer

from whet.config import ConstraintConfig, Mode, Role, RolloutConfig, config_from_dict
from whet.errors import ConfigError, DataError, EngineError
from whet.rollout.base import EngineCaps
from whet.rollout.constrained_decoding import Grammars
from whet.rollout.hf import HFEngine
from whet.rollout.sampler import Sampler
from whet.types import TokenBatch

REGEX = {"regex": "[a-c]{2,5}(=[0-9]+)?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def sampled(c, texts=("1+1=", "what?", "a"), generations=4):
    """A cluster's groups, and their TokenBatch."""
    encode = c.encoder()
    prompts = [encode({"prompt": text}, i) for i, text in enumerate(texts)]
    groups = c.sample(prompts, num_generations=generations)
    return groups, TokenBatch.from_groups(groups)


@pytest.mark.spread(4)
@pytest.mark.parametrize("engine", ["embedded", "hf"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_k": 3},
        {"top_p": 0.8, "repetition_penalty": 1.2, "min_tokens": 4},
        {"logprobs_mode": "full"},
    ],
)
def test_trainer_and_sampler_agree_on_every_logprob(engine, fields):
    c = cluster(engine=engine, rollout={"constraint": REGEX, "max_tokens_to_generate": 10, **fields})
    groups, batch = sampled(c)
    done = [x for g in groups for x in g.completions]
    assert {"stop"} <= {x.finish_reason for x in done}
    assert all(re.fullmatch(REGEX["regex"], c.decode(x.tokens)) for x in done if x.finish_reason == "stop")
    got = c.actor.logprobs(batch).logprobs
    torch.testing.assert_close(got, batch.sampler_logprobs, atol=1e-5, rtol=0)
    plain = cluster(actor=c.actor.module, rollout={"max_tokens_to_generate": 10}).actor.logprobs(batch).logprobs
    assert ((plain - got).abs().max() > 0.1) == ("logprobs_mode" not in fields)  # "full" knows no constraint


@pytest.mark.parametrize("head", ["packed", "checkpointed"])
def test_the_ratio_is_one_on_policy_and_the_gradient_flows(head, monkeypatch):
    c = cluster(rollout={"constraint": REGEX, "max_tokens_to_generate": 10})
    if head == "checkpointed":
        monkeypatch.setattr("whet.models.forward.MAX_KEPT_BYTES", 0)
        monkeypatch.setattr("whet.models.forward.CHUNK_BYTES", 264 * 4 * 5)
    _, batch = sampled(c)
    ratios = []

    def loss(x):
        ratio = (x.logprobs - x.sampler_logprobs).exp()
        ratios.append(ratio.detach())
        return -ratio, {}

    c.actor.forward_backward(batch.replace(weights=torch.ones(batch.num_tokens)), loss)
    torch.testing.assert_close(torch.cat(ratios), torch.ones(batch.num_tokens), atol=1e-5, rtol=0)
    assert max(float(p.grad.abs().max()) for p in c.actor.module.parameters() if p.grad is not None) > 1e-3


def test_the_passes_of_a_step_replay_each_completion_once_and_the_next_step_anew(monkeypatch):
    replayed, replay = [], Grammars.replay
    monkeypatch.setattr(Grammars, "replay", lambda g, s, t, *rest: replayed.append(len(t)) or replay(g, s, t, *rest))
    c = cluster(rollout={"constraint": REGEX, "max_tokens_to_generate": 10})
    _, batch = sampled(c)
    first = c.actor.logprobs(batch).logprobs
    once = sum(replayed)
    assert 0 < once <= batch.num_tokens
    part = batch.select(torch.arange(0, 12, 2)).replace(weights=None)
    assert torch.equal(c.actor.logprobs(batch).logprobs, first)
    c.actor.logprobs(part)
    assert sum(replayed) == once
    sampled(c)
    c.actor.logprobs(batch)
    assert sum(replayed) == 2 * once


def test_gradients_equal_those_of_a_softmax_over_what_the_constraint_allows():
    c = cluster(rollout={"constraint": REGEX, "max_tokens_to_generate": 6})
    _, batch = sampled(c, texts=["1+1="], generations=1)
    c.actor.forward_backward(batch.replace(weights=torch.ones(batch.num_tokens)), lambda x: (-x.logprobs, {}))
    got = {n: p.grad.clone() for n, p in c.actor.module.named_parameters() if p.grad is not None}
    c.actor.module.zero_grad()
    model, tokens = c.actor.module, [*batch.prefix(0).tolist(), *batch.tokens.tolist()]
    model.set_attn_implementation("sdpa")
    logits = model(input_ids=torch.tensor([tokens])).logits[0, batch.prefix_lengths[0] - 1 : -1]
    total = 0.0
    for t, token in enumerate(batch.tokens.tolist()):
        text = bytes(i for i in batch.tokens[:t].tolist()).decode()
        inside = [i for i in range(256) if begins(text + chr(i))] + [256] * bool(re.fullmatch(REGEX["regex"], text))
        total = total - logits[t, inside].log_softmax(0)[inside.index(token)]
    total.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, atol=2e-4, rtol=1e-4)


def begins(text):
    """Whether a match of REGEX begins so."""
    return any(re.fullmatch(REGEX["regex"], text + rest) for rest in ("", "a", "aa", "0"))


def test_the_reference_reads_under_the_constraint_and_the_critic_is_left_alone():
    c = cluster(reference=tiny_model(), critic=tiny_model(1), rollout={"constraint": REGEX})
    _, batch = sampled(c)
    ref = c.worker(Role.REFERENCE).logprobs(batch).logprobs
    torch.testing.assert_close(ref, c.actor.logprobs(batch).logprobs, atol=1e-5, rtol=0)
    values = c.worker(Role.CRITIC).values(random_batch((3, [4])))  # random bytes, far outside the language
    assert values.isfinite().all()


def test_a_completion_from_elsewhere_can_not_be_scored_under_the_constraint():
    c = cluster(rollout={"constraint": REGEX})
    with pytest.raises(DataError, match=r"does not allow there.*logprobs_mode='full'"):
        c.actor.logprobs(random_batch((3, [4])))
    full = cluster(rollout={"constraint": REGEX, "logprobs_mode": "full"})
    assert full.actor.logprobs(random_batch((3, [4]))).logprobs.isfinite().all()


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_generate_follows_a_schema_of_evaluation_alone(schema):
    rollout = RolloutConfig(
        max_tokens_to_generate=24, temperature=1.0, eval={"constraint": {"json_schema": schema}, "temperature": 0.5}
    )
    c = cluster(rollout={Mode.TRAIN: rollout, Mode.EVAL: rollout.for_mode("eval")})
    texts = lambda mode: [c.decode(ids) for ids in drawn(c, ["x", "y", "z"], mode=mode, seed=3)]
    assert all(text.lstrip(" \n\r\t").startswith("{") or not text.strip() for text in texts(Mode.EVAL))
    assert any(not text.startswith("{") for text in texts(Mode.TRAIN))


def test_a_sampler_takes_a_constraint_for_a_call():
    sampler = Sampler(tiny_model(), "byte")
    out = sampler(["x", "y"], max_tokens=12, temperature=1.0, seed=1, constraint={"regex": "(yes|no)[.]"})
    assert set(out.text) <= {"yes.", "no."}
    assert set(out.finish_reason) == {"stop"}


def test_an_engine_without_constraints_is_refused_with_the_way_out(monkeypatch):
    c = cluster(engine="hf", rollout={"constraint": REGEX})
    monkeypatch.setattr(HFEngine, "caps", EngineCaps())
    said = "HFEngine does not support constraints; use rollout_engine 'embedded' or 'hf'"
    with pytest.raises(EngineError, match=said):
        drawn(c, ["x"])


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"regexp": "a"}, "rollout.constraint.regexp; did you mean.*regex"),
        ({"regex": "a", "grammar": "b"}, "one of regex, json_schema, grammar; got regex and grammar"),
        ({}, "got none of them"),
        ("a", "constraint"),
    ],
)
def test_a_wrong_section_says_what_it_wants(constraint, message):
    from whet.config import RunConfig

    with pytest.raises(ConfigError, match=message):
        config_from_dict(RunConfig, {"actor": {"model": "x"}, "rollout": {"constraint": constraint}})


def test_a_malformed_expression_is_refused_when_the_cluster_is_built():
    for rollout in ({"constraint": {"regex": "[a"}}, {"eval": {"constraint": {"regex": "[a"}}}):
        made = RolloutConfig(**rollout)
        with pytest.raises(ConfigError, match=r"regex '\[a' is refused: .*unclosed character class"):
            cluster(rollout={Mode.TRAIN: made, Mode.EVAL: made.for_mode("eval")})


def test_a_saved_tokenizer_spells_like_the_one_in_memory(tmp_path):
    c = cluster(rollout={"constraint": REGEX, "seed": 1})
    c.tokenizer.save_pretrained(tmp_path)
    again = cluster(tokenizer=AutoTokenizer.from_pretrained(tmp_path), rollout={"constraint": REGEX, "seed": 1})
    assert drawn(c, ["x"] * 4) == drawn(again, ["x"] * 4)


def test_the_section_holds_one_language():
    assert ConstraintConfig(json_schema=SCHEMA).text == ConstraintConfig(json_schema=json.dumps(SCHEMA)).text

"""vLLM behind the contract, against transformers: run in an environment that has it, `pytest -m vllm tests/engines`."""

import importlib
import importlib.util
import random

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM, in an environment of its own (docs/engines.md)", allow_module_level=True)

from contract import *  # noqa: F403
from contract import announce, assert_same
from helpers import cluster, tiny_model
from tiny import VOCABULARY, build, drain, letters, prompts, requests, run

from whet import GRPOConfig, GRPOLearner
from whet.config import RolloutConfig
from whet.config.lora import LoraConfig
from whet.errors import ConfigError, EngineError
from whet.models.lora import add_adapter
from whet.ops.logits_processors import process_logits
from whet.ops.logprobs import selective_log_softmax
from whet.rollout.base import Request, Sampling, sampling_processors
from whet.rollout.engine.sampling import seen_tokens
from whet.rollout.hf import HFEngine
from whet.rollout.vllm import VLLMEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
SMALL = {"max_batch_size": 64}
CLOSE = 1e-4
GREEDY = Sampling(max_tokens=16, temperature=0.0)


def sharp(seed=0, gain=3.0, **fields):
    """A model that vLLM's CPU attention takes (heads of 32)."""
    return build(seed=seed, gain=gain, **{"head_dim": 32, "max_position_embeddings": 512, **fields})


def build_engine(model, **fields):
    return VLLMEngine(model, decode=letters, config=RolloutConfig(**{**SMALL, **fields}))


@pytest.fixture
def policy():
    return sharp(tie_word_embeddings=True)


@pytest.fixture
def rounding():
    return 1e-5


@pytest.fixture(scope="module")
def held():
    engines = []
    yield engines
    for made in engines:
        made.close()


@pytest.fixture
def engine(held, policy):
    """One vLLM for all of them, with the weights and the state of a new one."""
    if not held or held[-1]._llm is None:
        held.append(build_engine(policy))
    made = held[-1]
    announce(made, policy, 0)
    yield made
    made.abort(list(made._in_flight))
    made.wake_up()


@pytest.fixture
def make(held):
    """Builds another one; a process has room for one vLLM."""
    made = []

    def build_one(model, **fields):
        for other in (*held, *made):
            other.close()
        made.append(build_engine(model, **fields))
        return made[-1]

    yield build_one
    for one in made:
        one.close()


def weights(model):
    return model.named_parameters(remove_duplicate=False)


def agree(engine, model, work):
    """Tokens as transformers has them, logprobs close; the largest difference of logprobs."""
    got, want = run(engine, work), run(HFEngine(model, decode=letters), work)
    assert all(got[i].tokens.tolist() == want[i].tokens.tolist() for i in want)
    assert all(got[i].finish_reason == want[i].finish_reason for i in want)
    apart = max(float(abs(got[i].logprobs - want[i].logprobs).max()) for i in want)
    assert apart < CLOSE
    return apart


def scored(model, request, tokens, sampling):
    """What the trainer computes for a completion: the logprobs of its tokens under the Sampling's support."""
    ids = torch.tensor([[*request.tokens.tolist(), *tokens.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.tokens) - 1 : -1]
    contexts = [ids[0, : len(request.tokens) + i] for i in range(len(tokens))]
    seen = seen_tokens(contexts, VOCABULARY)
    place, made = torch.arange(len(tokens)), torch.from_numpy(tokens.astype(np.int64))
    return selective_log_softmax(
        process_logits(logits, sampling_processors(sampling), seen=seen, position=place), made
    ).numpy()


def test_greedy_is_that_of_transformers(engine, policy):
    agree(engine, policy, requests(prompts(), GREEDY, group=2))
    agree(
        engine,
        policy,
        requests(prompts(), Sampling(max_tokens=24, temperature=0.0, stop_ids=tuple(range(0, 64, 4)))),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 5},
        {"top_p": 0.8},
        {"top_k": 7, "top_p": 0.8},
        {"min_p": 0.1, "top_k": 9},
        {"repetition_penalty": 1.3, "temperature": 0.8},
        {"repetition_penalty": 0.8, "temperature": 0.0},
        {"forbidden_ids": tuple(range(1, 60, 2)), "temperature": 1.2},
        {"min_tokens": 6, "stop_ids": tuple(range(0, 64, 3))},
        {"temperature": 0.6, "logprobs_mode": "full"},
    ],
    ids=str,
)
def test_reported_logprobs_are_those_that_the_trainer_computes(engine, policy, fields):
    sampling = Sampling(**{"max_tokens": 12, **fields})
    work = requests(prompts(), sampling, group=3)
    done = run(engine, work)
    for r in work:
        o = done[r.id]
        assert abs(scored(policy, r, o.tokens, sampling) - o.logprobs).max() < CLOSE
        assert not set(o.tokens.tolist()) & set(sampling.forbidden_ids)
        assert not set(o.tokens[: sampling.min_tokens - 1].tolist()) & (
            set(sampling.stop_ids) if sampling.min_tokens else set()
        )


def test_draws_are_the_same_again_alone_and_in_a_crowd(engine, rounding):
    work = requests(prompts(), Sampling(max_tokens=12, top_p=0.9), group=5)
    first = run(engine, work)
    assert_same(run(engine, work), first, rounding)
    assert_same({i: run(engine, [work[i]])[i] for i in (0, 7, 24)}, {i: first[i] for i in (0, 7, 24)}, rounding)
    engine.submit(work)
    engine.step(timeout_s=0.0)
    engine.sleep()
    with pytest.raises(EngineError, match="wake"):
        engine.step()
    engine.wake_up()
    assert_same(drain(engine), first, rounding)


def test_draws_follow_the_probabilities(engine, policy):
    prompt = prompts((9,))[0]
    done = run(engine, requests([prompt], Sampling(max_tokens=1), group=2000))
    with torch.no_grad():
        p = policy(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].softmax(-1).double().numpy()
    counts = np.bincount([int(o.tokens[0]) for o in done.values()], minlength=VOCABULARY)
    assert abs(counts / 2000 - p).max() < 5 * np.sqrt(0.25 / 2000)


def test_a_request_that_goes_on_does_not_draw_the_same_noise_again(engine):
    same = [
        Request(
            id=i, tokens=prompts((9,))[0], sampling=Sampling(max_tokens=12), group=0, rng_key=(0, 0, 0, 0), offset=i
        )
        for i in range(2)
    ]
    done = run(engine, same)
    assert done[0].tokens.tolist() != done[1].tokens.tolist()


@pytest.mark.parametrize("tied", [True, False])
def test_new_weights_replace_all_of_the_old(make, tied):
    a, b = sharp(0, tie_word_embeddings=tied), sharp(1, tie_word_embeddings=tied)
    engine = make(a)
    work = requests(prompts(), GREEDY)
    agree(engine, a, work)
    for version, model in enumerate((b, a, b)):
        engine.update_weights(version, model.named_parameters() if version else weights(model))
        agree(engine, model, work)
    got, old = run(engine, work), run(HFEngine(a), work)
    assert any(got[i].tokens.tolist() != old[i].tokens.tolist() for i in old)


def test_a_long_shared_prompt_leaves_no_old_keys_behind(engine, policy):
    prompt = np.random.RandomState(5).randint(1, VOCABULARY, 300).astype(np.int32)
    work = requests([prompt], GREEDY, group=3)
    agree(engine, policy, work)
    before = engine.stats()
    agree(engine, policy, work)
    assert engine.stats().since(before).reused >= 3 * 256  # so it would show
    b = sharp(1, tie_word_embeddings=True)
    announce(engine, b, 1)
    agree(engine, b, work)


def test_weights_in_the_middle_of_completions_make_the_rest(engine, policy):
    b = sharp(1, tie_word_embeddings=True)
    work = requests(prompts((3, 300)), Sampling(max_tokens=24), group=2)
    engine.submit(work)
    for _ in range(9):
        assert engine.step(timeout_s=0.0) == []
    announce(engine, b, 1)
    done = drain(engine)
    for r in work:
        o = done[r.id]
        old = int((o.versions == 0).sum())
        assert 6 < old < 24 and len(o.tokens) == 24 and o.versions.tolist() == [0] * old + [1] * (24 - old)
        first, second = scored(policy, r, o.tokens, r.sampling), scored(b, r, o.tokens, r.sampling)
        assert abs(first[:old] - o.logprobs[:old]).max() < CLOSE
        assert abs(second[old:] - o.logprobs[old:]).max() < CLOSE
        assert abs(first[old:] - o.logprobs[old:]).max() > 0.1


def test_weights_that_are_not_whole_are_refused(engine, policy):
    with pytest.raises(EngineError, match="holds its own copy"):
        engine.update_weights(1)
    with pytest.raises(EngineError, match="leave out"):
        engine.update_weights(1, iter([(n, p) for n, p in weights(policy) if "norm" not in n]))


def test_stop_strings_end_a_completion_where_the_other_engines_end_it(engine, policy):
    whole = run(engine, requests(prompts(), GREEDY))
    pairs = tuple(letters(o.tokens)[4:6] for o in whole.values())
    agree(engine, policy, requests(prompts(), Sampling(max_tokens=16, temperature=0.0, stop=pairs)))
    assert engine.stats().in_flight == 0


def test_aborted_requests_give_back_what_they_had_made(engine):
    work = requests(prompts(), Sampling(max_tokens=40, temperature=0.0))
    whole = run(engine, work)
    engine.submit(work)
    for _ in range(6):
        engine.step(timeout_s=0.0)
    out = engine.abort([1, 3])
    assert all(
        0 < len(o.tokens) < 40 and o.tokens.tolist() == whole[o.id].tokens[: len(o.tokens)].tolist() for o in out
    )
    assert sorted(drain(engine)) == [0, 2, 4]


def test_building_vllm_leaves_the_process_as_it_was(make, policy):
    def state():
        numpy = np.random.get_state()
        return random.getstate(), numpy[1].tolist(), torch.get_rng_state().tolist(), torch.set_num_threads

    before = state()
    make(policy)
    assert state() == before


def test_a_second_vllm_in_the_process_is_refused(engine, policy):
    with pytest.raises(EngineError, match=r"another vLLM engine is open in this process.*close\(\) it first"):
        build_engine(policy)
    agree(engine, policy, requests(prompts(), GREEDY))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"vllm": {"logprobs_mode": "raw_logits"}}, "training takes logprobs"),
        ({"vllm": {"sampling_kwargs": {"frequency_penalty": 1.0}}}, "another distribution"),
        ({"vllm": {"sampling_kwargs": {"seed": 1}}}, "from the rollout's own fields"),
        ({"vllm": {"kwargs": {"model": "x"}}}, "whet sets it"),
        ({"top_p": 0.9, "min_p": 0.1}, "before top_p"),
        ({"temperature": 2.5}, "0.01..2, not 2.5"),
        ({"top_k": 5, "logprobs_mode": "full"}, "set it to 'processed'"),
        ({"temperature": 0.7, "vllm": {"logprobs_mode": "raw_logprobs"}}, "raw logits"),
        ({"eval": {"temperature": 0.001}}, "0.01..2"),
    ],
)
def test_what_vllm_can_not_do_is_refused_before_it_is_built(policy, fields, word):
    with pytest.raises(ConfigError, match=word):
        build_engine(policy, **fields)


def test_a_config_that_is_not_the_actors_is_refused(make, policy, tmp_path):
    config = {"vllm": {"model_version": str(tmp_path)}}
    policy.save_pretrained(tmp_path)
    agree(make(policy, **config), policy, requests(prompts(), GREEDY))
    sharp(rope_parameters={"rope_type": "default", "rope_theta": 50.0}, tie_word_embeddings=True).save_pretrained(
        tmp_path
    )
    with pytest.raises(EngineError, match="vllm does not compute this model as transformers does"):
        make(policy, **config)


def test_experts_whose_weights_vllm_does_not_renew_on_a_cpu_are_refused(make):
    with pytest.raises(EngineError, match="vllm does not compute this model as transformers does"):
        make(build("qwen3_moe", gain=3.0, head_dim=32))


@pytest.mark.parametrize("fields", [{"max_batch_size": 1}, {"max_batch_size": 2, "kv_cache_tokens": 300}], ids=str)
def test_a_small_cache_serves_one_after_the_other(make, policy, fields):
    agree(make(policy, **fields), policy, requests(prompts((40, 90)), GREEDY, group=2))


def test_a_configuration_that_vllm_fails_on_leaves_room_for_the_next(make, policy):
    for wrong in ({"no_such_argument": 1}, {"kv_cache_memory_bytes": 1}):
        with pytest.raises(EngineError, match="vLLM can't be built for this model and configuration"):
            make(policy, vllm={"kwargs": wrong})
    agree(make(policy), policy, requests(prompts((3,)), GREEDY))


def test_full_logprobs_of_truncated_draws_come_in_raw_mode(make, policy):
    made = make(policy, temperature=1.0, vllm={"logprobs_mode": "raw_logprobs"})
    sampling = Sampling(max_tokens=8, top_k=5, logprobs_mode="full")
    work = requests(prompts(), sampling)
    done = run(made, work)
    for r in work:
        assert abs(scored(policy, r, done[r.id].tokens, sampling) - done[r.id].logprobs).max() < CLOSE


def test_half_precision_is_that_of_the_module(make):
    model = sharp(gain=1.0).to(torch.bfloat16)
    made = make(model)
    work = requests(prompts(), Sampling(max_tokens=12), group=2)
    done = run(made, work)
    apart = [abs(scored(model, r, done[r.id].tokens, r.sampling) - done[r.id].logprobs).mean() for r in work]
    assert np.mean(apart) < 0.05


def adapted(model):
    """The model with an adapter that adds something."""
    add_adapter(model, LoraConfig(r=5))
    return moved(model, 1)


def moved(model, seed):
    """The model with another adapter. Args: seed: of its numbers."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.2)
    return model


def trained(model):
    return ((n, p.detach()) for n, p in model.named_parameters() if p.requires_grad)


def pack_nothing(monkeypatch):
    """Makes vLLM's linear layers on a CPU multiply by the weights as they are, as on a GPU."""
    utils = importlib.import_module("vllm.model_executor.layers.utils")

    def multiply_plainly(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", multiply_plainly)


@pytest.mark.parametrize(
    ("family", "tied", "packs"), [("llama", False, False), ("qwen3", True, False), ("qwen3", False, True)]
)
def test_an_adapter_beside_shared_weights(make, monkeypatch, caplog, family, tied, packs):
    if not packs:
        pack_nothing(monkeypatch)
    model = adapted(build(family, gain=3.0, head_dim=32, max_position_embeddings=512, tie_word_embeddings=tied))
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    before = {n: p.detach().clone() for n, p in frozen.items()}
    with caplog.at_level("INFO", "whet"):
        made = make(model, vllm={"share_weights": True})
    tensors = made._llm.apply_model(lambda m: dict(m.named_parameters()))[0].values()
    storages = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
    own = {n for n, p in frozen.items() if p.untyped_storage().data_ptr() not in storages}
    packed = {n for n in frozen if "_proj" in n and n.endswith("weight")} if packs else set()
    assert own == packed and f"{len(own)} of {len(frozen)} tensors are copies" in caplog.text
    work = requests(prompts(), GREEDY, group=2)
    agree(made, model, work)
    first = run(made, work)
    for version in (1, 2):
        made.update_weights(version, trained(moved(model, version + 1)))
        agree(made, model, work)
    assert any(run(made, work)[i].tokens.tolist() != first[i].tokens.tolist() for i in first)
    with pytest.raises(EngineError, match="leave out lora_A"):
        made.update_weights(3, iter(()))
    made.close()
    assert all(torch.equal(p, before[n]) for n, p in frozen.items())
    assert not {p.untyped_storage().data_ptr() for p in frozen.values()} & storages


def test_the_cache_is_given_up_as_far_as_a_cpu_can(make, monkeypatch):
    pack_nothing(monkeypatch)
    made = make(adapted(sharp()), vllm={"share_weights": True})
    run(made, requests(prompts(), GREEDY))
    made._sleeps = True
    with pytest.raises(RuntimeError, match="discard is not supported on CPU"):  # the last of what it does
        made.sleep()


def even(completion_ids, **_):
    """Prefers even tokens."""
    return [float(np.mean(np.asarray(ids) % 2 == 0)) for ids in completion_ids]


def test_the_samplers_logprobs_stay_the_trainers_with_an_adapter_beside_shared_weights(held):
    for other in held:
        other.close()
    actor = tiny_model(head_dim=32)
    add_adapter(actor, LoraConfig(r=8))
    rollout = {**SMALL, "max_tokens_to_generate": 8, "vllm": {"share_weights": True}}
    made = cluster(actor, engine="vllm", rollout=rollout, lr=5e-2)
    learner = GRPOLearner(made, GRPOConfig(num_generations=16, beta=0.0, sampler_is="token"), even)
    run = learner.train([{"prompts": ["1+1=", "2+1="]}] * 4)
    assert all(row["sampler_trainer/logp_diff_max"] < 1e-4 for row in run.rows)
    assert made.engine.shared_bytes and max(p.abs().max() for n, p in trained(actor) if "lora_B" in n) > 0.1
    made.close()


@pytest.mark.parametrize("tied", [True, False])
def test_grpo_learns_through_vllm_and_the_samplers_logprobs_stay_the_trainers(held, tied):
    for other in held:
        other.close()
    actor = tiny_model(gain=1.0, head_dim=32, tie_word_embeddings=tied)
    made = cluster(actor, engine="vllm", rollout={**SMALL, "max_tokens_to_generate": 8}, lr=1e-2)
    learner = GRPOLearner(made, GRPOConfig(num_generations=16, beta=0.0, sampler_is="token"), even)
    batch = {"prompts": [f"{i}+1=" for i in range(4)]}
    run = learner.train([batch] * 10)
    rewards = [row["reward"] for row in run.rows]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15
    for row in run.rows:
        assert row["sampler_trainer/logp_diff_max"] < 1e-4  # so k3 stays below its half square, 5e-9
    assert made.describe()["rollout"]["vllm"].startswith("0.")
    made.close()

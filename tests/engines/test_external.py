"""What the adapters of vLLM and SGLang do without either: mappings, refusals, the books, the checks of weights."""

import dataclasses
import importlib.util

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import build

from whet.config import RolloutConfig, SGLangOptions, VLLMOptions
from whet.errors import ConfigError, EngineError
from whet.models.self_check import probe_tokens
from whet.rollout import resolve_engine
from whet.rollout.base import Request, Sampling
from whet.rollout.external_engine import (
    WeightNames,
    check_agreement,
    check_logprobs_mode,
    check_supported,
    request_seed,
)
from whet.rollout.in_flight import InFlightRequest
from whet.rollout.sglang import engine_arguments
from whet.rollout.sglang import sampling_arguments as sglang_arguments
from whet.rollout.vllm import llm_arguments
from whet.rollout.vllm import sampling_arguments as vllm_arguments


def request(sampling=None, tokens=(5, 6, 7), **fields):
    return Request(
        **{
            "id": 0,
            "tokens": np.array(tokens, np.int32),
            "sampling": sampling or Sampling(),
            "group": 0,
            "rng_key": (1, 2, 3, 4),
            **fields,
        }
    )


@pytest.mark.parametrize(("name", "fix"), [("vllm", r"\[vllm\]"), ("sglang", "sglang==0.5")])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(name, fix):
    if importlib.util.find_spec(name.removesuffix("_jax")) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(EngineError, match=f"can't be imported.*{fix}"):
        resolve_engine(name)(build(), config=RolloutConfig())


def test_seeds_follow_the_address_and_the_offset_and_nothing_else():
    one = request()
    assert request_seed(one) == request_seed(dataclasses.replace(one, id=9, group=3, sampling=Sampling(max_tokens=2)))
    others = [request(rng_key=(1, 2, 3, 5)), request(rng_key=(0, 2, 3, 4)), request(offset=1), request(offset=2)]
    assert len({request_seed(r) for r in (one, *others)}) == 5
    assert all(0 <= request_seed(r) < 2**63 for r in others)


EVERYTHING = Sampling(
    max_tokens=9,
    min_tokens=4,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.2,
    stop_ids=(2, 3),
    forbidden_ids=(8,),
)


def test_every_sampling_parameter_has_its_word_in_vllm():
    found = vllm_arguments(request(EVERYTHING, offset=1))
    seed = found.pop("seed")
    assert seed == request_seed(request(offset=1))
    assert found == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "max_tokens": 9,
        "min_tokens": 3,
        "stop_token_ids": [2, 3],
        "ignore_eos": True,
        "logit_bias": {8: -float("inf")},
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
    }


def test_every_sampling_parameter_has_its_word_in_sglang():
    found = sglang_arguments(request(EVERYTHING, offset=1))
    assert found.pop("sampling_seed") == request_seed(request())  # it draws by seed and place
    assert found == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "max_new_tokens": 9,
        "min_new_tokens": 3,
        "stop_token_ids": [2, 3],
        "ignore_eos": True,
        "no_stop_trim": True,
        "logit_bias": {"8": -float("inf")},
    }
    assert sglang_arguments(request())["top_k"] == -1 and "logit_bias" not in sglang_arguments(request())


def test_vllm_is_built_from_the_rollout_configuration():
    config = RolloutConfig(
        max_batch_size=7,
        kv_cache_tokens=300,
        vllm=VLLMOptions(
            hbm_utilization=0.5,
            max_num_batched_tokens=64,
            async_scheduling=True,
            kwargs={"block_size": 32},
            additional_config={"x": 1},
            hf_config_path="there",
        ),
    )
    found = llm_arguments(config, device="cuda", dtype=torch.bfloat16, kv_bytes=9)
    expected = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_num_seqs": 7,
        "max_num_batched_tokens": 64,
        "async_scheduling": True,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 20 * 16 * 9,
        "num_gpu_blocks_override": 20,
        "block_size": 32,
        "additional_config": {"x": 1},
        "hf_config_path": "there",
        "logprobs_mode": "processed_logprobs",
    }
    assert {n: found[n] for n in expected} == expected
    cpu = llm_arguments(RolloutConfig(vllm={"max_num_seqs": 3}), device="cpu", dtype=torch.float32, kv_bytes=1000)
    assert cpu["max_num_seqs"] == 3 and cpu["enforce_eager"] and cpu["kv_cache_memory_bytes"] == 4 * 128 * 1000
    little = RolloutConfig(vllm={"hbm_utilization": 1e-6})
    bound = llm_arguments(little, device="cpu", dtype=torch.float32, kv_bytes=10**9)["kv_cache_memory_bytes"]
    assert 0 < bound < 1e-3 * 10**9 * 256 * 128
    assert "gpu_memory_utilization" not in cpu


def test_sglang_is_built_from_the_rollout_configuration():
    config = RolloutConfig(
        kv_cache_tokens=300,
        sglang=SGLangOptions(
            context_length=99,
            mem_fraction_static=0.5,
            disable_radix_cache=False,
            enable_deterministic_sampling=True,
            chunked_prefill_size=32,
            page_size=16,
            max_running_requests=5,
            log_level=None,
            kwargs={"attention_backend": "triton"},
        ),
    )
    found = engine_arguments(config, dtype=torch.float16)
    assert found == {
        "dtype": "float16",
        "load_format": "dummy",
        "context_length": 99,
        "mem_fraction_static": 0.5,
        "disable_radix_cache": False,
        "enable_deterministic_inference": True,
        "chunked_prefill_size": 32,
        "page_size": 16,
        "max_running_requests": 5,
        "max_total_tokens": 300,
        "skip_tokenizer_init": True,
        "enable_memory_saver": True,
        "random_seed": 0,
        "attention_backend": "triton",
    }


CASES = {  # reported distribution -> Samplings that it serves, and others with the word of the message
    "drawn": (
        [{}, {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.2}, {"logprobs_mode": "full"}],
        [
            ({"top_p": 0.9, "logprobs_mode": "full"}, "top_k, top_p"),
            ({"forbidden_ids": (3,), "logprobs_mode": "full"}, "forbidden"),
        ],
    ),
    "untruncated": (
        [{"temperature": 0.7}, {"top_k": 5, "logprobs_mode": "full"}, {"forbidden_ids": (3,)}],
        [({"top_k": 5}, "before top_k"), ({"forbidden_ids": (3,), "logprobs_mode": "full"}, "leave out min_tokens")],
    ),
    "raw": (
        [{}, {"temperature": 0.0}, {"top_k": 5, "forbidden_ids": (3,), "logprobs_mode": "full"}],
        [
            ({"temperature": 0.7}, "temperature 0.7"),
            ({"top_k": 5}, "before top_k"),
            ({"forbidden_ids": (3,)}, "without penalties"),
        ],
    ),
}


@pytest.mark.parametrize("reports", CASES)
def test_logprobs_of_another_distribution_than_the_trainers_are_refused(reports):
    good, bad = CASES[reports]
    for fields in good:
        check_logprobs_mode(Sampling(**fields), engine="x", reports=reports)
    for fields, word in bad:
        with pytest.raises(ConfigError, match=word):
            check_logprobs_mode(Sampling(**fields), engine="x", reports=reports)


def test_what_an_external_engine_has_no_word_for_is_refused():
    check_supported(EVERYTHING, engine="x")
    with pytest.raises(ConfigError, match="return_logits=True is not supported by x"):
        check_supported(Sampling(return_logits=True), engine="x")


# ---- the books -------------------------------------------------------------------------------------------------------


def letters(ids):
    return "".join(chr(97 + i) for i in ids)


def test_a_completion_is_cut_at_its_first_end_whatever_came_after():
    flight = InFlightRequest(request=request(Sampling(max_tokens=9, stop_ids=(5,), stop=("cd",))))
    assert flight.add([1, 2], [-1.0, -2.0], version=0, decode=letters) is None
    assert flight.add([3, 4, 5, 6], [-3.0, -4.0, -5.0, -6.0], version=1, decode=letters) == "stop"
    out = flight.output("stop")
    assert out.tokens.tolist() == [1, 2, 3] and out.logprobs.tolist() == [-1, -2, -3]
    assert out.versions.tolist() == [0, 0, 1]


def test_a_completion_ends_at_its_limit_and_a_stop_string_may_begin_before_the_offset():
    flight = InFlightRequest(request=request(Sampling(max_tokens=2)))
    assert flight.add([1, 2, 3], [0.0] * 3, version=0, decode=None) == "length" and flight.tokens == [1, 2]
    going_on = InFlightRequest(request=request(Sampling(stop=("gb",)), tokens=(4, 5, 6), offset=1))
    assert going_on.add([1, 9], [0.0, 0.0], version=0, decode=letters) == "stop" and going_on.tokens == [1]


def test_what_is_left_of_a_request_begins_with_what_it_has_made():
    flight = InFlightRequest(request=request(Sampling(max_tokens=9)))
    assert flight.resumed() is flight.request
    flight.add([1, 2], [0.0, 0.0], version=0, decode=None)
    rest = flight.resumed()
    assert rest.tokens.tolist() == [5, 6, 7, 1, 2] and (rest.offset, rest.sampling.max_tokens) == (2, 7)


def test_a_token_without_a_logprob_is_an_error():
    with pytest.raises(EngineError, match="1 logprobs came for 2 tokens"):
        InFlightRequest(request=request()).add([1, 2], [0.0], version=0, decode=None)


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicates", [True, False])
def test_a_tied_head_is_sent_under_its_own_name(duplicates):
    model = build(tie_word_embeddings=True)
    sent = dict(WeightNames(model).complete(model.named_parameters(remove_duplicate=not duplicates)))
    assert sent["lm_head.weight"] is model.model.embed_tokens.weight
    assert len(sent) == len(dict(model.named_parameters())) + 1
    untied = build(tie_word_embeddings=False)
    sent = dict(WeightNames(untied).complete(untied.named_parameters()))
    assert sent.keys() == dict(untied.named_parameters()).keys()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "gemma3"])
def test_weights_are_sent_under_the_names_and_in_the_shapes_of_a_checkpoint(family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    sent = dict(WeightNames(model).complete(model.named_parameters()))
    assert stored.keys() | {"lm_head.weight"} == sent.keys()
    assert all(torch.equal(sent[n], x) for n, x in stored.items())


def test_weights_that_leave_a_parameter_out_are_refused():
    model = build(tie_word_embeddings=False)
    some = [(n, p) for n, p in model.named_parameters() if "layers.1.mlp" not in n]
    with pytest.raises(EngineError, match=r"leave out 3 of \d+ parameters \(model.layers.1.mlp.down_proj.weight"):
        list(WeightNames(model).complete(iter(some)))


def test_an_engine_that_computes_something_else_is_refused_when_it_is_built():
    model, other = build(seed=0), build(seed=1)
    tokens = probe_tokens(64, 256)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    found = logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert check_agreement(model, tokens, found, engine="x") < 1e-6
    with pytest.raises(EngineError, match="x does not compute this model as transformers does"):
        check_agreement(other, tokens, found, engine="x")
    with pytest.raises(EngineError, match="does not compute"):
        check_agreement(model, tokens, [float("nan")] * len(found), engine="x")

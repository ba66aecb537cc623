"""Models whose matrices can't be divided over processes."""

from types import SimpleNamespace

import pytest
from helpers import tiny_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from whet.config import SupervisedTrainingConfig
from whet.config.lora import LoraConfig
from whet.errors import ConfigError
from whet.models.load import load_model
from whet.models.lora import add_adapter
from whet.parallel.tensor import check_tensor_parallel
from whet.parallel.torchrun_env import check_mesh
from whet.train.role_workers import RoleWorkers

SIZES = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def experts():
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, moe_intermediate_size=16, intermediate_size=16))


def adapted(**fields):
    model = tiny_model()
    add_adapter(model, LoraConfig(r=2, **fields))
    return model


def with_another_layer():
    model = tiny_model()
    model.model.layers[1].mlp.down_proj = nn.Sequential(nn.Linear(48, 32))
    return model


def with_another_parameter():
    model = tiny_model()
    model.model.layers[1].self_attn.gate = nn.Linear(32, 4)
    return model


def without_plan():
    model = tiny_model()
    model.config.base_model_tp_plan = None
    return model


@pytest.mark.parametrize("model, size, message", [
    (tiny_model, 3, r"m has 4 attention heads, which .*size=3 does not divide; set it to a divisor of 4 \(1, 2, 4\)"),
    (lambda: tiny_model(num_attention_heads=12, num_key_value_heads=3), 2,
     "m has 3 KV heads, and .*size=2 is neither a divisor nor a multiple of that; set it to one of 1, 3, 6, 12"),
    (lambda: tiny_model(intermediate_size=49), 2, r"layers.0.mlp.gate_proj of m has 49 outputs.*of 49 \(1, 7, 49"),
    (experts, 2, "layers.0.mlp.experts.* is '.*' in transformers' plan, and only colwise and rowwise layers"),
    (lambda: adapted(lora_dropout=0.1), 2, "layers.0.self_attn.o_proj reads a part of its inputs, of which"),
    (with_another_layer, 2, "layers.1.mlp.down_proj is a Sequential, and only torch.nn.Linear is divided"),
    (with_another_parameter, 2, "divides its neighbours and leaves out layers.1.self_attn.gate.weight; set it to 1"),
    (without_plan, 2, "tensor-parallel plan, and m has none; set it to 1"),
])  # fmt: skip
def test_a_model_that_can_not_be_divided_is_refused(model, size, message):
    with pytest.raises(ConfigError, match=message):
        check_tensor_parallel(model(), size, "m")


def test_models_that_can_be_divided_pass():
    for model in (tiny_model(), adapted()):
        check_tensor_parallel(model, 2, "m")


def test_a_model_without_a_plan_is_refused_before_it_is_sharded(monkeypatch):
    monkeypatch.setattr("whet.train.role_workers.join_processes", lambda _: SimpleNamespace(size=2))
    loaded = load_model(GPT2LMHeadModel(GPT2Config(vocab_size=260, n_embd=32, n_layer=1, n_head=4)))
    with pytest.raises(ConfigError, match=r"trainer.tensor_parallel_size=2 .*plan.* has none; set it to 1"):
        RoleWorkers(SupervisedTrainingConfig(tensor_parallel_size=2))._placement(loaded)


@pytest.mark.parametrize("size, context, replicas, tensor, message", [
    (3, 1, 1, 2, "trainer.tensor_parallel_size=2 does not divide the number of processes, 3; start a multiple of 2"),
    (4, 4, 1, 2, "tensor_parallel_size=2 times trainer.context_parallel_size=4 is 8, which does not divide .* 4"),
    (4, 1, 4, 2, "tensor_parallel_size=2 times trainer.data_parallel_replicate_size=4 is 8"),
])  # fmt: skip
def test_numbers_of_processes_that_can_not_be_the_mesh_are_refused(size, context, replicas, tensor, message):
    check_mesh(8, context, replicas, tensor)
    with pytest.raises(ConfigError, match=message):
        check_mesh(size, context, replicas, tensor)

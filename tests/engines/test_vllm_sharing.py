"""Frozen weights of a LoRA policy that are views of vLLM's tensors: the same numbers as with copies, bit by bit.

vLLM's model is a stand-in with its names: fused layers, `base_layer` where an adapter may come, a padded vocabulary.
"""

import copy

import pytest
import torch
from helpers import cluster, length_reward, rows, tiny_model
from peft import PeftModel
from safetensors.torch import load_file
from tiny import build
from torch import nn

from whet import DataConfig, GRPOConfig, GRPOLearner
from whet.config.lora import LoraConfig
from whet.errors import EngineError
from whet.models.lora import add_adapter
from whet.models.lora_layers import base_parameters
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.vllm_sharing import SharedWeights, sharing_obstacle

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
IDS = torch.arange(40).view(2, 20) % 60


def adapted(model, **lora):
    """The model with an adapter that adds something."""
    add_adapter(model, LoraConfig(**{"r": 4, **lora}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    return model


class FusedLLM:
    """vLLM's tensors of a model, loaded from it. Args: change: of a tensor, given its name."""

    def __init__(self, model, change=lambda name, tensor: tensor):
        base, seen = {}, set()
        for name, (p, _) in base_parameters(model).items():
            base |= {} if id(p) in seen else {name: p.data}  # a tied head has no tensor of its own
            seen.add(id(p))
        self.model = nn.Module()
        self.model.packed_modules_mapping = FUSED
        self.tensors = {}
        parts = {part: whole for whole, names in FUSED.items() for part in names}
        for name, weight in base.items():
            before, layer, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", *name.split("."))
            if layer not in parts:
                wrapped = ".base_layer" if layer in ("o_proj", "down_proj", "embed_tokens") else ""
                pad = weight.new_zeros(8, weight.shape[1]) if layer in ("embed_tokens", "lm_head") else weight[:0]
                self.tensors[f"{name.removesuffix('.weight')}{wrapped}.{kind}"] = torch.cat([weight, pad])
            elif layer in ("q_proj", "gate_proj"):
                whole = [base[f"{before}.{part}.{kind}"] for part in FUSED[parts[layer]]]
                self.tensors[f"{before}.{parts[layer]}.base_layer.{kind}"] = torch.cat(whole)
        self.tensors = {name: change(name, tensor) for name, tensor in self.tensors.items()}
        self.model.named_parameters = lambda: [(n, nn.Parameter(t, False)) for n, t in self.tensors.items()]

    def apply_model(self, function):
        return [function(self.model)]


def outputs(model):
    """Logits, and the gradients of the adapter."""
    model.zero_grad()
    logits = model(IDS).logits
    logits.square().mean().backward()
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}}


def assert_equal(got, want):
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_views_give_the_outputs_and_gradients_of_copies(family, tied, caplog):
    model = adapted(build(family, tie_word_embeddings=tied))
    want, values = outputs(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    shared, llm = SharedWeights(model), FusedLLM(model)
    shared.to_host()
    with caplog.at_level("INFO", "whet"):
        shared.share(llm)
    assert "0 of" in caplog.text and "tensors are copies" in caplog.text
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert shared.shared_bytes == sum(p.nbytes for p in frozen)
    storages = {t.untyped_storage().data_ptr() for t in llm.tensors.values()}
    assert all(p.untyped_storage().data_ptr() in storages for p in frozen)
    assert_equal(outputs(model), want)
    shared.to_host()
    assert shared.shared_bytes == 0
    for tensor in llm.tensors.values():
        tensor.fill_(torch.nan)  # as memory that vLLM has freed
    shared.to_device()
    assert_equal(dict(model.named_parameters()), values)
    assert_equal(outputs(model), want)


def changed(tensor):
    tensor[1, 2] += 1e-3
    return tensor


@pytest.mark.parametrize(
    "change",
    [changed, lambda t: t[:0].clone(), lambda t: t.bfloat16(), lambda t: t[:-1], lambda t: t.T.contiguous(),
     torch.inference_mode()(torch.clone)],
    ids=["another number", "packed", "dtype", "rows", "layout", "no autograd"],
)  # fmt: skip
def test_a_tensor_that_is_not_the_trainers_keeps_its_copy(change, caplog):
    model = adapted(build("llama", tie_word_embeddings=False))
    want = outputs(model)
    llm = FusedLLM(model, lambda name, t: change(t) if name.startswith("model.layers.1.self_attn.qkv") else t)
    shared = SharedWeights(model)
    shared.share(llm)
    own = {
        n
        for n, p in model.named_parameters()
        if not p.requires_grad
        and p.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in llm.tensors.values()}
    }
    heads = ["q"] if change is changed else ["q", "k", "v"]
    assert own == {f"model.layers.1.self_attn.{x}_proj.base_layer.weight" for x in heads}
    assert f"{len(own)} of" in caplog.text and "model.layers.1.self_attn.q_proj.weight" in caplog.text
    assert_equal(outputs(model), want)


@pytest.mark.parametrize("rslora", [False, True])
def test_the_file_of_an_adapter_is_read_by_peft(tmp_path, rslora):
    model = adapted(build("llama"), use_rslora=rslora, lora_alpha=12, target_modules=["q_proj", "down_proj"])
    shared = SharedWeights(model)
    trained = list(shared.adapter_weights())
    shared.write_adapter(trained, tmp_path)
    read = PeftModel.from_pretrained(build("llama"), tmp_path)
    torch.testing.assert_close(read(IDS).logits, model(IDS).logits)
    assert shared.arguments()["max_lora_rank"] == 8
    shared.write_adapter([(name, tensor.bfloat16()) for name, tensor in trained], tmp_path)
    values, scale = load_file(tmp_path / "adapter_model.safetensors"), 12 / 2 if rslora else 12 / 4
    for name, tensor in trained:
        factor = scale if "lora_B" in name else 1.0  # in fp32, in which vLLM rounds it once
        assert torch.equal(
            values[f"base_model.model.{name.replace('.default', '')}"], tensor.bfloat16().float() * factor
        )
    for rank, most in ((8, 8), (9, 16)):
        shared.rank = rank
        assert shared.arguments()["max_lora_rank"] == most
    assert shared.arguments()["lora_target_modules"] == ["down_proj", "q_proj"]
    with pytest.raises(EngineError, match="leave out lora_A of model"):
        shared.write_adapter(trained[1:], tmp_path)


def test_what_can_not_be_shared_is_said():
    assert "no adapter" in sharing_obstacle(build("llama"))
    assert sharing_obstacle(adapted(build("llama"))) is None
    assert "norm.weight is trained too" in sharing_obstacle(adapted(build("llama"), modules_to_save=["model.norm"]))
    merged = adapted(build("llama"))
    next(m for m in merged.modules() if hasattr(m, "merge") and hasattr(m, "lora_A")).merge()
    assert "is merged" in sharing_obstacle(merged)
    several = adapted(build("llama"))
    next(m for m in several.modules() if hasattr(m, "lora_A")).r["default"] = 2
    assert "ranks [2, 4]" in sharing_obstacle(several)
    for rank, is_refused in ((512, False), (513, True)):
        for m in several.modules():
            if hasattr(m, "lora_A"):
                m.r["default"] = rank
        assert bool(sharing_obstacle(several)) is is_refused


class SharingEngine(EmbeddedEngine):
    """whet's engine over a policy whose frozen weights lie in a stand-in of vLLM until it is closed."""

    last = None

    def __init__(self, model, **options):
        self.shared, self.llm = SharedWeights(model.module), FusedLLM(model.module)
        self.shared.share(self.llm)
        super().__init__(model, **options)
        SharingEngine.last = self

    def close(self):
        super().close()
        self.shared.to_host()
        for tensor in self.llm.tensors.values():
            tensor.fill_(torch.nan)
        self.shared.to_device()


def test_five_steps_with_shared_weights_are_those_with_copies():
    base = tiny_model(gain=1.0)
    runs = {}
    for engine in ("embedded", SharingEngine):
        actor = adapted(copy.deepcopy(base))
        made = cluster(actor, reference=actor, engine=engine, rollout={"max_tokens_to_generate": 8}, lr=1e-2)
        learner = GRPOLearner(made, GRPOConfig(beta=0.04), length_reward, data=DataConfig(batch_size=2))
        steps = [(row["reward"], row["kl"]) for row in learner.train(rows(10)).rows]
        if engine is SharingEngine:
            assert SharingEngine.last.shared.shared_bytes > 0
        made.close()
        runs[engine] = steps, {n: p.detach().clone() for n, p in actor.named_parameters()}
    (steps, weights), (shared_steps, shared_weights) = runs.values()
    assert len(steps) == 5 and shared_steps == steps
    assert_equal(shared_weights, weights)

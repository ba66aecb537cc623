import logging
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from whet.errors import ConfigError
from whet.models.heads import Head
from whet.models.load import load_model, save_model

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def tiny(family="Llama", dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5) if p.dim() > 1 else p.add_(0.1)
    return model


def test_a_module_is_used_as_it_is_and_trains():
    model = tiny().eval()
    loaded = load_model(model)
    assert loaded.module is model and model.training and loaded.packable and loaded.unpackable_reasons == ()
    assert loaded.lm_head == Head("identity") and loaded.name == "LlamaForCausalLM"
    assert model.config._attn_implementation == "whet"
    assert load_model(model).packable  # again, though whet's attention is set by now


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_folder_is_read_in_the_dtype_asked_for(tmp_path, dtype):
    tiny(dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype=dtype)
    assert {p.dtype for p in loaded.module.parameters()} == {getattr(torch, dtype)}
    assert loaded.packable, loaded.unpackable_reasons
    assert loaded.module.model.rotary_emb.inv_freq.dtype == torch.float32  # bf16 angles would be off at long positions


def test_products_of_a_model_on_a_gpu_add_in_fp32_alone(monkeypatch):
    flags = {f"allow_{kind}_reduced_precision_reduction": True for kind in ("fp16", "bf16")}
    monkeypatch.setattr(torch.backends.cuda, "matmul", found := SimpleNamespace(**flags))
    monkeypatch.setattr("whet.models.load.check_device", torch.device)  # there is no GPU
    load_model(tiny())
    assert vars(found) == flags
    load_model(tiny(), device="cuda", on_cpu=True)
    assert vars(found) == dict.fromkeys(flags, False)


def test_master_weights_are_fp32_unless_told_otherwise(tmp_path):
    tiny(dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path).module.lm_head.weight.dtype == torch.float32


def test_a_saved_actor_loads_with_plain_transformers(tmp_path):
    loaded = load_model(tiny())
    save_model(loaded, None, tmp_path / "final")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert (tmp_path / "final" / "model.safetensors").exists()
    for (name, a), (_, b) in zip(plain.state_dict().items(), loaded.module.state_dict().items()):
        assert torch.equal(a, b), name
    assert plain.config._attn_implementation != "whet"


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_starts_at_zero_and_comes_back_from_disk(tmp_path, tied):
    critic = load_model(tiny(tie_word_embeddings=tied), role="critic")
    assert critic.lm_head.kind == "none" and critic.score_head.weight.shape == (1, 16)
    assert not critic.score_head.weight.any() and critic.score_head.weight.requires_grad
    assert critic.module.get_input_embeddings().weight.shape == (40, 16)
    with torch.no_grad():
        critic.score_head.weight.copy_(torch.arange(16.0)[None])
        critic.module.get_input_embeddings().weight.add_(1)
    save_model(critic, None, tmp_path)
    back = load_model(str(tmp_path), role="critic")
    assert back.lm_head.kind == "none" and back.score_head is not None
    want = critic.module.state_dict()
    assert back.module.state_dict().keys() == want.keys()
    assert all(torch.equal(x, want[name]) for name, x in back.module.state_dict().items())
    with pytest.raises(ConfigError, match="is a critic"):
        load_model(str(tmp_path))


def test_a_reference_has_no_gradient():
    assert not any(p.requires_grad for p in load_model(tiny(), role="reference").module.parameters())


def test_dropout_is_taken_out_and_named(caplog):
    model = tiny("GPT2", n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.1, attn_pdrop=0.2, embd_pdrop=0.0)
    with caplog.at_level(logging.WARNING, "whet"):
        load_model(model)
    assert model.config.resid_pdrop == model.config.attn_pdrop == 0.0
    assert not any(m.p for m in model.modules() if isinstance(m, nn.Dropout)) and model.training
    assert "attn_pdrop 0.2" in caplog.text and "embd_pdrop" not in caplog.text
    ids = torch.arange(6)[None]
    assert load_model(model).packable
    model.set_attn_implementation("eager")
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_attention_dropout_kept_as_a_plain_number_is_taken_out_too():
    model = tiny(attention_dropout=0.3)
    load_model(model)
    assert [layer.self_attn.attention_dropout for layer in model.model.layers] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("Falcon", {}, "not behind transformers' attention interface"),
        ("Mamba", {}, "recurrent state"),
        ("StableLm", {}, "without whet_layout"),
        ("DiffLlama", {"num_key_value_heads": 2}, "4 attention calls of 2 layers"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_a_model_that_takes_no_layout_is_told_apart(family, changes, reason, caplog):
    model = tiny(family, **changes)
    before = model.config._attn_implementation
    with caplog.at_level(logging.WARNING, "whet"):
        loaded = load_model(model)
    assert not loaded.packable and reason in "; ".join(loaded.unpackable_reasons)
    assert caplog.text.count("trains padded with the hf engine") == 1
    assert model.config._attn_implementation == before != "whet"


def test_attention_that_leaks_between_rows_is_caught(monkeypatch):
    from whet.models import attention, model_capabilities

    class Leaky(model_capabilities._CountedLayout):
        def attend(self, layer, q, k, v, **how):
            return super().attend(layer, q, k, v, **how) + v.mean()

    monkeypatch.setattr(model_capabilities, "_CountedLayout", Leaky)
    uncached = model_capabilities._twin_capabilities.__wrapped__  # an earlier test may have found the twin's facts
    monkeypatch.setattr(model_capabilities, "_twin_capabilities", uncached)
    assert "differ" in load_model(tiny()).unpackable_reasons[0]
    assert attention.SegmentLayout is not Leaky


def test_what_is_not_a_text_model_is_refused(tmp_path):
    transformers.Gemma3Config().save_pretrained(tmp_path / "vision")
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(ConfigError, match=r"not a text-only model.*vision_config"):
        load_model(str(tmp_path / "vision"))
    with pytest.raises(ConfigError, match="encoder-decoder"):
        load_model(str(tmp_path / "t5"))
    with pytest.raises(ConfigError, match="not a transformers model"):
        load_model(nn.Linear(2, 2))


@pytest.mark.parametrize("damage", ["cut", "shape", "missing"])
def test_weights_that_are_cut_misshapen_or_missing_are_refused(tmp_path, damage):
    tiny(tie_word_embeddings=False).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-50])
    elif damage == "shape":
        tensors["model.norm.weight"] = torch.ones(3)
        save_file(tensors, path, metadata={"format": "pt"})
    else:
        del tensors["lm_head.weight"]
        save_file(tensors, path, metadata={"format": "pt"})
    says = "no weights for 1 parameters.*lm_head" if damage == "missing" else "can't load .*must be complete"
    with pytest.raises(ConfigError, match=rf"(?s){says}"):
        load_model(str(tmp_path))


def test_wrong_names_are_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="did you mean float32"):
        load_model(str(tmp_path), dtype="flaot32")
    with pytest.raises(ConfigError, match="did you mean critic"):
        load_model(tiny(), role="critik")
    with pytest.raises(ConfigError, match=r"device 'tpu' can't be used here: .*give cpu, cuda"):
        load_model(tiny(), device="tpu")
    with pytest.raises(ConfigError, match="device 'cuda:99' can't be used here"):
        load_model(tiny(), device="cuda:99")
    with pytest.raises(ConfigError, match=r"there is no folder .*nothing"):
        load_model(str(tmp_path / "nothing"))


def test_the_router_loss_is_said_to_be_left_out(caplog):
    model = tiny("Qwen3Moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    with caplog.at_level(logging.INFO, "whet"):
        assert load_model(model).packable
    assert "auxiliary loss is not added" in caplog.text

"""What is read is whole and no more; whatever else a folder holds is an error that says what to do."""

import json
import os
import pickle
import shutil
from functools import partial

import pytest
import torch
import transformers
from families import tiny
from safetensors.torch import load_file, save_file

from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError
from whet.models import pretrained
from whet.models.load import load_model, save_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source")
    tiny("Qwen2").save_pretrained(path)
    return path


@pytest.fixture
def folder(source, tmp_path):
    return shutil.copytree(source, tmp_path / "model")


def refused(folder, **how):
    with pytest.raises(ConfigError) as error:
        load_model(str(folder), **how)
    return str(error.value)


def configured(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def weights(folder, **tensors):
    """Adds tensors, or takes those that are None away; dots are written as __."""
    path = folder / "model.safetensors"
    named = {name.replace("__", "."): x for name, x in tensors.items()}
    found = {name: x.clone() for name, x in (load_file(path) | named).items() if x is not None}
    save_file(found, path, metadata={"format": "pt"})


def test_an_adapter_next_to_a_whole_model_is_refused(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "not clear which of the two to load" in (said := refused(folder)) and "merged already" in said


def test_weights_that_the_config_has_no_place_for_are_refused_by_name(folder):
    configured(folder, num_hidden_layers=1, layer_types=None, max_window_layers=1)
    said = refused(folder)
    assert "without a place in the model" in said and "model.layers.1." in said and "..." in said


def test_tables_that_older_versions_saved_are_no_weights(folder):
    table = torch.ones(4)
    weights(folder, model__layers__0__self_attn__rotary_emb__inv_freq=table, model__layers__0__attn__bias=table)
    assert load_model(str(folder)).packable
    weights(folder, v_head__weight=table)
    assert "dropped (1): v_head.weight;" in refused(folder)


def test_a_tied_head_may_be_missing_and_a_bias_may_not(folder):
    weights(folder, model__layers__1__self_attn__q_proj__bias=None)
    assert "no weights for 1 parameters" in (said := refused(folder)) and "layers.1.self_attn.q_proj.bias" in said
    tied = tiny("Qwen3")
    assert tied.config.tie_word_embeddings
    tied.save_pretrained(folder)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert load_model(str(folder)).packable


def test_a_missing_buffer_that_is_trained_is_named():
    model = tiny("Llama")
    model.register_buffer("router_bias", torch.zeros(4))
    info = {"missing_keys": {"router_bias"}, "unexpected_keys": set(), "mismatched_keys": set()}
    with pytest.raises(ConfigError, match="random: router_bias"):
        pretrained._check_weights(model, info, "there", None)


def test_shapes_of_file_and_config_are_both_named(folder):
    weights(folder, model__norm__weight=torch.ones(3))
    assert "model.norm.weight is [3] there and [32] here" in refused(folder)


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX"])  # transformers saves the head of one under an older name
def test_a_critic_comes_back_whole_or_not_at_all(tmp_path, family):
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, intermediate_size=16)
    critic = load_model(transformers.AutoModelForCausalLM.from_config(config), role="critic")
    head = critic.score_head.weight
    with torch.no_grad():
        head.copy_(torch.arange(16.0)[None])
    save_model(critic, None, tmp_path)
    back = load_model(str(tmp_path), role="critic")
    assert torch.equal(back.score_head.weight, head)
    name = next(n for n in load_file(tmp_path / "model.safetensors") if n.endswith("norm.weight"))
    weights(tmp_path, **{name: None})
    assert name in refused(tmp_path, role="critic")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vocab_size": -5}, "vocab_size -5 in its config"),
        ({"num_attention_heads": 0}, "num_attention_heads 0 in its config"),
        ({"num_hidden_layers": 0, "layer_types": None}, "num_hidden_layers 0 in its config"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "a model has at most 10000"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"rope_parameters": "x"}, "rope_parameters"),
        ({"hidden_act": "nope"}, "nope"),
        ({"num_attention_heads": 8, "head_dim": 4, "num_key_value_heads": 3}, "3"),
        ({"quantization_config": 3}, "can't read a model"),
        ({"model_type": "gpt9"}, "gpt9"),
    ],
    ids=str,
)
def test_a_config_that_makes_no_model_says_which_field(folder, fields, says):
    configured(folder, **fields)
    assert says in refused(folder)


def test_an_odd_head_size_is_an_error_also_where_no_config_checks_it():
    config = transformers.LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.head_dim = 15
    with pytest.raises(ConfigError, match="can't run 8 tokens"):
        load_model(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"a": "\xff"}', b'{"a":' * 200_000], ids=["empty", "list", "latin", "deep"]
)
def test_json_that_is_none_is_named(folder, name, content):
    (folder / name).write_bytes(content)
    assert f"{name} is not a valid JSON file" in refused(folder)


def test_a_config_of_megabytes_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(pretrained, "MAX_CONFIG_BYTES", 100)
    assert "config.json has" in (said := refused(folder)) and "at most 100" in said


class Calls:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", [partial(pickle.dump, protocol=2), torch.save], ids=["pickle", "torch"])
def test_a_pickle_is_not_opened_and_the_way_to_convert_it_is_said(folder, tmp_path, form):
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as f:
        form({"a": Calls(tmp_path / "ran")}, f)
    assert "convert it: safetensors.torch.save_file" in refused(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b'\x10\0\0\0\0\0\0\0{"a": 1'], ids=["empty", "text", "cut"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_files_that_hold_no_weights_are_errors_that_name_the_folder(folder, name, content):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    assert str(folder) in (said := refused(folder)) and ("must be complete" in said or "convert it" in said)


def test_tensors_in_torchs_own_format_are_read(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    got = load_model(str(folder)).module.state_dict()
    assert all(torch.equal(got[name], x) for name, x in tensors.items())


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_beside_the_weights_runs_only_where_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model, folder = tiny("Llama"), tmp_path / "own"
    model.save_pretrained(folder)
    (folder / "modeling_own.py").write_text(CODE)
    named = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    configured(folder, model_type="own-llama", architectures=["OwnModel"], auto_map=named)
    assert "set reference.trust_remote_code=true" in refused(folder, role="reference")
    loaded = load_model(str(folder), trust_remote_code=True)
    assert type(loaded.module).__name__ == "OwnModel"
    assert torch.equal(loaded.module.lm_head.weight, model.lm_head.weight)
    save_model(loaded, byte_tokenizer(), tmp_path / "saved")
    assert (tmp_path / "saved" / "modeling_own.py").is_file()


def test_weights_in_8_bits_without_their_configuration_are_refused(folder):
    held = load_file(folder / "model.safetensors")
    save_file(
        {k: (v * 100).to(torch.int8) if "q_proj.weight" in k else v for k, v in held.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    said = refused(folder)
    assert "q_proj.weight as I8" in said and "no quantization_config" in said and "actor.quantization=nf4" in said

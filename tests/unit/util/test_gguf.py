"""Models in GGUF: converted to a folder whose model gives the logits of the model that the file was made from."""

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError
from whet.hub.base_model import find_base_model, find_licence
from whet.storage.model_paths import model_folder

gguf = pytest.importorskip("gguf")

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight, heads):
    """llama.cpp's order of a rotary head's rows: pairs next to each other."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write_llama(path, architecture="llama", template="{{ messages[0]['content'] }}"):
    """A tiny Llama with a byte-level tokenizer, in GGUF; returns the module."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "ab", "<|end|>"]
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokens), max_position_embeddings=64, tie_word_embeddings=False, **SIZES)
    module = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(template)
    writer.add_license("apache-2.0")
    writer.add_string("general.base_model.0.repo_url", "https://huggingface.co/some/base")
    state = {name: p.numpy() for name, p in module.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    writer.add_tensor("output.weight", state["lm_head.weight"])
    for layer in range(2):
        for ours, theirs in PARTS.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": 4, "attn_k": 2}.get(theirs)
            weight = interleaved(weight, heads) if heads else weight
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return module


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@torch.inference_mode()
def test_a_gguf_file_is_the_model_that_it_was_made_from(tmp_path):
    (tmp_path / "model").mkdir()
    module = write_llama(tmp_path / "model" / "tiny.gguf")
    folder = model_folder(tmp_path / "model" / "tiny.gguf")
    assert folder == model_folder(tmp_path / "model")  # the only one of a folder stands for it, and is converted once
    read = AutoModelForCausalLM.from_pretrained(folder)
    assert read.dtype == torch.float32
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    torch.testing.assert_close(read(ids).logits, module(ids).logits)
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.decode(tokenizer("hi there").input_ids) == "hi there"
    assert tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False) == "hi"
    assert (find_base_model(folder), find_licence(folder)["license"]) == ("some/base", "apache-2.0")


def test_what_can_not_be_read_is_named(tmp_path, monkeypatch):
    for name in ("q4.gguf", "q8.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"has 2 GGUF files \(q4.gguf, q8.gguf\); give one of them"):
        model_folder(tmp_path)
    write_llama(tmp_path / "own.gguf", architecture="unheard")
    whole = (tmp_path / "own.gguf").read_bytes()
    for start, words in (
        (b"", "q8.gguf is empty; download it again"),
        (b"<html>not found", r"is not a GGUF file: it starts with b'<html>not found'; download it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, not the model; run `git lfs pull` in"),
        (b"GGUF", "is cut off or damaged at 4 bytes: .*; compare its size with the original's, and download it again"),
        (whole[: len(whole) // 2], "is cut off or damaged at .*; compare its size"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(64), r"names no architecture \(general.arch"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(64), "is cut off or damaged at 72 bytes: .* version 1 "),
        (whole, "transformers can't read .* architecture unheard is not supp.*; it reads .*llama.*; give the Hug"),
    ):
        (tmp_path / "q8.gguf").write_bytes(start)
        with pytest.raises(ConfigError, match=words):
            model_folder(tmp_path / "q8.gguf")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]  # nothing half made stays
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"needs the package gguf: pip install .*\[gguf\]"):
        model_folder(tmp_path / "q4.gguf")

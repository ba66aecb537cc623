"""A model that looks at later tokens is refused, whatever its config says; the causal families are not."""

import pytest
import torch
import transformers
from families import PACKABLE, REFUSED, tiny

from whet.errors import ConfigError
from whet.models.causality_check import check_causal
from whet.models.load import load_model

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def model_of(family, **fields):
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**SMALL, **fields))


@pytest.mark.parametrize("family", [*PACKABLE, *REFUSED])
def test_causal_families_pass(family):
    check_causal(tiny(family), family)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_is_refused_and_a_decoder_of_its_family_is_not(dtype):
    with pytest.raises(ConfigError, match=r"\(bert\) is not causal: .*is_decoder: false"):
        load_model(model_of("Bert").to(dtype))
    assert load_model(model_of("Bert", is_decoder=True).to(dtype)).unpackable_reasons


def test_is_decoder_false_alone_refuses_nothing():
    model = model_of("GPTNeoX")
    assert model.config.is_decoder is False
    check_causal(model, "neox")


def test_an_encoder_of_a_folder_is_called_that_and_not_its_other_heads(tmp_path):
    config = transformers.BertConfig(**SMALL, max_position_embeddings=5)
    transformers.BertForPreTraining(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is not causal"):
        load_model(str(tmp_path))


def test_the_check_leaves_no_gradient_and_no_hook_behind_and_asks_inside_inference_mode_too():
    model = model_of("Bert")
    with torch.inference_mode(), pytest.raises(ConfigError, match="is not causal"):
        check_causal(model, "bert")
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_a_model_whose_sizes_do_not_fit_says_what_failed():
    model = tiny("Llama")
    model.model.layers[0].self_attn.o_proj = torch.nn.Linear(7, 32)
    with pytest.raises(ConfigError, match=r"\(llama\) can't run 8 tokens: RuntimeError: .*shapes"):
        load_model(model)

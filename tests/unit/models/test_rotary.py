"""Rotary embeddings in fewer kernels: the numbers and gradients of transformers' own."""

import pytest
import torch
import transformers
from transformers.models.glm import modeling_glm
from transformers.models.qwen3 import modeling_qwen3

from whet.models.rotary import RotaryFunctions, rotate

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def drawn(dtype=torch.float64):
    torch.manual_seed(0)
    q, k = (torch.randn(2, 7, h, 8, dtype=dtype).transpose(1, 2).requires_grad_() for h in (4, 2))
    return q, k, torch.randn(2, 7, 8, dtype=dtype), torch.randn(2, 7, 8, dtype=dtype)


def test_values_and_gradients_are_those_of_the_formula():
    q, k, cos, sin = drawn()
    want, got = modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin), rotate(q, k, cos, sin)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda q, k: rotate(q, k, cos, sin), (q, k))
    made = sin._whet_tables  # by the first layer, for all that get this tensor
    assert sin._whet_tables is made and rotate(q, k, cos, sin)[0].equal(got[0])
    assert not rotate(q, k, cos, sin + 1)[0].equal(got[0])


def test_a_rounding_less_is_no_further_from_the_exact_numbers():
    q, k, cos, sin = (x.detach().bfloat16() for x in drawn())
    exact = rotate(*(x.double() for x in (q, k, cos, sin)))
    off = lambda pair: sum((a.double() - b).square().sum() for a, b in zip(pair, exact))
    assert off(rotate(q, k, cos, sin)) < off(modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin))


@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "Gemma2", "Mistral"])
def test_a_models_file_has_the_function_for_as_long_as_it_is_enabled(kind):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **HEADS)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    functions, ids = RotaryFunctions(model), torch.arange(12)[None] + 3
    assert len(functions) == 1
    file, replaced = functions._found[0]
    own = file.apply_rotary_pos_emb
    run = lambda: torch.autograd.grad(model(ids).logits.square().sum(), list(model.parameters()))
    want = run()
    with functions.enabled():
        assert file.apply_rotary_pos_emb is replaced and len(RotaryFunctions(model)) == 1
        torch.testing.assert_close(run(), want, rtol=1e-5, atol=1e-7)
        with pytest.raises(ZeroDivisionError), functions.enabled():
            raise ZeroDivisionError
    assert file.apply_rotary_pos_emb is own


def test_another_formula_and_other_calls_are_left_to_the_files_own_function():
    glm = transformers.GlmConfig(**{**SIZES, **HEADS, "num_hidden_layers": 1})
    model = transformers.AutoModelForCausalLM.from_config(glm)
    assert hasattr(modeling_glm, "apply_rotary_pos_emb") and len(RotaryFunctions(model)) == 0
    qwen = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES, **HEADS))
    (_, function), (q, k, cos, sin) = RotaryFunctions(qwen)._found[0], drawn()
    calls = [((q, k, cos, sin), {}), ((q.transpose(1, 2), k.transpose(1, 2), cos, sin), {"unsqueeze_dim": 2})]
    for args, options in calls:
        torch.testing.assert_close(function(*args, **options), function.own(*args, **options))
    assert function(q.bfloat16(), k.bfloat16(), cos, sin)[0].dtype == torch.float64

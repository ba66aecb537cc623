import pytest
import torch
import transformers
from torch import nn

from whet.models.heads import Head, detect_head

SIZES = {
    "vocab_size": 41,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "head_dim": 8,
    "pad_token_id": 0,
}


def tiny(family, dtype=torch.float32, **changes):
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("family", "changes", "kind", "scale", "softcap"),
    [
        ("Llama", {}, "identity", 1.0, None),
        ("Phi", {}, "identity", 1.0, None),
        ("Cohere", {"logit_scale": 0.0625}, "scale", 0.0625, None),
        ("Granite", {"logits_scaling": 4.0}, "scale", 0.25, None),
        ("Gemma2", {"final_logit_softcapping": 30.0}, "softcap", 1.0, 30.0),
        ("Gemma3Text", {"final_logit_softcapping": 3.0}, "softcap", 1.0, 3.0),
    ],
)
def test_the_head_is_found(family, changes, kind, scale, softcap, dtype):
    head = detect_head(tiny(family, dtype, **changes))
    assert head.kind == kind and head.linear
    assert head.scale == pytest.approx(scale, rel=1e-5)
    assert head.softcap == (None if softcap is None else pytest.approx(softcap, rel=1e-4))


def test_a_head_that_is_no_plain_linear_layer_is_unknown():
    model = tiny("Llama")

    class Clamped(nn.Linear):
        def forward(self, x):
            return super().forward(x).clamp(max=3)

    model.set_output_embeddings(Clamped(16, 41, bias=False))
    assert detect_head(model) == Head("unknown") and not detect_head(model).linear


def test_a_transform_of_another_shape_is_unknown():
    model = tiny("Llama")

    def clamp(module, inputs, output):
        output.logits = output.logits.clamp(-5, 5)
        return output

    model.register_forward_hook(clamp)
    assert detect_head(model) == Head("unknown")
    assert not model.lm_head._forward_hooks and not model.model._forward_hooks  # the detector's own are gone

"""Critics and reward models: a backbone with a score head, in transformers' own format."""

import pytest
import torch
import transformers
from families import BATCH, tiny
from safetensors.torch import load_file, save_file

from whet.errors import ConfigError
from whet.models.forward import token_stats
from whet.models.heads import add_score_head
from whet.models.load import load_model, save_model
from whet.packing.micro_batch_planner import plan_micro_batches

FAMILIES = ["Qwen3", "Llama", "Gemma2", "GptOss"]


def classifier(family="Qwen3", labels=1):
    torch.manual_seed(1)
    config = tiny(family).config
    config.num_labels = labels
    return transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()


def last_scores(loaded, rows):
    """What whet makes of the state after the last token of each row."""
    with torch.no_grad():
        hidden = [loaded.module.get_decoder()(input_ids=x[None]).last_hidden_state[0, -1] for x in rows]
        return loaded.score_head(torch.stack(hidden)).squeeze(1)


@pytest.mark.spread(4)
@pytest.mark.parametrize("role", ["critic", "reward"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_classifier_of_one_label_is_a_critic_and_a_reward_model(tmp_path, family, role):
    model = classifier(family)
    model.save_pretrained(tmp_path)
    rows = [torch.arange(3, 3 + n) for n in (5, 9)]
    want = torch.stack([model(x[None]).logits[0, 0] for x in rows])
    loaded = load_model(str(tmp_path), role=role)
    assert loaded.outputs == {"values", "scores"} and loaded.packable and loaded.lm_head.kind == "none"
    loaded.module.set_attn_implementation("eager")
    torch.testing.assert_close(last_scores(loaded, rows), want, atol=1e-5, rtol=1e-5)


@pytest.mark.spread(4)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_is_saved_and_scores_alike(tmp_path, family, tied):
    critic = load_model(tiny(family, tie_word_embeddings=tied), role="critic")
    with torch.no_grad():
        critic.score_head.weight.normal_()
    save_model(critic, None, tmp_path)
    plain, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert plain.config.num_labels == 1
    rows = [torch.arange(3, 9)]
    critic.module.set_attn_implementation("eager")
    with torch.no_grad():
        want = plain.eval()(rows[0][None]).logits[0]
    torch.testing.assert_close(last_scores(critic, rows), want, atol=1e-5, rtol=1e-5)


def test_a_family_without_a_classifier_has_critics_too(tmp_path):
    critic = load_model(tiny("Cohere"), role="critic")
    with torch.no_grad():
        critic.score_head.weight.normal_()
    save_model(critic, None, tmp_path)
    back = load_model(str(tmp_path), role="critic")
    assert back.packable and torch.equal(back.score_head.weight, critic.score_head.weight)


def replaced_head_critic(folder):
    """A critic as it is saved if transformers has no classifier for the family: its score head replaces the LM head."""
    model = tiny("Qwen3", tie_word_embeddings=False)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = torch.arange(32.0)[None]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    config.whet_value_head = True
    config.save_pretrained(folder)
    return state


def test_a_critic_that_was_saved_before_transformers_had_its_classifier_is_read(tmp_path):
    state = replaced_head_critic(tmp_path)
    back = load_model(str(tmp_path), role="critic")
    assert torch.equal(back.score_head.weight, state["lm_head.weight"])
    assert torch.equal(back.module.get_input_embeddings().weight, state["model.embed_tokens.weight"])
    assert type(back.module).__name__ == "Qwen3ForSequenceClassification"
    with pytest.raises(ConfigError, match="is a critic"):
        load_model(str(tmp_path))


def test_a_backbone_may_have_both_heads_and_gives_both_in_one_pass(tmp_path):
    plain = load_model(tiny("Qwen3"))
    weight = torch.randn(1, 32)
    both = load_model(add_score_head(tiny("Qwen3"), weight, shared=True))
    assert both.outputs == {"logprobs", "values", "scores"} and both.packable
    critic = load_model(tiny("Qwen3"), role="critic")
    with torch.no_grad():
        critic.score_head.weight.copy_(weight)
    (micro,) = plan_micro_batches(BATCH, max_tokens=4096, packable=True)
    got, logprobs, values = token_stats(both, micro), token_stats(plain, micro), token_stats(critic, micro)
    assert torch.equal(got.logprobs, logprobs.logprobs) and torch.equal(got.values, values.values)
    assert token_stats(both, micro, outputs={"values"}).logprobs is None
    assert token_stats(both, micro, outputs={"logprobs"}).values is None
    (got.logprobs.sum() + got.values.sum()).backward()
    assert both.score_head.weight.grad.any()
    with pytest.raises(ConfigError, match="no head for values"):
        token_stats(plain, micro, outputs={"values"})
    save_model(both, None, tmp_path)
    back = load_model(str(tmp_path))
    assert back.outputs == both.outputs and torch.equal(back.score_head.weight, weight)


def test_what_gives_no_single_score_is_refused(tmp_path):
    classifier(labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match=r"3 labels.*num_labels=1"):
        load_model(str(tmp_path / "three"), role="reward")
    with pytest.raises(ConfigError, match="it has no score head"):
        load_model(tiny("Llama"), role="reward")
    with pytest.raises(ConfigError, match=r"can't complete prompts; set it as reward_model.model"):
        load_model(classifier(), role="reference")
    with pytest.raises(ConfigError, match="can't be the actor"):
        load_model(classifier())

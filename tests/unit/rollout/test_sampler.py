"""Sampler: the direct interface, against transformers' generate and against RLCluster.generate."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import END, PAD, tiny_model, tunix_cluster
from transformers import BloomConfig, BloomForCausalLM, GenerationConfig

from whet import Sampler
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError, EngineError

PROMPTS = ["1+1=", "what?", "a", "1+1="]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def sampler(tokenizer):
    return Sampler(tiny_model(), tokenizer)


def ids(out):
    return [t.tolist() for t in out.tokens]


def theirs(model, text, **fields):
    tokens = torch.tensor([list(text.encode())])
    base = {"max_new_tokens": 8, "eos_token_id": END, "pad_token_id": PAD, "do_sample": False}
    config = GenerationConfig(**base, **fields)
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    return [row[tokens.shape[1] :].tolist() for row in out]


def until_end(row):
    return row[: row.index(END) + 1] if END in row else row


def test_greedy_completions_are_those_of_transformers(sampler):
    model = tiny_model()
    out = sampler(PROMPTS, 8)
    assert ids(out) == [until_end(theirs(model, p)[0]) for p in PROMPTS]
    assert out.text == [sampler.decode(t) for t in out.tokens]
    assert out.logprobs is None and out.logits is None


def make_model(folder, seed):
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_function_makes_the_model_which_is_gone_when_the_sampler_closes(sampler):
    with Sampler(f"{__name__}:make_model") as made:
        folder = Path(made.loaded.name)
        assert (folder / "config.json").is_file()
        assert ids(made(PROMPTS, 8)) == ids(sampler(PROMPTS, 8))
    assert not folder.exists()


@pytest.mark.parametrize("beams", [2, 4])
def test_beams_are_those_of_transformers(sampler, beams):
    model = tiny_model()
    out = sampler(PROMPTS[:3], 8, beam_size=beams, num_generations=2, return_logprobs=True)
    expected = [row for p in PROMPTS[:3] for row in theirs(model, p, num_beams=beams, num_return_sequences=2)]
    assert ids(out) == [until_end(row) for row in expected]
    assert all(len(a) == len(b) for a, b in zip(out.logprobs, out.tokens))
    assert ids(sampler(PROMPTS[:3], 8, generation_kwargs={"num_beams": beams})) == ids(out)[::2]


def test_two_calls_without_a_seed_differ_and_with_one_agree(sampler):
    draw = lambda **options: sampler(PROMPTS, 8, temperature=1.0, **options)
    free = [draw() for _ in range(3)]
    assert ids(free[0]) != ids(free[1]) != ids(free[2])
    assert ids(draw(seed=free[0].seed)) == ids(free[0])
    assert ids(draw(seed=5)) == ids(draw(seed=5)) != ids(draw(seed=6))


def test_equal_prompts_draw_differently_and_so_do_generations(sampler):
    out = ids(sampler(["a", "a"], 8, temperature=1.0, num_generations=2, seed=0))
    assert len({tuple(t) for t in out}) == 4


def test_draws_do_not_depend_on_the_engine_or_on_the_batch(tokenizer, sampler):
    options = {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2, "min_tokens": 2, "seed": 3}
    other = Sampler(tiny_model(), tokenizer, rollout_engine="hf")
    whole = ids(sampler(PROMPTS, 8, **options))
    assert ids(other(PROMPTS, 8, **options)) == whole
    assert ids(sampler(PROMPTS[:1], 8, **options)) == whole[:1]
    parts = [
        c.tokens.tolist()
        for i in range(4)
        for g in sampler.sample(
            sampler.encode(PROMPTS)[i : i + 1],
            sampler.sampling(max_tokens=8, **{k: v for k, v in options.items() if k != "seed"}),
            seed=3,
            first=i,
        )
        for c in g.completions
    ]
    assert parts == whole


def test_a_call_is_what_the_cluster_generates(sampler):
    c = tunix_cluster(rollout={"temperature": 0.0, "return_logprobs": True})
    theirs, mine = c.generate(PROMPTS), sampler(PROMPTS, 8, return_logprobs=True)
    assert ids(theirs) == ids(mine) and theirs.text == mine.text
    assert all(np.array_equal(a, b) for a, b in zip(theirs.logprobs, mine.logprobs))
    assert np.array_equal(theirs.left_padded_prompt_tokens, mine.padded_prompt_tokens)


def test_chats_take_the_template_and_texts_where_asked(sampler):
    chat, asked, plain = sampler(CHAT, 4), sampler("hi", 4, apply_chat_template=True), sampler("hi", 4)
    assert np.array_equal(chat.padded_prompt_tokens, asked.padded_prompt_tokens)
    assert plain.padded_prompt_tokens.tolist() == [[104, 105]]
    assert len(sampler([CHAT, CHAT], 4).text) == 2


def test_echo_puts_the_prompt_before_text_and_tokens(sampler):
    plain, echoed = sampler(PROMPTS, 6, return_logprobs=True), sampler(PROMPTS, 6, echo=True, return_logprobs=True)
    assert ids(echoed) == [[*p.encode(), *t] for p, t in zip(PROMPTS, ids(plain))]
    assert [t.startswith(p) for t, p in zip(echoed.text, PROMPTS)] == [True] * 4
    assert all(np.array_equal(a, b) for a, b in zip(plain.logprobs, echoed.logprobs))


def test_padded_output_is_rectangular(sampler):
    options = {
        "temperature": 1.0,
        "seed": 2,
        "return_logprobs": True,
        "return_logits": True,
        "eos_tokens": range(0, 200, 3),
    }
    plain, padded = sampler(PROMPTS, 12, **options), sampler(PROMPTS, 12, pad_output=True, **options)
    lengths = [len(t) for t in plain.tokens]
    assert len(set(lengths)) > 1
    assert padded.tokens.shape == padded.logprobs.shape == padded.logits.shape[:2] == (4, max(lengths))
    for i, n in enumerate(lengths):
        assert padded.tokens[i, :n].tolist() == plain.tokens[i].tolist() and set(padded.tokens[i, n:]) <= {PAD}
        assert np.array_equal(padded.logprobs[i, :n], plain.logprobs[i]) and not padded.logprobs[i, n:].any()
        assert np.array_equal(padded.logits[i, :n], plain.logits[i])


def test_logprobs_are_of_the_distribution_drawn_from_not_of_the_full_one(sampler):
    out = sampler(PROMPTS, 8, temperature=0.7, top_k=3, seed=0, return_logprobs=True, return_logits=True)
    for tokens, logprobs, logits in zip(out.tokens, out.logprobs, out.logits):
        scores = torch.from_numpy(logits) / 0.7
        scores = scores.masked_fill(scores < scores.topk(3).values[:, -1:], -torch.inf)
        expected = scores.log_softmax(-1).gather(1, torch.from_numpy(tokens).long()[:, None])[:, 0]
        assert np.abs(expected.numpy() - logprobs).max() < 1e-4


def test_stops_end_a_completion_and_stay(sampler):
    free = sampler("what?", 8)
    token, string = int(free.tokens[0][3]), free.text[0][2:4]
    by_id = sampler("what?", 8, eos_tokens=[token])
    assert ids(by_id)[0] == ids(free)[0][: ids(free)[0].index(token) + 1] and by_id.finish_reason == ["stop"]
    by_string = sampler("what?", 8, stop=string)
    assert by_string.text[0].endswith(string) and by_string.finish_reason == ["stop"]
    assert sampler("what?", 3).finish_reason == ["length"]


def test_forbidden_tokens_are_never_drawn(sampler):
    top = {t for row in ids(sampler(PROMPTS, 8)) for t in row}
    assert not {t for row in ids(sampler(PROMPTS, 8, forbidden_tokens=sorted(top))) for t in row} & top


def test_a_batch_of_one_is_not_cut(sampler):
    assert ids(sampler(["what?"], 20)) == ids(sampler(PROMPTS, 20))[1:2]


def test_a_long_prompt_raises_or_keeps_its_end(sampler):
    with pytest.raises(DataError, match="has 6 tokens, over max_prompt_length 4"):
        sampler("abcdef", 4, max_prompt_length=4)
    cut = sampler("abcdef", 4, max_prompt_length=4, on_long_prompt="truncate_left")
    assert ids(cut) == ids(sampler("cdef", 4))
    with pytest.raises(ConfigError, match="unknown on_long_prompt 'drop'"):
        sampler("abcdef", 4, on_long_prompt="drop")


def test_without_a_length_a_completion_takes_what_the_model_leaves(tokenizer):
    model = tiny_model(max_position_embeddings=20)
    for engine in ("embedded", "hf"):
        out = Sampler(model, tokenizer, rollout_engine=engine)("abcdef", eos_tokens=[1])
        assert [len(t) for t in out.tokens] == [14] and out.finish_reason == ["length"]
    with pytest.raises(DataError, match="prompt 1 has 6 tokens; with 15 new ones that is 21, over the limit of 20"):
        Sampler(model, tokenizer)(["a", "abcdef"], 15)
    with pytest.raises(DataError, match="prompt 0 has 30 tokens"):
        Sampler(model, tokenizer)("x" * 30)


def test_each_prompt_of_a_call_has_its_own_room(tokenizer):
    model = tiny_model(max_position_embeddings=20)
    for engine in ("embedded", "hf"):
        sampler = Sampler(model, tokenizer, rollout_engine=engine)
        out = sampler(["abcdef", "ab"], eos_tokens=[1], temperature=1.0, num_generations=2, seed=1)
        assert [len(t) for t in out.tokens] == [14, 14, 18, 18]


def test_a_cache_size_bounds_prompt_and_completion_together(tokenizer):
    small = Sampler(tiny_model(), tokenizer, 12)
    assert len(small("abcdef", eos_tokens=[1]).tokens[0]) == 6
    with pytest.raises(ValueError, match="over the limit of 12;"):
        small("abcdef", 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_p": 0.9}, "temperature=0.0 takes the likeliest token, so top_p=0.9 would do nothing"),
        ({"num_generations": 2}, "2 generations would all be the same"),
        ({"temperature": 1.0, "top_kk": 3}, "unknown sampling option 'top_kk'; did you mean top_k"),
        ({"max_new_tokens": 3}, r"unknown sampling option 'max_new_tokens'; did you mean max_tokens\?"),
        ({"n": 3}, r"'n'; did you mean num_generations\?"),
        ({"temperature": -1.0}, "temperature must not be negative"),
        ({"beam_size": 2, "temperature": 1.0}, "num_beams=2 searches, it does not draw"),
        ({"beam_size": 2, "top_p": 0.5}, "top_p=0.5 would do nothing"),
        ({"beam_size": 2, "generation_kwargs": {"num_beams": 3}}, "are the same option; keep one"),
        ({"generation_kwargs": {"num_bemas": 3}}, "did you mean num_beams"),
    ],
)
def test_what_contradicts_itself_is_refused(sampler, options, words):
    with pytest.raises(ConfigError, match=words):
        sampler(PROMPTS, 4, **options)
    with pytest.raises(EngineError, match="generation 2, but num_beams=2"):
        sampler(PROMPTS, 4, beam_size=2, num_generations=3)


def test_nothing_to_complete_is_an_error(sampler):
    with pytest.raises(DataError, match="no prompts"):
        sampler([], 4)


def test_a_model_that_takes_no_layout_runs_on_hf_with_the_reason(tokenizer, caplog):
    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=264, hidden_size=32, n_layer=1, n_head=2))
    s = Sampler(bloom, tokenizer)
    assert "using 'hf'" in caplog.text and type(s.engine(s.sampling())).__name__ == "HFEngine"
    assert len(s("ab", 3).tokens[0]) <= 3 and s.longest is None


def test_a_folder_is_loaded_without_gradients_and_a_module_is_left_as_it_is(model_folder, tokenizer, tmp_path):
    s = Sampler(model_folder)
    assert ids(s(PROMPTS, 8)) == ids(Sampler(tiny_model(), tokenizer)(PROMPTS, 8))
    assert not any(p.requires_grad for p in s.loaded.module.parameters())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "final").symlink_to(model_folder)
    assert ids(Sampler(tmp_path / "run")(PROMPTS, 8)) == ids(s(PROMPTS, 8))
    model = tiny_model()
    Sampler(model, tokenizer)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    with pytest.raises(ConfigError, match="a module has no tokenizer"):
        Sampler(model)
    with pytest.raises(ConfigError, match=r"can.t|no tokenizer at"):
        Sampler("nothing")
    (tmp_path / "final").mkdir()
    with pytest.raises(ConfigError, match=r"there is no folder .*finel, and it is not .*did you mean final"):
        Sampler(tmp_path / "finel")


def test_another_state_is_taken_whole_or_not_at_all(tokenizer):
    s, other = Sampler(tiny_model(), tokenizer), tiny_model(seed=1)
    before = ids(s(PROMPTS, 8))
    s.transformer_state = other.state_dict()
    assert ids(s(PROMPTS, 8)) == ids(Sampler(other, tokenizer)(PROMPTS, 8)) != before
    state = dict(tiny_model().state_dict())
    name = "model.norm.weight"
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is missing"):
        s.transformer_state = {k: v for k, v in state.items() if k != name}
    with pytest.raises(ConfigError, match=r"model.norm.weight is torch.float64 \[32\], not torch.float32"):
        s.transformer_state = {**state, name: state[name].double()}
    assert ids(s(PROMPTS, 8)) == ids(Sampler(other, tokenizer)(PROMPTS, 8))


def test_streamed_pieces_are_the_completion(sampler):
    (prompt,) = sampler.encode("what?")
    sampling = sampler.sampling(max_tokens=8, temperature=1.0)
    pieces = list(sampler.stream(prompt, sampling, seed=4))
    assert [t for p in pieces for t in p.tokens.tolist()] == ids(sampler("what?", 8, temperature=1.0, seed=4))[0]
    assert pieces[-1].finish_reason in ("stop", "length")


@pytest.mark.parametrize("options", [{"beam_size": 2}, {"generation_kwargs": {"top_h": 0.4}, "temperature": 1.0}])
def test_a_constraint_is_kept_alone_and_refused_beside_options(sampler, options):
    digits = {"constraint": {"regex": "[0-9]{4}"}}
    out = sampler(["a", "b"], 8, temperature=1.0, num_generations=4, **digits)
    assert all(t.isdigit() and len(t) == 4 for t in out.text)
    with pytest.raises(ConfigError, match="do not go together with a constraint"):
        sampler("a", 8, **digits, **options)

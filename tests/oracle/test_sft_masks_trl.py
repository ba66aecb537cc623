"""Tokens and masks of conversations against TRL's: its training templates mark what the assistant says, and whet finds
it by turns in the models' own templates.
"""

from pathlib import Path

import pytest
from chat_templates import said, tokenizer_with, user

from whet.data.supervised import SFTEncoder

trl = pytest.importorskip("trl")

FOLDER = Path(trl.__file__).parent / "chat_templates"
TALK = [user("Hi, a b?"), said("It is here."), user("and 2?"), said("4")]
SAME = [
    "cohere", "cohere2", "diffusion_gemma", "gemma", "gemma3", "lfm2", "lfm2_v2", "llama3", "qwen2_5_vl",
    "qwen3_instruct_2507", "qwen3_vl",
]  # fmt: skip
HEADER_MARKED = ["muse_glimmer", "nemotron_3_nano", "qwen2_5", "qwen3_8"]
"""TRL trains part of the last turn's header too, which the model is given when it is asked: whet does not."""
FORKED = ["gptoss", "phi3", "qwen3", "qwen3_5_think"]
"""Models' templates that show an earlier turn otherwise than it was said; TRL's training templates don't."""


def ours(name):
    made = SFTEncoder(tokenizer_with((FOLDER / f"{name}.jinja").read_text()))({"messages": TALK})
    return [
        ([*s.prefix.tolist(), *s.tokens.tolist()], [*[0] * len(s.prefix), *map(int, s.mask)]) for s in made.sequences
    ]


def theirs(name):
    tokenizer = tokenizer_with((FOLDER / f"{name}_training.jinja").read_text())
    options = {"return_dict": True, "return_assistant_tokens_mask": True, "enable_thinking": False}
    made = tokenizer.apply_chat_template(TALK, **options)
    return made["input_ids"], made["assistant_masks"]


@pytest.mark.parametrize("name", SAME + HEADER_MARKED)
def test_turns_found_by_rendering_are_those_that_trl_s_templates_mark(name):
    ((ids, mask),) = ours(name)
    expected, marked = theirs(name)
    assert ids == expected
    if name in SAME:
        assert mask == marked
    else:
        assert sum(marked) > sum(mask) and all(m <= t for m, t in zip(mask, marked, strict=True))


@pytest.mark.parametrize("name", FORKED)
def test_templates_that_rewrite_earlier_turns_fork(name):
    made = ours(name)
    assert len(made) == 2 and all(sum(mask) for _, mask in made)

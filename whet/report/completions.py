"""A file of completions as the report's page reads it: groups of a prompt, with each token's text and logprob."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

from whet.storage.completions import read_completions

__all__ = ["TokenTexts", "chunk", "load_token_texts", "split_chunk"]

SCALE = 100
"""Logprobs (without their sign), entropies and the logarithms of ratios are written as whole hundredths of a nat."""
INLINE_CHARACTERS, LEAST_CHARACTERS, PART_CHARACTERS = 4_000_000, 2_000, 400_000
"""Of the texts of a step: about how many come with it, at least how many of each text, and how many in a later part."""
_OF_TOKENS = ("len", "lp", "ratio", "ent", "adv", "vs")
"""Keys of an item whose lists have an entry for each token."""
_TOKENIZERS = ("final", "checkpoints/*/actor", "start")
"""Where a run folder may hold tokenizer.json."""


class TokenTexts:
    """The text of each token of a sequence, such that they add up to the text of the whole.

    Args: decode: ids -> text, special tokens included.

    A token that holds a part of a character has no text of its own: the first token of the character shows it whole.

    >>> TokenTexts(lambda ids: bytes(ids).decode("utf-8", "replace"))([72, 105, 0xC3, 0xA9])
    ['H', 'i', 'é', '']
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._texts: dict[int, str | None] = {}

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        """The texts of tokens. Args: tokens [S]: ids."""
        texts: list[str] = []
        for has_text, ids in groupby(tokens, key=lambda t: self._text(t) is not None):
            run = list(ids)
            texts += [self._text(t) or "" for t in run] if has_text else [self._decode(run), *[""] * (len(run) - 1)]
        return texts

    def _text(self, token: int) -> str | None:
        """A token's text; None if it is a part of a character.

        It is decoded after itself, since a first token may lose its leading space.
        """
        if token not in self._texts:
            once = self._decode([token])
            twice = self._decode([token, token])
            text = twice[len(once) :] if twice.startswith(once) else once
            self._texts[token] = None if "\N{REPLACEMENT CHARACTER}" in text else text
        return self._texts[token]


def load_token_texts(run: str | Path, model: Any = None) -> TokenTexts | None:
    """Loads the tokenizer of a run folder, or of the model that its configuration names.

    Args: run: the run folder. model: actor.model, used if it is a folder.
    Returns: None if there is no tokenizer.json that can be read; completions are then shown without their tokens.
    """
    from tokenizers import Tokenizer

    folders = [path for pattern in _TOKENIZERS for path in sorted(Path(run).glob(pattern), reverse=True)]
    for folder in [*folders, *([Path(model)] if isinstance(model, str) else [])]:
        if (path := folder / "tokenizer.json").is_file():
            try:
                decode = Tokenizer.from_file(str(path)).decode
            except Exception:  # the library raises Exception itself for a damaged file
                continue
            return TokenTexts(partial(decode, skip_special_tokens=False))
    return None


def chunk(path: Path, token_texts: TokenTexts | None) -> dict[str, Any]:
    """A file of completions, ready for the page.

    Args: path: a file of RunFolder.write_completions. token_texts: None = completions without their tokens.
    Returns: `functions`, the names of the reward functions; `groups`, each with `row`, `prompt` and `items`. An item
        has `g` (generation), `r` (reward), `f` (a reward for each function), `a` (advantage), `end` (finish reason),
        `v` (version), `n` (tokens), `text`, `info`, `s` (seconds by phase), and, with token texts, `tokens` (their text
        end to end; absent if it is `text`), `len` (UTF-16 units of each token) and numbers of each token, null where
        unknown or not sampled by the model: `lp` (logprob), `ratio` (log of trainer / sampler), `ent` (entropy), see
        SCALE; `adv` (advantage, absent if all are equal) and `vs` (versions, absent if all are `v`).
    Raises: CheckpointError: the file can't be read.
    """
    columns, rewards = read_completions(path)
    functions = list(rewards)
    prompts = columns.get("prompt_text") or columns["prompt"]
    groups: list[dict[str, Any]] = []
    previous: tuple[int, int] | None = None
    for i, (row, generation) in enumerate(zip(columns["row"], columns["generation"], strict=True)):
        if previous is None or row != previous[0] or generation <= previous[1]:
            groups.append({"row": row, "prompt": prompts[i] or columns["prompt"][i], "items": []})
        previous = (row, generation)
        item = _item(columns, i)
        item["f"] = [_number(rewards[name][i]) for name in functions]
        if token_texts is not None:
            item |= _tokens(columns, i, token_texts, item["text"])
        groups[-1]["items"].append(item)
    return {"functions": functions, "groups": groups}


def split_chunk(found: dict[str, Any], inline: int = INLINE_CHARACTERS) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Takes the ends of long texts out of a `chunk`, so that the page loads them when they are looked at.

    Args: found: is changed. inline: about how many characters of all texts stay.
    Returns: the chunk, and its parts: each continues the text, the tokens and their lists of one item. The item has the
        numbers of its parts as `rest` = [first, end], and `size`, the UTF-16 units of its whole text.

    >>> items = [{"text": "a" * 5000}, {"text": "b"}]
    >>> short, parts = split_chunk({"groups": [{"items": items}]}, inline=6000)
    >>> [(len(i["text"]), i.get("rest")) for i in items], [len(part["text"]) for part in parts]
    ([(3000, [0, 1]), (1, None)], [2000])
    """
    items = [item for group in found["groups"] for item in group["items"]]
    limit = max(LEAST_CHARACTERS, inline // max(1, len(items)))
    parts: list[dict[str, Any]] = []
    for item in items:
        size = max(len(item["text"]), len(item.get("tokens", "")))
        if size > limit:
            first, *rest = _cut(item, limit)
            item.update(first, rest=[len(parts), len(parts) + len(rest)], size=len(_utf16(_shown(item))) // 2)
            parts += rest
    return found, parts


def _cut(item: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """The pieces of an item's text, tokens and lists. No token is cut. Args: limit: of the first, in UTF-16 units."""
    text = _utf16(_shown(item))
    bounds = [limit, *range(limit + PART_CHARACTERS, len(text) // 2, PART_CHARACTERS)]
    pieces: list[dict[str, Any]] = [{} for _ in range(len(bounds) + 1)]
    if "len" in item:
        ends = list(accumulate(item["len"]))
        cuts = [bisect_right(ends, bound) for bound in bounds]
        bounds = [ends[cut - 1] if cut else 0 for cut in cuts]
        for name in _OF_TOKENS:
            for piece, values in zip(pieces, _pieces(item.get(name, []), cuts), strict=True):
                piece.update({name: values} if name in item else {})
    for piece, part in zip(pieces, _pieces(text, [2 * bound for bound in bounds]), strict=True):
        piece["tokens" if "tokens" in item else "text"] = part.decode("utf-16-le", "surrogatepass")
    if "tokens" in item:  # their text is another one, which is cut anywhere
        for piece, part in zip(pieces, _pieces(item["text"], bounds), strict=True):
            piece["text"] = part
    return pieces


def _shown(item: Mapping[str, Any]) -> str:
    return item.get("tokens", item["text"])


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-le", "surrogatepass")


def _pieces(values: Any, cuts: Sequence[int]) -> list[Any]:
    """A sequence cut at these places."""
    return [values[a:b] for a, b in pairwise([0, *cuts, len(values)])]


def _item(columns: Mapping[str, Sequence[Any]], i: int) -> dict[str, Any]:
    item = {
        "g": columns["generation"][i],
        "r": _number(columns["reward"][i]),
        "a": _number(columns["advantage"][i]) if "advantage" in columns else None,
        "end": columns["finish_reason"][i],
        "v": columns["version"][i],
        "n": len(columns["tokens"][i]),
        "text": columns["completion"][i] or "",
    }
    for short, name in (("info", "info"), ("s", "seconds")):
        if text := columns[name][i] if name in columns else None:
            item[short] = json.loads(text)
    return item


def _tokens(columns: Mapping[str, Sequence[Any]], i: int, token_texts: TokenTexts, text: str) -> dict[str, Any]:
    texts = token_texts(columns["tokens"][i])
    whole = "".join(texts)
    value = lambda name: columns[name][i] if name in columns else None
    versions, logprobs, trainer, advantages = map(value, ("versions", "logprobs", "trainer_logprobs", "advantages"))
    sampled = [v >= 0 for v in versions] if versions else [True] * len(texts)
    found: dict[str, Any] = {
        "len": [len(t.encode("utf-16-le", "surrogatepass")) // 2 for t in texts],
        "lp": _hundredths([-p for p in logprobs], sampled) if logprobs else [None] * len(texts),
    }
    if trainer and logprobs:
        found["ratio"] = _hundredths([new - old for new, old in zip(trainer, logprobs, strict=True)], sampled)
    if entropy := value("entropy"):
        found["ent"] = _hundredths(entropy, sampled)
    if advantages and len({a for a in advantages if not math.isnan(a)}) > 1:
        found["adv"] = [_number(a) for a in advantages]
    if versions and len(set(versions) - {-1}) > 1:
        found["vs"] = versions
    return found if whole == text else {**found, "tokens": whole}


def _hundredths(values: Sequence[float], sampled: Sequence[bool]) -> list[int | None]:
    return [round(v * SCALE) if s and math.isfinite(v) else None for v, s in zip(values, sampled, strict=True)]


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")

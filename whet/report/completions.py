"""A file of completions as the report's page reads it: an index, by which the page sorts and filters, and parts.

The index has the numbers of each completion; the parts have the texts of prompts and completions, with what is known of
each token, and the page loads those that it draws. So a step of 100,000 completions, or a transcript of 100 MB, opens
as fast as a small one.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from whet.storage.completions import REWARD, iter_completions

__all__ = ["TokenTexts", "load_token_texts", "prompt_means", "step_scripts"]

SCALE = 100
"""Logprobs (without their sign), entropies and the logarithms of ratios are written as whole hundredths of a nat."""
SEGMENT = 20_000
"""Characters of a completion that the page draws at once; a longer one is several segments."""
PART = 200_000
"""Characters of a part, about: what the page loads at once."""
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
        """Returns the texts of tokens. Args: tokens [S]: ids."""
        texts: list[str] = []
        for has_text, ids in groupby(tokens, key=lambda t: self._text(t) is not None):
            run = list(ids)
            texts += [self._text(t) or "" for t in run] if has_text else [self._decode(run), *[""] * (len(run) - 1)]
        return texts

    def _text(self, token: int) -> str | None:
        """Returns a token's text; None if it is a part of a character.

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


def step_scripts(path: Path, token_texts: TokenTexts | None) -> Iterator[tuple[str, str]]:
    """Yields a file of completions as texts for the page, one after the other.

    Args: path: a file of RunFolder.write_completions. token_texts: None = completions without their tokens.
    Yields: (".0", a part), (".1", the next part) ..., and at last ("", the index).
    Raises: CheckpointError: the file can't be read.

    The index is JSON, and a part is lines of JSON, a segment each, so that the page reads those alone that it draws.
    For each group there is a segment with its `prompt`, and then for each completion one or more, with `t` (text), and
    in the first of them `g` (generation), `v` (version), `info` and `s` (seconds by phase). With token texts a segment
    has `k` (the tokens' text, if it is not `t`), `len` (UTF-16 units of each token) and numbers of each token, null
    where unknown or not sampled by the model: `lp` (logprob), `ratio` (log of trainer / sampler), `ent` (entropy), see
    SCALE; `adv` (advantage, absent if all are equal) and `vs` (versions, absent if all are `v`).

    The index has, of each group, `rows` and `sizes` (completions); of each completion `r` (reward), `f` (for each of
    `functions` a column of rewards), `a` (advantage), `n` (tokens) and `end` (finish reason, as a number in `ends`),
    columns of bytes in base64: floats, NaN where there is none, but 32-bit integers in `n` and bytes in `end`; and
    `segments` (how many; null = one each); and `parts`, the number of the first segment of each part.
    """
    index = _Index()
    held: list[str] = []
    size = count = 0
    for segment in _segments(path, token_texts, index):
        text = json.dumps(segment, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        if not held:
            index.parts.append(count)
        held.append(text)
        size, count = size + len(text), count + 1
        if size >= PART:
            yield f".{len(index.parts) - 1}", "\n".join(held)
            held, size = [], 0
    if held:
        yield f".{len(index.parts) - 1}", "\n".join(held)
    yield "", json.dumps(index.value(), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def prompt_means(path: Path) -> list[float]:
    """Returns the mean reward of each group of a file of completions, of those that have one.

    Raises: CheckpointError: the file can't be read.
    """
    groups: list[list[float]] = []
    for begins, row in _in_groups(iter_completions(path, ["row", "generation", "reward"])):
        if begins:
            groups.append([])
        if (reward := _number(row["reward"])) is not None:
            groups[-1].append(reward)
    return [sum(rewards) / len(rewards) for rewards in groups if rewards]


_KINDS = {"r": "<f4", "a": "<f4", "n": "<i4", "end": "u1"}
"""Columns of the index, and their numbers' type."""


class _Index:
    """What `step_scripts` yields at last, as it grows."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.sizes: list[int] = []
        self.parts: list[int] = []
        self._segments: list[int] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in _KINDS}
        self._functions: dict[str, list[float | None]] = {}
        self._ends: dict[str, int] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a completion, of one segment, to the last group."""
        self.sizes[-1] += 1
        self._segments.append(1)
        end = self._ends.setdefault(row["finish_reason"], len(self._ends))
        values = (_number(row["reward"]), _number(row.get("advantage")), len(row["tokens"]), end)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        for name, value in row.items():
            if name.startswith(REWARD):
                self._functions.setdefault(name.removeprefix(REWARD), []).append(_number(value))

    def add_segment(self) -> None:
        """Adds a segment to the last completion."""
        self._segments[-1] += 1

    def value(self) -> dict[str, Any]:
        """Returns the index, JSON-able."""
        functions = [_base64(values, "<f4") for values in self._functions.values()]
        rewards = {"functions": list(self._functions), "f": functions, "ends": list(self._ends)}
        segments = self._segments if any(n > 1 for n in self._segments) else None
        groups = {"rows": self.rows, "sizes": self.sizes, "parts": self.parts, "segments": segments}
        return {**rewards, **groups, **{name: _base64(self._columns[name], kind) for name, kind in _KINDS.items()}}


def _base64(values: Sequence[float | None], kind: str) -> str:
    return base64.b64encode(np.asarray(values, kind).tobytes()).decode()


def _in_groups(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[bool, Mapping[str, Any]]]:
    """Yields whether a row begins a group, and the row. A prompt that comes twice in a step is two groups."""
    previous: tuple[int, int] | None = None
    for row in rows:
        yield previous is None or row["row"] != previous[0] or row["generation"] <= previous[1], row
        previous = (row["row"], row["generation"])


def _segments(path: Path, token_texts: TokenTexts | None, index: _Index) -> Iterator[dict[str, Any]]:
    for begins, row in _in_groups(iter_completions(path)):
        if begins:
            index.rows.append(row["row"])
            index.sizes.append(0)
            yield {"prompt": row.get("prompt_text") or row["prompt"]}
        index.add(row)
        columns: dict[str, Any] = {"g": row["generation"], "v": row["version"]}
        for short, name in (("info", "info"), ("s", "seconds")):
            if text := row.get(name):
                columns[short] = json.loads(text)
        for i, segment in enumerate(_of_text(row) if token_texts is None else _of_tokens(row, token_texts)):
            if i > 0:
                index.add_segment()
            yield segment if i > 0 else {**columns, **segment}


def _of_text(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    text = row["completion"] or ""
    for start in range(0, len(text) or 1, SEGMENT):
        yield {"t": text[start : start + SEGMENT]}


def _of_tokens(row: Mapping[str, Any], token_texts: TokenTexts) -> Iterator[dict[str, Any]]:
    text, texts = row["completion"] or "", token_texts(row["tokens"].tolist())
    whole, ends = "".join(texts), np.cumsum([len(t) for t in texts], dtype=np.int64)
    numbers = _token_numbers(row, len(texts))
    first, start = 0, 0
    while first == 0 or first < len(texts):
        after = min(len(texts), int(np.searchsorted(ends, start + SEGMENT)) + 1)
        end = int(ends[after - 1]) if texts else 0
        part, own = text[start : end if after < len(texts) else None], whole[start:end]
        lengths = [
            len(t) if t.isascii() else len(t.encode("utf-16-le", "surrogatepass")) // 2 for t in texts[first:after]
        ]
        segment = {"t": part, "len": lengths, **{name: of(first, after) for name, of in numbers.items()}}
        yield segment if own == part else {**segment, "k": own}
        first, start = after or 1, end


def _token_numbers(row: Mapping[str, Any], count: int) -> dict[str, Callable[[int, int], list[Any]]]:
    """Returns what is known of the tokens: the name on the page -> the values of tokens first to after."""
    logprobs, trainer, entropy, advantages, versions = map(
        row.get, ("logprobs", "trainer_logprobs", "entropy", "advantages", "versions")
    )
    sampled = np.ones(count, bool) if versions is None else versions >= 0
    hundredths = lambda values: lambda first, after: _hundredths(values[first:after], sampled[first:after])
    numbers: dict[str, Callable[[int, int], list[Any]]] = {
        "lp": hundredths(np.full(count, math.nan) if logprobs is None else -logprobs)
    }
    if trainer is not None and logprobs is not None:
        numbers["ratio"] = hundredths(trainer.astype(float) - logprobs)
    if entropy is not None:
        numbers["ent"] = hundredths(entropy)
    if advantages is not None and len(np.unique(advantages[~np.isnan(advantages)])) > 1:
        numbers["adv"] = lambda first, after: [_number(a) for a in advantages[first:after].tolist()]
    if versions is not None and len(np.unique(versions[sampled])) > 1:
        numbers["vs"] = lambda first, after: versions[first:after].tolist()
    return numbers


def _hundredths(values: np.ndarray, sampled: np.ndarray) -> list[int | None]:
    scaled = np.rint(values.astype(float) * SCALE)
    known = sampled & np.isfinite(scaled)
    hundredths: list[int | None] = np.where(known, scaled, 0).astype(np.int64).tolist()
    for i in np.flatnonzero(~known).tolist():
        hundredths[i] = None
    return hundredths


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")

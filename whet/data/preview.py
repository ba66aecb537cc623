r"""Shows rows as the model reads them: the text with special tokens, its trained parts, and the sources of the chat
template and the system prompt.

A line of text starts with `|`, or with `+` if it is trained. A line feed is shown as \n; a line without it continues in
the next line.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whet.data.prompts import PromptEncoder
from whet.data.row_schema import message_text, template_options
from whet.data.supervised import RowEncoder
from whet.data.templates import ChatTemplate
from whet.data.text_parts import decode_ids
from whet.errors import DataError
from whet.types import Example, Message, Prompt, TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["example_lines", "prompt_lines", "text_lines"]

WIDTH = 74
"""Characters per line: the 80 of a terminal, less the mark before them."""
MAX_LINES = 24
"""The most lines of a text."""


def prompt_lines(encode: PromptEncoder, prompt: Prompt, *, width: int = WIDTH, most: int = MAX_LINES) -> list[str]:
    r"""Returns a prompt as the model reads it.

    Args: encode: its encoder. prompt: the prompt. width: characters per line. most: the most lines of the text.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> encode = PromptEncoder(byte_tokenizer())
    >>> for line in prompt_lines(encode, encode({"prompt": [{"role": "user", "content": "2+2?"}]}, 3)):
    ...     print(line)
    row 3: 23 tokens
      | <|im_start|>user\n
      | 2+2?<|im_end|>\n
      | <|im_start|>assistant\n
      chat template: from the tokenizer
      system prompt: none
    """
    heading = f"row {prompt.row}: {len(prompt.tokens)} tokens"
    text = [(decode_ids(encode.tokenizer, prompt.tokens), False)]
    lines = text_lines(text, width=width, most=most, tokens=_special_tokens(encode.tokenizer))
    if encode.is_plain(prompt.source):
        return [heading, *lines, "  plain text, without a chat template"]
    options = template_options(prompt.columns, prompt.row)
    messages = encode.messages(prompt.source)
    has_own_system = not isinstance(prompt.source, str) and prompt.source[0]["role"] == "system"
    return [
        heading,
        *lines,
        *_origins(encode.template, messages, has_own_system, options, "rollout.chat_template_kwargs", prompt.row),
    ]


def example_lines(
    encode: RowEncoder, example: Example, row: Mapping[str, Any], *, width: int = WIDTH, most: int = MAX_LINES
) -> list[str]:
    """Returns the sequences of a row of supervised training, with their trained parts.

    Args: encode: its encoder. example: the encoded row. row: the row. width, most: see `prompt_lines`.

    >>> from whet.data.supervised import SFTEncoder
    >>> from whet.data.tokenizer import byte_tokenizer
    >>> encode, row = SFTEncoder(byte_tokenizer()), {"prompt": "2+2=", "response": "4"}
    >>> for line in example_lines(encode, encode(row), row):
    ...     print(line)
    row 0: 6 tokens, 2 trained (lines with +)
      | 2+2=
      + 4<|im_end|>
      plain text, without a chat template
    """
    lines = []
    for name, sequence in zip(_names(example), example.sequences, strict=True):
        count = len(sequence.prefix) + len(sequence.tokens)
        trained = int(sequence.mask.sum())
        lines.append(f"row {example.row}{name}: {count} tokens, {trained} trained (lines with +)")
        tokens = _special_tokens(encode.tokenizer)
        lines += text_lines(_parts(encode.tokenizer, sequence), width=width, most=most, tokens=tokens)
    messages = encode.conversation(row, example.row)
    if messages is None:
        return [*lines, "  plain text, without a chat template"]
    has_own_system = messages[0]["role"] == "system"
    options = template_options(row, example.row)
    if encode.data.system_prompt and not has_own_system:
        messages = [{"role": "system", "content": encode.data.system_prompt}, *messages]
    return [
        *lines,
        *_origins(encode.template, messages, has_own_system, options, "data.chat_template_kwargs", example.row),
    ]


def text_lines(
    parts: Sequence[tuple[str, bool]], *, width: int = WIDTH, most: int = MAX_LINES, tokens: Collection[str] = ()
) -> list[str]:
    r"""Returns lines of a text. A longer line is broken behind a blank where it has one, and in a word otherwise.

    Args:
        parts: (text, whether it is trained).
        width: characters of a line.
        most: the most lines; lines in the middle are left out.
        tokens: special tokens, which are not broken.

    >>> text_lines([("a\nb\t", False), ("c", True)])
    ['  | a\\n', '  | b\\t', '  + c']
    >>> text_lines([("abc<end>", False), ("an answer", True)], width=6, tokens=["<end>"])
    ['  | abc', '  | <end>', '  + an ', '  + answer']
    """
    special = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    units = re.compile(f"{special}|." if special else ".", re.DOTALL)
    lines = []
    for text, trained in parts:
        for line in text.splitlines(keepends=True):
            pieces, blank = [""], 0  # blank: the place behind the last blank of the last piece
            for unit in units.findall(line):
                shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in unit)
                if (piece := pieces[-1]) and len(piece) + len(shown) > width:
                    end = blank if blank and len(piece) - blank + len(shown) <= width else len(piece)
                    pieces[-1:], blank = [piece[:end], piece[end:]], 0
                pieces[-1] += shown
                blank = len(pieces[-1]) if unit == " " else blank
            lines += [f"  {'+' if trained else '|'} {piece}" for piece in pieces]
    if len(lines) <= most:
        return lines
    last = most // 3
    return [*lines[: most - last], f"  ... {len(lines) - most} lines left out ...", *lines[-last:]]


def _parts(tokenizer: PreTrainedTokenizerBase, sequence: TrainSequence) -> list[tuple[str, bool]]:
    """Returns the text of a sequence, split at the borders of its trained parts."""
    ids = [*sequence.prefix.tolist(), *sequence.tokens.tolist()]
    mask = [*[False] * len(sequence.prefix), *sequence.mask.tolist()]
    ends = [place for place in range(1, len(ids)) if mask[place] != mask[place - 1]] + [len(ids)]
    parts, before = [], ""
    for end in ends:  # decoded from the start, because the first token of a text may be decoded differently
        text = decode_ids(tokenizer, ids[:end])
        parts.append((text[len(before) :], mask[end - 1]))
        before = text
    return parts


def _special_tokens(tokenizer: Any) -> list[str]:
    """Returns the tokens that were added to the vocabulary, including special tokens."""
    return list(tokenizer.get_added_vocab())


def _names(example: Example) -> list[str]:
    """Returns names that distinguish the sequences of a row."""
    count = len(example.sequences)
    if "chosen" in example.columns and count == 2:
        return [", chosen", ", rejected"]
    if "label" in example.columns and len(example.columns["label"]) == count:
        return [f", {'good' if label else 'bad'}" for label in example.columns["label"]]
    return [""] if count == 1 else [f", sequence {n + 1} of {count}" for n in range(count)]


def _origins(
    template: ChatTemplate,
    messages: list[Message],
    has_own_system: bool,
    options: Mapping[str, Any],
    key: str,
    row: int,
) -> list[str]:
    """Returns names the sources of the template, the system prompt, the tools and the thinking.

    Args: messages: with the configured system prompt. has_own_system: the row has a system turn. options: the row's
        arguments of the template. key: the configuration key of the arguments for all rows.
    """
    source = "a column of the row" if "chat_template" in options else key
    origin = source if "chat_template" in {**template.options, **options} else "the tokenizer"
    asks = messages[-1]["role"] != "assistant"

    def render(**changed: Any) -> str:
        try:
            return template.text(messages, row=row, asks=asks, **{**options, **changed})
        except DataError:  # the template refuses the conversation or the option
            return ""

    start = render()
    first_text = next((text for m in messages if (text := message_text(m))), "")
    if messages[0]["role"] == "system":
        system = "from the row" if has_own_system else "from data.system_prompt"
    else:
        system = "from the template" if "system" in start[: max(0, start.find(first_text))] else "none"
    lines = [f"  chat template: from {origin}", f"  system prompt: {system}"]
    if tools := options.get("tools", template.options.get("tools")):
        lines.append(f"  tools: {len(tools)}, from {'the row' if 'tools' in options else 'the environment'}")
    thinking = {**template.options, **options}["enable_thinking"]
    if render(enable_thinking=not thinking) != start:
        lines.append(f"  thinking: {'on' if thinking else 'off'} (enable_thinking of {key})")
    return lines

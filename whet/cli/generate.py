"""`whet generate`: completes prompts, and prints the completions or writes them to a file."""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from whet.config.generate import GenerateConfig, SamplingConfig, check_sampling
from whet.data.prompts import find_prompt_column
from whet.data.read_errors import iterate_rows
from whet.data.sources import load_rows
from whet.data.templates import uses_chat_template
from whet.errors import ConfigError, DataError
from whet.hub.base_model import trained_with_chat_template
from whet.parallel.torchrun_env import require_single_process
from whet.rollout.base import Sampling
from whet.rollout.sampler import Sampler
from whet.rollout.text import TextStream
from whet.storage.files import temporary_path
from whet.types import Group, Prompt
from whet.util.text_lines import escape_control_characters

__all__ = ["OutputError", "generate", "open_sampler", "sampling_keys", "show"]

log = logging.getLogger("whet")


class OutputError(ConfigError):
    """Standard output can't be written, so generation stops."""


def generate(config: GenerateConfig) -> int:
    """Completes prompts, and prints the completions or writes them to a file.

    Args: config: the configuration.
    Returns: the number of completions.
    Raises: ConfigError: no model, no prompts, or an output file that exists. DataError: a prompt that is too long.
        KeyboardInterrupt: the user stopped it; the message describes the output file.
    """
    require_single_process("whet generate")
    check_sampling(config)
    inputs = _read_inputs(config)
    out = _check_out_path(config)
    sampler = open_sampler(config, max_batch_size=config.batch_size)
    with ExitStack() as stack:
        stack.callback(sampler.close)
        prompts = _encode_prompts(config, sampler, inputs)
        sampling = sampler.sampling(beam_size=config.beam_size, **sampling_keys(config))
        samplings = sampler.limit_lengths(sampling, prompts, fixed=config.max_tokens is not None)
        seed = secrets.randbits(31) if config.seed is None else config.seed
        start = time.monotonic()
        if out is None and sys.stdout.isatty() and len(prompts) == config.num_generations == 1:
            count, tokens = 1, _stream_completion(sampler, prompts[0], samplings[0], seed)
        else:
            file = None if out is None else stack.enter_context(_open_output(out, config.overwrite))
            count = tokens = 0
            for group in _sample_groups(config, sampler, prompts, samplings, seed):
                try:
                    write_group(group, sampler, is_only=len(prompts) == config.num_generations == 1, file=file)
                except OSError as error:
                    if file is None and isinstance(error, BrokenPipeError):
                        raise
                    place = "standard output" if file is None else f"out={out}"
                    raise ConfigError(f"{place} can't be written after {count} completions: {error}") from error
                count += len(group.completions)
                tokens += sum(len(c.tokens) for c in group.completions)
    seconds = time.monotonic() - start
    seed_text = "" if sampling.temperature == 0 else f", seed={seed}"
    log.info("%s: %d tokens in %.1f s%s%s", _plural(count), tokens, seconds, seed_text, f" -> {out}" if out else "")
    return count


def open_sampler(config: SamplingConfig, *, max_batch_size: int, **sizes: Any) -> Sampler:
    """Returns the Sampler of a configuration, without the progress bars of transformers. Args: sizes: further ones."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    assert config.model is not None
    return Sampler(
        config.model,
        config.tokenizer,
        rollout_engine=config.rollout_engine,
        dtype=config.dtype,
        device=config.device,
        max_batch_size=max_batch_size,
        chat_template_kwargs=config.chat_template_kwargs,
        trust_remote_code=config.trust_remote_code,
        **sizes,
    )


def sampling_keys(config: SamplingConfig) -> dict[str, Any]:
    """Returns the sampling settings of a configuration, as arguments of `Sampler.sampling`."""
    return {
        "max_tokens": config.max_tokens,
        "temperature": config.effective_temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p,
        "repetition_penalty": config.repetition_penalty,
        "min_tokens": config.min_tokens,
        "stop": config.stop,
        "eos_tokens": config.eos_tokens,
        "forbidden_tokens": config.forbidden_tokens,
        "generation_kwargs": config.generation_kwargs,
        "constraint": config.constraint,
    }


def show(text: str) -> None:
    """Writes text and flushes it, without control characters in a terminal. Raises OutputError: it can't be written."""
    try:
        sys.stdout.write(escape_control_characters(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output can't be written: {error}; free some space, or redirect it") from error


def _read_inputs(config: GenerateConfig) -> list[Any]:
    """Returns the prompts of a configuration: texts, or lists of messages."""
    if config.prompts is not None:
        rows = iterate_rows(load_rows(config.prompts, split=config.split, limit=config.limit), config.prompts)
        return [row[find_prompt_column(row, config.prompt_column, i)] for i, row in enumerate(rows)]
    if not config.prompt:
        raise ConfigError('no prompt; write prompt="..." or prompts=<json, jsonl, csv, parquet or arrow file>')
    return [_standard_input() if p == "-" else p for p in config.prompt][: config.limit]


def _standard_input() -> str:
    """Returns the text of standard input, without the last line feed."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"prompt=-: standard input is not {error.encoding} text: {error}; convert it first") from error


def _check_out_path(config: GenerateConfig) -> Path | None:
    """Returns the path of the output file, checked before a model is loaded."""
    if config.out is None:
        return None
    path = Path(config.out)
    if path.suffix != ".jsonl":
        raise ConfigError(f"out={config.out} must end in .jsonl; it gets a line of JSON per completion")
    if path.exists() and not config.overwrite:
        raise ConfigError(f"out={config.out} exists; write overwrite=true to replace it, or another name")
    if not path.parent.is_dir():
        raise ConfigError(f"out={config.out}: there is no folder {path.parent}; create it first")
    return path


@contextmanager
def _open_output(path: Path, overwrite: bool) -> Iterator[TextIO]:
    """Returns the output file, opened for writing; no other process may create it at the same time.

    An existing file is replaced at the end of the context, and is kept if an error occurs before.
    """
    path = path.resolve()
    replaces, device = overwrite and path.is_file(), overwrite and path.exists() and not path.is_file()
    target = temporary_path(path) if replaces else path
    try:
        file = target.open("w" if device else "x", encoding="utf-8")
    except OSError as error:
        exists = isinstance(error, FileExistsError)
        reason = f"another process has created {target.name} meanwhile" if exists else str(error)
        raise ConfigError(f"out={path} can't be written: {reason}; use another name") from error
    try:
        yield file
        file.close()
        if replaces:
            target.replace(path)
    except KeyboardInterrupt as stop:
        with suppress(OSError):
            file.close()
        raise KeyboardInterrupt(f"stopped; {_describe_output(path, replaces=replaces, device=device)}") from stop
    finally:
        with suppress(OSError):  # a failed write was reported at its line
            file.close()
        if replaces:
            target.unlink(missing_ok=True)


def _describe_output(path: Path, *, replaces: bool, device: bool) -> str:
    """Describes the output file of a command that was stopped."""
    if replaces:
        return f"{path} has not changed"
    if device:
        return f"{path} got the completions so far"
    with path.open("rb") as file:
        complete = sum(line.endswith(b"\n") for line in file)
    return f"{path} holds {_plural(complete)}"


def _encode_prompts(config: GenerateConfig, sampler: Sampler, inputs: Sequence[Any]) -> list[Prompt]:
    """Returns the tokenised prompts; those over the limit are refused, truncated or left out."""
    apply_template = config.apply_chat_template
    if apply_template == "auto":
        trained_with_template = trained_with_chat_template(config.model)
        apply_template = (
            uses_chat_template(sampler.tokenizer, config.chat_template_kwargs)
            if trained_with_template is None
            else trained_with_template
        )
        if apply_template and any(isinstance(text, str) for text in inputs):
            log.info("chat template: applied to plain-text prompts (apply_chat_template=auto; false: not)")
    encoder = sampler.encoder(
        apply_chat_template=apply_template,
        system_prompt=config.system_prompt,
        max_prompt_length=config.max_prompt_length,
        on_long_prompt=config.on_long_prompt,
    )
    with encoder.all_rows():
        prompts = [p for i, text in enumerate(inputs) if (p := encoder({"prompt": text}, i)) is not None]
    if counts := encoder.describe_counts():
        log.warning("%s", counts)
    if not prompts:
        raise ConfigError(f"all {len(inputs)} prompts are over max_prompt_length={config.max_prompt_length}; raise it")
    return prompts


def _sample_groups(
    config: GenerateConfig, sampler: Sampler, prompts: Sequence[Prompt], samplings: Sequence[Sampling], seed: int
) -> Iterator[Group]:
    """Yields the groups of all prompts, batch by batch, so that the first are printed early."""
    size = max(1, config.batch_size // config.num_generations)
    for first in range(0, len(prompts), size):
        batch = slice(first, first + size)
        yield from sampler.sample(
            prompts[batch], samplings[batch], num_generations=config.num_generations, seed=seed, first=first
        )


def write_group(group: Group, sampler: Sampler, *, is_only: bool, file: TextIO | None) -> None:
    """Writes the completions of a prompt to a file as lines of JSON, or prints them.

    Args: is_only: there is one prompt with one completion, which is printed without a heading unless standard output
        is a terminal. file: the output file; None = print.
    """
    for c in group.completions:
        text = sampler.decode(c.tokens)
        if file is not None:
            row = {
                "row": group.prompt.row,
                "generation": c.generation,
                "prompt": group.prompt.source,
                "completion": text,
                "finish_reason": c.finish_reason,
                "tokens": c.tokens.tolist(),
                "logprobs": [round(float(x), 6) for x in c.logprobs],
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        elif sys.stdout.isatty():
            _print_rich(group, c.generation, text, f"{len(c.tokens)} tokens, {c.finish_reason}")
        else:
            heading = (
                "" if is_only else f"--- prompt {group.prompt.row}, generation {c.generation}, {c.finish_reason}\n"
            )
            sys.stdout.write(f"{heading}{text}\n")
    (file or sys.stdout).flush()


def _print_rich(group: Group, generation: int, text: str, note: str) -> None:
    """Prints one completion to a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if generation == 0:
        source = group.prompt.source
        prompt_text = source if isinstance(source, str) else "\n".join(f"{m['role']}: {m['content']}" for m in source)
        console.rule(f"prompt {group.prompt.row}", style="dim", align="left")
        console.print(Text(escape_control_characters(prompt_text), style="dim"))
    title = note if len(group.completions) == 1 else f"{generation}: {note}"
    console.print(Text(f"[{title}] ", style="cyan"), Text(escape_control_characters(text)), sep="")


def _stream_completion(sampler: Sampler, prompt: Prompt, sampling: Sampling, seed: int) -> int:
    """Prints one completion token by token, and returns the number of tokens."""
    count, text = 0, TextStream(sampler.decode)
    for chunk in sampler.stream(prompt, sampling, seed=seed):
        count += len(chunk.tokens)
        show(text.push(chunk.tokens, last=chunk.finish_reason is not None))
    show("\n")
    return count


def _plural(count: int) -> str:
    return f"{count} completion{'' if count == 1 else 's'}"

"""Loads tokenizers, makes a byte-level one without files, and finds the stop ids and the padding id.

Left out on purpose: a tokenizer class of whet's own. All tokenizers are those of transformers, and whet sets no field
of a tokenizer that the user passes in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.errors import ConfigError, format_exception
from whet.storage.model_paths import check_hub, model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["byte_tokenizer", "check_same_ids", "encode_texts", "load_tokenizer", "pad_token_id", "stop_token_ids"]

BYTE_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load_tokenizer(source: Any, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a folder, a hub name or an object.

    Args: source: a folder (of a model, a finished run, or a checkpoint) or a hub name, "byte" for byte_tokenizer(), a
        tokenizer (returned as it is), or a processor (its tokenizer is returned). kwargs: to
        AutoTokenizer.from_pretrained.
    Raises: ConfigError: there is no tokenizer, or the object can't encode.

    >>> load_tokenizer("byte")("hi").input_ids
    [104, 105]
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin

    if isinstance(source, ProcessorMixin):
        source = source.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(source, PreTrainedTokenizerBase):
        return source
    if not isinstance(source, str | Path):
        raise ConfigError(f"a tokenizer is a path, a hub name or a transformers tokenizer, got {type(source).__name__}")
    if source == "byte":
        return byte_tokenizer()
    folder = model_folder(source)
    check_hub(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **{"trust_remote_code": False, **kwargs})
    except Exception as error:  # each class reads its own files, with its own exceptions
        _raise_known_cause(str(source), Path(folder))
        raise ConfigError(
            f"no tokenizer at {str(source)!r} ({format_exception(error)}); set tokenizer to a folder that "
            "holds tokenizer.json, a hub name, or 'byte'"
        ) from error
    if _is_empty(tokenizer):
        raise ConfigError(
            f"no tokenizer at {str(source)!r}: no file there has a vocabulary, and {type(tokenizer).__name__} without "
            "one gives no tokens; set tokenizer to the folder or hub name of the original model, or to 'byte' for a "
            "byte-level model"
        )
    return tokenizer


def _raise_known_cause(source: str, folder: Path) -> None:
    """Raises ConfigError if a folder has no tokenizer for a known reason: a broken file, or an adapter without one."""
    files: dict[str, Any] = {}
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "adapter_config.json"):
        if not (folder / name).is_file():
            continue
        try:
            files[name] = json.loads((folder / name).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{folder / name} can't be read: {format_exception(error)}; copy it again from the model's source"
            ) from error
    adapter = files.get("adapter_config.json")
    if isinstance(adapter, dict) and "tokenizer.json" not in files:
        base = adapter.get("base_model_name_or_path") or "<its base model>"
        raise ConfigError(f"{source} is an adapter without a tokenizer; use that of its base model: tokenizer={base}")


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Returns a tokenizer of bytes: id = byte value, <|im_end|> (stop) 256, <|pad|> 257, <|im_start|> 258; len 259.

    It has a chat template, needs no files, and survives save_pretrained and AutoTokenizer.

    >>> t = byte_tokenizer()
    >>> t("a é").input_ids, t.eos_token_id, t.pad_token_id, len(t)
    ([97, 32, 195, 169], 256, 257, 259)
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_chars())}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = BYTE_CHAT_TEMPLATE
    return tokenizer


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: Any) -> list[list[int]]:
    """Encodes several texts.

    A tokenizer of the Rust library writes no offsets for them, which takes a quarter of the time off; the first text
    goes through transformers, which sets the options.

    Args: tokenizer: of transformers. texts: any number. options: of its call, e.g. add_special_tokens.

    >>> encode_texts(byte_tokenizer(), ["hi", "", "a"])
    [[104, 105], [], [97]]
    """
    from transformers import PreTrainedTokenizerBase, TokenizersBackend

    if not texts:
        return []
    kind = type(tokenizer)
    fast = (
        isinstance(tokenizer, TokenizersBackend)
        and kind._encode_plus is TokenizersBackend._encode_plus
        and kind.__call__ is PreTrainedTokenizerBase.__call__
    )
    count = 1 if fast else len(texts)
    ids = [list(one) for one in tokenizer(list(texts[:count]), verbose=False, **options).input_ids]
    if fast:
        backend: Any = tokenizer.backend_tokenizer
        ids += [one.ids for one in backend.encode_batch_fast(list(texts[1:]), **options)]
    return ids


def check_same_ids(policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, name: str) -> None:
    """Raises ConfigError if a token has another id in another model's tokenizer. Args: name: the other model's."""
    a, b = policy.get_vocab(), other.get_vocab()
    if a == b:
        return
    token = min((t for t in a.keys() | b.keys() if a.get(t) != b.get(t)), key=lambda t: (b.get(t, 0), t))
    raise ConfigError(
        f"{name} has another tokenizer than the policy: {token!r} is {b.get(token, 'no token')} there and "
        f"{a.get(token, 'no token')} here; it reads the policy's token ids, so use a model with the same tokenizer"
    )


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_config: Any = None, generation_config: Any = None
) -> tuple[int, ...]:
    """Returns every id that ends a completion: the tokenizer's, the generation config's and the model config's.

    Args: model_config, generation_config: transformers configs or mappings; their eos_token_id may be an int or a list.
        For a multimodal config its text config is read. Ids outside the model's vocabulary are left out, because the
        model can't generate them.
    Returns: sorted unique ids; () = there are none, and only the length ends a completion.

    >>> stop_token_ids(byte_tokenizer(), {"eos_token_id": [3, 256], "vocab_size": 264}, {"eos_token_id": [7, 99999]})
    (3, 7, 256)
    """
    eos: Any = tokenizer.eos_token_id
    ids = set() if eos is None else {int(eos)}
    size = _field(model_config, "vocab_size")
    for config in (generation_config, model_config):
        value = _field(config, "eos_token_id")
        if value is not None:
            ids.update(int(i) for i in np.atleast_1d(np.asarray(value)) if size is None or i < size)
    return tuple(sorted(ids))


def pad_token_id(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int] = ()) -> int:
    """Returns the padding id: the tokenizer's pad token, else its eos, else a stop id, else 0.

    Any id works, because masks are made from lengths and never from this id.

    >>> pad_token_id(byte_tokenizer())
    257
    """
    candidates: tuple[Any, ...] = (tokenizer.pad_token_id, tokenizer.eos_token_id, *stop_ids)
    for value in candidates:
        if value is not None:
            return int(value)
    return 0


def _is_empty(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether its vocabulary has only special tokens, as transformers makes it if there are no files."""
    is_small = len(tokenizer) < 1000  # a large vocabulary need not be searched
    return is_small and len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) < 2  # some keep a space


def _field(config: Any, name: str) -> Any:
    """Returns a field of a transformers config, of its text config, or of a mapping; None = there is no such field."""
    if config is None:
        return None
    if isinstance(config, Mapping):
        return config.get(name)
    from transformers import PreTrainedConfig

    if isinstance(config, PreTrainedConfig):
        config = config.get_text_config()
    return config.to_dict().get(name)


def _byte_chars() -> list[str]:
    """Returns the printable character that byte-level BPE uses for each byte, in the order of the bytes.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for the characters from 256 up.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]

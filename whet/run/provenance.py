"""Compares a resumed run's inputs and settings with its checkpoint's: models, tokenizer, evaluation data, code.

A checkpoint records the inputs (run.pt, "inputs"). A resumed run refuses different weights, model configurations, a
different tokenizer or different evaluation data, and logs different code. Weights are compared in memory, so the same
model may come from a folder, the hub or a module. Trained weights come from the checkpoint, so only a trained model's
configuration is compared; with an adapter also its frozen base, so that an adapter is never added to a base that has it
merged. data/prompt_stream.py compares the training data. Modules that the user's code imports are not compared;
environment.json has the packages' versions.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from whet.config import diff, dump_tree
from whet.errors import CheckpointError, ConfigError
from whet.util.references import resolve_ref
from whet.util.tensor_subclasses import gather_full_tensor, is_sharded
from whet.util.tensor_sums import tensor_sums

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from whet.config import Role
    from whet.parallel.ranks import Ranks
    from whet.train.worker import ModelWorker

__all__ = [
    "changed_settings",
    "check_same_inputs",
    "check_same_settings",
    "check_settings",
    "function_source",
    "record_inputs",
    "to_loadable",
    "weights_digest",
]

log = logging.getLogger("whet")

MIN_LOGGED_BYTES = 8 * 2**30
"""The bytes of weights on a CPU from which the hashing is logged, because it takes seconds."""
_IRRELEVANT = ("_", "attn_implementation", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Prefixes of keys in a model's configuration that don't change its results in whet."""
_FREE = (
    "actor.gradient_checkpointing",
    "critic.gradient_checkpointing",
    "reference.gradient_checkpointing",
    "reward_model.gradient_checkpointing",
    "offload_to_cpu",
    "trainer.collective_timeout_s",
    "trainer.context_parallel_size",
    "trainer.data_parallel_replicate_size",
    "trainer.rehearse",
    "trainer.sync_each_microbatch",
    "trainer.tensor_parallel_size",
    "trainer.keep_best",
    "trainer.max_steps",
    "trainer.num_epochs",
    "trainer.resume",
    "trainer.allow_config_change",
    "trainer.final_dtype",
    "trainer.reward_workers",
    "trainer.run_dir",
    "trainer.show_samples",
    "trainer.token_stats_every_n_steps",
    "trainer.token_stats_max_mb",
    "trainer.stop_when",
    "trainer.warn_when",
    "trainer.loggers",
    "trainer.merge_adapter",
    "trainer.metrics_logging_options",
    "trainer.perf_metrics_options",
    "trainer.profile",
    "trainer.checkpointing_options",
    "trainer.pbar_description",
    "trainer.view",
)
"""Keys that a resumed run may change, because they don't change a step's results. The run's length changes only a
learning-rate schedule, which is rebuilt with a warning: see Optim.plan."""


def record_inputs(
    workers: Mapping[Role, ModelWorker],
    tokenizer: PreTrainedTokenizerBase,
    *,
    functions: Iterable[tuple[str, Any]],
    evaluation: list[int] | None = None,
    stop_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """Records a run's inputs for its checkpoints, in plain containers.

    Args:
        workers: all models, the trained ones included.
        tokenizer: the prompts' tokenizer.
        functions: (description, function) of the user's code that the run calls.
        evaluation: the number of evaluation items, and their digests (data.order.digests); None = no evaluation.
        stop_ids: the token ids that end a completion.
    """
    return {
        "models": {
            role.value: _model(
                role.value,
                w.module,
                w.optim is None and not w.replaced,
                adapted=w.loaded.adapter is not None,
                view=w.loaded.is_view,
            )
            for role, w in workers.items()
        },
        "stop_ids": list(stop_ids),
        "tokenizer": _tokenizer(tokenizer),
        "evaluation": evaluation,
        "code": {what: function_source(fn) for what, fn in functions},
    }


def check_same_inputs(old: Any, new: Mapping[str, Any], *, allow: bool) -> None:
    """Compares the checkpoint's inputs with the current ones. Different code is only a warning.

    Args: old: the checkpoint's inputs. new: the result of `record_inputs`. allow: log differences instead of refusing
        them.
    Raises: CheckpointError: differences, which the message lists; or `old` has another format.
    """
    changed = "\n  ".join(_changed(old, new))
    if changed and not allow:
        raise CheckpointError(
            f"models, tokenizer or evaluation data differ from the checkpoint's:\n  {changed}\na resumed run needs the "
            "same ones; put them back, start a new run in another trainer.run_dir, or set "
            "trainer.allow_config_change=true to continue with these changes"
        )
    if changed:
        log.warning("models, tokenizer or evaluation data differ from the checkpoint's; continuing:\n  %s", changed)
    for line in _changed_code(_part(old, "code", Mapping), new["code"]):
        log.warning("%s; from here on the run uses the current code", line)


# ---- what has changed ------------------------------------------------------------------------------------------------


def _changed(old: Any, new: Mapping[str, Any]) -> list[str]:
    """Returns the differences, except in code. A model that one side lacks is not compared: its use is a setting."""
    models, changes = _part(old, "models", Mapping), []
    for role, now in new["models"].items():
        if role in models:
            changes += _changed_model(role, _part(models, role, Mapping), now)
    if (stop := _part(old, "stop_ids", list)) != new["stop_ids"]:
        changes.append(f"ids that end a completion, by tokenizer and actor: {stop} -> {new['stop_ids']}")
    before, now = _part(old, "tokenizer", Mapping), new["tokenizer"]
    same_versions = before.get("versions") == now["versions"]  # other versions may write the same rules differently
    for name in ("vocabulary", "chat_template", *(["rules"] if same_versions else [])):
        if before.get(name) != now[name]:
            changes.append(f"tokenizer: other {name}: {before.get(name)!s:.12} -> {now[name]!s:.12}")
    if (before := _part(old, "evaluation", list | None)) != (now := new["evaluation"]):
        changes.append(f"evaluation data: {_changed_prompts(before, now)}")
    return changes


def _changed_model(role: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields the differences of one model: in its weights, if both have the same dtype, and in its configuration."""
    old, new = before.get("weights"), now["weights"]
    if None not in (old, new) and before.get("dtype") != now["dtype"]:
        log.warning("%s: weights are not compared: they are %s, not %s", role, now["dtype"], before.get("dtype"))
    elif None not in (old, new) and old != new:
        yield f"{role}: other weights: {old!s:.12} -> {new:.12}"
    config = _part(before, "config", Mapping)
    shared = sorted(config.keys() & now["config"].keys())  # other versions of transformers have other keys
    for change in diff(*({name: side[name] for name in shared} for side in (config, now["config"]))):
        yield f"{role}: config.{change}"


def _size(side: Sequence[Any] | None) -> str:
    if side is None:
        return "none"
    return f"{side[0]} prompts" if side else "?"


def _changed_prompts(before: Sequence[Any] | None, now: Sequence[Any] | None) -> str:
    """Describes a difference in evaluation data."""
    sizes = [_size(before), _size(now)]
    if sizes[0] != sizes[1] or before is None or now is None:
        return " -> ".join(sizes)
    if before[1:2] != now[1:2]:
        return "the number of prompts is the same, but some were changed or reordered"
    return "the prompts are the same, but another column (such as the answer) was changed"


def _changed_code(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each function or file that has changed."""
    changed: dict[str, list[str]] = {}
    for what, (file, digest) in new.items():
        if what not in old:
            yield f"{what} ({file or 'no file'}) is new since the checkpoint"
        elif _part(old, what, list)[1:] != [digest]:
            changed.setdefault(file or "its source, now in no file,", []).append(what)
    for file, whats in changed.items():
        yield f"{file} has changed since the checkpoint: {', '.join(whats)}"
    yield from (f"{what} of the checkpoint is gone" for what in old if what not in new)


def _part(tree: Mapping[str, Any], name: str, kind: Any) -> Any:
    """Returns an entry of a checkpoint's inputs. Raises CheckpointError: it is missing or has another type."""
    if not isinstance(tree, Mapping) or name not in tree or not isinstance(tree[name], kind):
        raise CheckpointError(
            f"the entry {name!r} of the checkpoint's run.pt has an unexpected format; resume from another step-* folder"
        )
    return tree[name]


def to_loadable(tree: Any) -> Any:
    """Converts a configuration tree to types that torch.load(weights_only=True) can read.

    >>> to_loadable({1: (2, None)})
    {'1': [2, None]}
    """
    if isinstance(tree, Mapping):
        return {str(k): to_loadable(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [to_loadable(v) for v in tree]
    return tree if isinstance(tree, str | int | float | bool | None) else repr(tree)


# ---- settings --------------------------------------------------------------------------------------------------------


def check_settings(old: Any, new: Any, *, allow: bool) -> None:
    """Compares a checkpoint's settings with a resumed run's.

    Args: old, new: see changed_settings. allow: log the differences instead of refusing them.
    Raises: CheckpointError: differences that change a step's results; the message lists them.
    """
    changed = changed_settings(old, new)
    if changed and not allow:
        raise CheckpointError(
            "the configuration differs from the checkpoint's:\n  "
            + "\n  ".join(changed)
            + "\nresume with the same one, or set trainer.allow_config_change=true to continue with these changes; "
            "other rows, another data.batch_size or another shape of an adapter need a new run, in another folder"
        )
    if changed:
        log.warning("resuming with a changed configuration:\n  %s", "\n  ".join(changed))


def check_same_settings(ranks: Ranks, settings: Any) -> None:
    """Compares the settings of the processes of a run, which would end at other steps or wait for each other for ever.

    Args: settings: of this process; objects without a name, which differ by their address, are not compared.
    Raises: ConfigError: on every rank; it names the settings.
    """
    first = ranks.broadcast(settings)
    changes = [x for x in diff(dump_tree(first), dump_tree(settings)) if " at 0x" not in x]
    for rank, found in enumerate(ranks.all_gather(changes)):
        if found:
            raise ConfigError(
                f"rank {rank} of {ranks.size} has other settings than rank 0: {'; '.join(found[:5])}; give all "
                "processes the same command, and each host the same files"
            )


def changed_settings(old: Any, new: Any) -> list[str]:
    """Returns the differences between two configurations that change a step's results.

    Args: old, new: configurations, or their trees.
    Returns: "key: old -> new" for each key that differs. Keys that change no step, such as trainer.max_steps, are left
        out, and so are sections that one side lacks, because a model given as a module has no settings.

    >>> changed_settings({"trainer": {"max_steps": 5, "seed": 0}}, {"trainer": {"max_steps": 9, "seed": 1}})
    ['trainer.seed: 0 -> 1']
    """
    old, new = dump_tree(old), dump_tree(new)
    shared = old.keys() & new.keys()
    old, new = ({k: v for k, v in side.items() if k in shared} for side in (old, new))
    return [change for change in diff(old, new) if not change.startswith(_FREE)]


# ---- models and tokenizer --------------------------------------------------------------------------------------------


def _model(
    role: str, module: nn.Module, only_read: bool, *, adapted: bool = False, view: bool = False
) -> dict[str, Any]:
    """Returns the record of a model. Args: only_read: it is not trained. adapted: it has an adapter. view: it shares
    its weights with another role.
    """
    config = to_loadable(module.config.to_dict())  # pyright: ignore
    digest = None
    if not view and (only_read or adapted):
        size = sum(t.numel() * t.element_size() for t in module.parameters() if t.device.type == "cpu")
        if size >= MIN_LOGGED_BYTES:
            log.info("%s: hashing %.0f GB of weights for the checkpoint's resume check", role, size / 1e9)
        trained = {} if only_read else dict(module.named_parameters(remove_duplicate=False))
        digest = weights_digest(module, without={name for name, p in trained.items() if p.requires_grad})
    return {
        "weights": digest,
        "dtype": str(next(module.parameters()).dtype),
        "config": {name: value for name, value in config.items() if not name.startswith(_IRRELEVANT)},
    }


def weights_digest(module: nn.Module, *, without: Collection[str] = ()) -> str:
    """Returns a digest of a module's weights and persistent buffers, limited by memory bandwidth; equal on every
    device.

    It is the SHA-256 of names, dtypes, shapes and `util.tensor_sums.tensor_sums`. Tied weights count once. It does not
    protect against weights that were constructed to have the same digest.

    Args: without: names of tensors to leave out.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> weights_digest(a) == weights_digest(b), weights_digest(a) == weights_digest(a)
    (False, True)
    """
    digest, seen = hashlib.sha256(), set()
    tensors = {name: t for name, t in module.state_dict(keep_vars=True).items() if name not in without}
    for name, tensor in sorted(tensors.items()):
        sharded = is_sharded(tensor)  # a shard may be empty, so its address says nothing
        place = id(tensor) if sharded else (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or place not in seen:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor_sums(gather_full_tensor(tensor)))
        seen.add(place)
    return digest.hexdigest()


@torch.no_grad()
def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns the record of a tokenizer: its tokens, its template, its rules, and the versions that wrote the rules.

    Truncation and padding are left out, because an encoding can change them.
    """
    import tokenizers
    import transformers

    ids = tokenizer.get_vocab()
    vocabulary = hashlib.sha256("\0".join(sorted(ids, key=ids.__getitem__)).encode("utf-8", "surrogatepass"))
    vocabulary.update(np.array([*sorted(ids.values()), *sorted(tokenizer.all_special_ids)]).tobytes())
    rules = None
    if isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        rules = {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}
        if isinstance(rules["model"].get("vocab"), dict):  # compared already, and slow to serialize
            del rules["model"]["vocab"]
    return {
        "vocabulary": vocabulary.hexdigest(),
        "chat_template": _digest(tokenizer.chat_template),
        "rules": _digest(rules),
        "versions": [transformers.__version__, tokenizers.__version__],
    }


def _digest(tree: Any) -> str:
    """Returns a digest of plain containers."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()


# ---- code ------------------------------------------------------------------------------------------------------------


def function_source(fn: Any) -> list[str | None]:
    """Returns the source file of a function, class, object or reference, and the file's digest.

    Both are None for whet's own code, and for code outside of files.
    """
    try:
        fn = resolve_ref(fn, "function") if isinstance(fn, str) else fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        fn = inspect.unwrap(fn)
        file = inspect.getsourcefile(fn if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn))
    except (ConfigError, TypeError):  # TypeError: built in, or from a terminal
        return [None, None]
    path = Path(file or "").absolute()
    if not path.is_file() or path.is_relative_to(Path(__file__).parents[1]):
        return [None, None]
    return [str(path), hashlib.sha256(path.read_bytes()).hexdigest()]

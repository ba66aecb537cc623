"""Pushing a run's model, its tokenizer and a model card to the Hugging Face hub.

Everything is checked before anything is sent: each file of the folder, the name, the token and its permissions, and
whether a repository of that name exists and who can see it. Then all files go in one commit, so the repository has all
of them or none. Only known files are sent: no optimizer state, no completions, no data, and no configuration, which
has local paths.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.config import read_yaml
from whet.config.monitoring import BEFORE_STOP, BEST
from whet.errors import CheckpointError, ConfigError, WhetError, format_exception, nearest
from whet.hub.base_model import licence_of_card
from whet.hub.model_card import make_model_card, read_card_facts
from whet.storage.checkpoint import step_number, verify_checkpoint, write_folder_atomic
from whet.storage.files import read_json
from whet.storage.model_paths import hub_unreachable_reason
from whet.util.references import check_access

__all__ = ["PushResult", "check_hub_token", "push_folder", "push_to_hub"]

log = logging.getLogger("whet")

FINAL = "final"
_MODEL = re.compile(
    r"config\.json|generation_config\.json|adapter_config\.json"
    r"|(model|adapter_model)(-[0-9]+-of-[0-9]+)?\.safetensors|model\.safetensors\.index\.json"
    r"|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|.+\.(model|tiktoken|py)|chat_template\.(jinja|json)|preprocessor_config\.json"
)
"""The file names of a model and its tokenizer."""
_valid_tokens: set[str] = set()
"""Tokens that the hub has accepted for writing in this process; `check_hub_token` does not ask twice."""


@dataclass(frozen=True, kw_only=True)
class PushResult:
    """The files that were sent, or in a dry run would be.

    Example: run.push_to_hub("me/sums", dry_run=True).files -> {"README.md": 1830, "config.json": 701, ...}
    """

    repo: str
    """The name on the hub."""
    private: bool
    """Whether the repository is to be private."""
    files: Mapping[str, int]
    """Bytes by name."""
    card: str
    """README.md."""
    url: str | None = None
    """The URL of the commit; None = nothing was sent (dry_run)."""


def push_to_hub(
    run: str | Path,
    repo: str | None = None,
    *,
    which: str = FINAL,
    private: bool = True,
    dry_run: bool = False,
    merged: bool = False,
    license: str | None = None,
    evals: Sequence[str | Path] = (),
    message: str = "",
    branch: str | None = None,
    token: str | None = None,
    api: Any = None,
) -> PushResult:
    """Sends a run's model, tokenizer and card to the hub.

    Args:
        run: the folder of the run.
        repo, which, private, merged, license, evals, message, branch: as in config.push.PushConfig.
        dry_run: send nothing and don't ask the hub; return what would be sent.
        token: None = that of `hf auth login`, or HF_TOKEN.
        api: the client of the hub; None = huggingface_hub.HfApi.
    Raises: ConfigError: something is missing or wrong, or the hub does not answer. CheckpointError: a file of the model
        is damaged. In both cases nothing was sent.
    """
    folder = Path(run).expanduser()
    model, step = _model_of(folder, which)
    if merged:
        model = _merged(model, folder)
    elif which != FINAL:
        model = _exported(model, folder)
    files = _files(model, folder)
    _check_base(files.get("adapter_config.json"), dry_run)
    changes = {"adapter": "adapter_config.json" in files}
    facts = read_card_facts(folder, step=step, evaluations=evals, **changes)
    if license is not None:
        facts = read_card_facts(folder, step=step, evaluations=evals, licence={"license": license}, **changes)
    if facts.curves:
        files["curves.png"] = folder / "curves.png"
    if not dry_run:
        api = _make_api(token) if api is None else api
    repo = _full_name(repo, folder, None if dry_run else _whoami(api))
    if not dry_run:
        _check_visible(api, repo, private)
        if not facts.licence and facts.base:
            facts = read_card_facts(
                folder, step=step, evaluations=evals, licence=_fetch_licence(api, facts.base), **changes
            )
    card = make_model_card(facts, title=repo)
    sizes = {"README.md": len(card.encode()), **{name: path.stat().st_size for name, path in sorted(files.items())}}
    if dry_run:
        return PushResult(repo=repo, private=private, files=sizes, card=card)
    log.info("sending %d files, %.1f MB, to %s", len(sizes), sum(sizes.values()) / 1e6, repo)
    url = _upload(api, repo, files, card, private=private, message=message or f"step {step}, by whet", branch=branch)
    return PushResult(repo=repo, private=private, files=sizes, card=card, url=url)


def push_folder(
    model: str | Path,
    repo: str,
    card: str,
    *,
    private: bool,
    message: str,
    branch: str | None = None,
    token: str | None = None,
) -> PushResult:
    """Sends a folder with a model and its tokenizer, and a card.

    Args:
        model: the folder; only the files of a model and its tokenizer are sent.
        repo: the name on the hub; a name without an owner gets the user's.
        card: the text of README.md.
        private, message, branch, token: as in push_to_hub.
    Raises: as push_to_hub.
    """
    folder = Path(model)
    files = _files(folder, folder)
    _check_base(files.get("adapter_config.json"), False)
    api = _make_api(token)
    repo = _full_name(repo, folder, _whoami(api))
    _check_visible(api, repo, private)
    sizes = {"README.md": len(card.encode()), **{name: path.stat().st_size for name, path in sorted(files.items())}}
    url = _upload(api, repo, files, card, private=private, message=message, branch=branch)
    return PushResult(repo=repo, private=private, files=sizes, card=card, url=url)


def check_hub_token(token: str | None = None) -> None:
    """Asks the hub, once in a process, whether the token may write. Raises: ConfigError: it may not."""
    api = _make_api(token)
    if api.token not in _valid_tokens:
        _whoami(api)
        _valid_tokens.add(api.token)


# ---- what is sent ----------------------------------------------------------------------------------------------------


def _model_of(folder: Path, which: str) -> tuple[Path, int]:
    """Returns the folder of the model and its step. Raises ConfigError if the run has no such model."""
    if not (folder / "config.yaml").is_file():
        check_access(folder / "config.yaml")
        inside = folder.name == FINAL or folder.parent.name == "checkpoints"
        beside = [p.name for p in folder.parent.iterdir() if p != folder] if folder.parent.is_dir() else []
        hint = f"; give the run's folder, {folder.parent}" if inside else nearest(folder.name, beside)
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml{hint}")
    if which == FINAL:
        if not any((folder / FINAL / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise ConfigError(
                f"{folder} has no {FINAL}/: the run has not finished; resume it, or give which=step-... of a checkpoint"
            )
        return folder / FINAL, _step_in(folder / FINAL / "run.json")
    trainer = read_yaml(folder / "config.yaml").get("trainer") or {}
    root = Path(trainer.get("checkpoint_root_directory") or folder / "checkpoints")
    name = _read_pointer(root, which) if which in (BEST, BEFORE_STOP) else which
    place = root / name
    if step_number(place) is None or not place.is_dir():
        there = [FINAL, *sorted(p.name for p in root.glob("step-*") if step_number(p) is not None)]
        raise ConfigError(f"which={which!r}: there is no {place}; there are {', '.join(there)}")
    verify_checkpoint(place, ["run.pt"])
    roles = sorted(p.parent for p in place.glob("*/optimizer.safetensors"))
    return (roles[0] if roles else place / "actor"), step_number(place) or 0  # actor before critic


def _read_pointer(root: Path, which: str) -> str:
    """Returns the name of the checkpoint that is kept as `which`."""
    try:
        return (root / which).read_text().strip()
    except OSError:
        why = {
            BEST: "the run had no trainer.keep_best, or no evaluation was better than that before the first step",
            BEFORE_STOP: "the run had no trainer.stop_when, or saved no checkpoint before",
        }
        raise ConfigError(f"which={which}: {root} has no such checkpoint: {why[which]}") from None


def _step_in(path: Path) -> int:
    try:
        return int(read_json(path)["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}; the model was not written by a run") from error


def _check_base(adapter: Path | None, dry_run: bool) -> None:
    """Raises ConfigError if an adapter's base is a local folder, which nobody else has; in a dry run only warns."""
    base = None if adapter is None else json.loads(adapter.read_text()).get("base_model_name_or_path")
    if base is not None and (Path(base).is_absolute() or Path(base).exists()):
        message = (
            f"the adapter's base is the folder {base}, which nobody else has; send the whole model by merged=true, or "
            "train the adapter on a model of the hub"
        )
        if not dry_run:
            raise ConfigError(message)
        log.warning("%s", message)


def _files(model: Path, folder: Path) -> dict[str, Path]:
    """Returns the files of a model by their names on the hub. Raises CheckpointError if one is missing or damaged."""
    files = {p.name: p for p in sorted(model.iterdir()) if p.is_file() and _MODEL.fullmatch(p.name)}
    if "generation_config.json" not in files and (folder / FINAL / "generation_config.json").is_file():
        files["generation_config.json"] = folder / FINAL / "generation_config.json"  # checkpoints may have none
    if "adapter_config.json" in files:
        needs = {"adapter_config.json", "adapter_model.safetensors"}
    else:
        needs = {"config.json", *_shards(model)}
    if missing := sorted(needs - files.keys()):
        raise CheckpointError(f"{model} has no {', '.join(missing)}; the model is not whole")
    if not {"tokenizer.json", "tokenizer_config.json"} & files.keys():
        raise CheckpointError(f"{model} has no tokenizer; the model is not whole")
    for name, path in files.items():
        _check_file(name, path)
    return files


def _exported(model: Path, folder: Path) -> Path:
    """Writes a checkpoint's fp32 masters in the dtype of final/ to exported/ in the run's folder.

    Returns: that folder; the checkpoint itself if its weights have that dtype already, or if it holds an adapter.
    """
    try:
        own = read_json(model / "config.json")["dtype"]
    except (OSError, ValueError, KeyError, TypeError):
        return model  # an adapter, or damaged: `_files` reports it
    final_dtype = (read_yaml(folder / "config.yaml").get("trainer") or {}).get("final_dtype", "auto")
    dtype = own if final_dtype == "auto" else final_dtype
    if dtype == "float32":
        return model
    from whet.models.load import DTYPES, load_model, save_model

    if dtype not in DTYPES:
        return model
    loaded = load_model(str(model), role="actor" if model.name == "actor" else "critic")

    def write(place: Path) -> None:
        save_model(loaded, None, place, dtype=DTYPES[dtype])
        _copy_tokenizer(model, place)

    write_folder_atomic(folder / "exported", write)
    return folder / "exported"


def _merged(model: Path, folder: Path) -> Path:
    """Merges an adapter into its base, and writes the result to merged/ in the run's folder.

    Raises: ConfigError: the model is not an adapter, or its base can't be read.
    """
    if not (model / "adapter_config.json").is_file():
        raise ConfigError(f"merged=true: {model} is not an adapter, so there is nothing to merge; leave it out")
    from whet.models.load import load_model, save_model
    from whet.models.lora import find_adapter

    saved = find_adapter(str(model))
    scores = saved is not None and saved.fields.get("task_type") == "SEQ_CLS"
    loaded = load_model(str(model), role="critic" if scores else "actor")

    def write(place: Path) -> None:
        save_model(loaded, None, place, merge=True, dtype=loaded.saved_dtype)
        _copy_tokenizer(model, place)

    write_folder_atomic(folder / "merged", write)
    return folder / "merged"


def _copy_tokenizer(model: Path, place: Path) -> None:
    """Copies the tokenizer and the other files beside a model's weights."""
    for path in model.iterdir():
        others = "adapter" in path.name or path.name in ("config.json", "model.safetensors")
        if _MODEL.fullmatch(path.name) and not others and not (place / path.name).exists():
            shutil.copy(path, place / path.name)


def _shards(model: Path) -> set[str]:
    """Returns the names of the files with the weights, by the index if there is one."""
    index = model / "model.safetensors.index.json"
    if not index.is_file():
        return {"model.safetensors"}
    try:
        return set(read_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} can't be read: {error}; the model is not whole") from error


def _check_file(name: str, path: Path) -> None:
    """Raises CheckpointError for incomplete weights and invalid JSON."""
    from safetensors import SafetensorError, safe_open

    try:
        if name.endswith(".safetensors"):
            with safe_open(path, framework="pt") as weights:
                if not weights.keys():
                    raise ValueError("it holds no weights")
        elif name.endswith(".json"):
            json.loads(path.read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read: {error}; nothing was sent") from error


# ---- the hub ---------------------------------------------------------------------------------------------------------


def _make_api(token: str | None) -> Any:
    """Returns the client of the hub. Raises ConfigError: HF_HUB_OFFLINE is set, or there is no token."""
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing can be sent; unset it")
    token = token or get_token()
    if token is None:
        raise ConfigError("there is no token for the hub; log in with `hf auth login`, or set HF_TOKEN")
    return HfApi(token=token, library_name="whet")


def _whoami(api: Any) -> dict[str, Any]:
    """Returns the owner of the token. Raises ConfigError if the token is not valid or may not write."""
    try:
        account = dict(api.whoami())
    except Exception as error:
        raise _hub_error(error, "the token is not valid", "log in again: hf auth login") from error
    role = ((account.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise ConfigError(
            "the token may only read; make one that may write at https://huggingface.co/settings/tokens, and log in "
            "with it: hf auth login"
        )
    return account


def _full_name(repo: str | None, folder: Path, who: Mapping[str, Any] | None) -> str:
    """Returns the name with its owner. Raises ConfigError if the name is not valid, or the user may not write under it.

    Args: who: the owner of the token; None = unknown.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    name = folder.absolute().name if repo is None else repo
    full = name if "/" in name else f"{'you' if who is None else who['name']}/{name}"
    try:
        validate_repo_id(full)
    except HFValidationError as error:
        raise ConfigError(f"repo={full!r} is not a name on the hub: {error}; write repo=user/name") from error
    owner = full.partition("/")[0]
    if who is not None:
        owners = [who["name"], *(org["name"] for org in who.get("orgs") or ())]
        if owner not in owners:
            raise ConfigError(
                f"repo={full!r}: the token belongs to {', '.join(owners)}, not to {owner}{nearest(owner, owners)}"
            )
    return full


def _check_visible(api: Any, repo: str, private: bool) -> None:
    """Raises ConfigError if the push is private and a public repository of that name exists."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.repo_info(repo, repo_type="model")
    except RepositoryNotFoundError:
        return
    except Exception as error:
        raise _hub_error(error, f"the hub can't be asked for {repo}", "check the name and the token") from error
    if private and not info.private:
        raise ConfigError(f"{repo} exists and is public; set private=false to send to it, or give another repo")
    if not private and info.private:
        log.warning("%s exists and is private; it stays private", repo)


def _fetch_licence(api: Any, base: str) -> dict[str, str]:
    """Returns the licence of a model on the hub; {} if it is unknown, which the card then says."""
    try:
        card = api.model_info(base).card_data
    except Exception as error:
        log.warning("the licence of %s could not be fetched: %s", base, error)
        return {}
    return licence_of_card(card.to_dict() if card is not None else {})


def _upload(
    api: Any, repo: str, files: Mapping[str, Path], card: str, *, private: bool, message: str, branch: str | None
) -> str:
    """Makes one commit, and the repository if there is none. Returns: the URL of the commit."""
    from huggingface_hub import CommitOperationAdd

    content = {"README.md": card.encode(), **{name: str(path) for name, path in sorted(files.items())}}
    adds = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in content.items()]
    try:
        api.create_repo(repo, private=private, repo_type="model", exist_ok=True)
        if branch is not None:
            api.create_branch(repo, branch=branch, exist_ok=True)
        commit = api.create_commit(repo, operations=adds, commit_message=message, revision=branch)
    except Exception as error:
        fix = "try again: files that are there already are not sent twice"
        raise _hub_error(error, f"{repo} did not accept the model", fix) from error
    return str(commit.commit_url)


def _hub_error(error: Exception, what: str, fix: str) -> WhetError:
    """Returns an error of the hub's client as one message."""
    silent = hub_unreachable_reason(error)
    if silent:
        return ConfigError(f"the hub does not answer ({silent}); check the network, and send it again")
    return ConfigError(f"{what}: {format_exception(error)}; {fix}")

"""Giving a trained model away: a run's model, its tokenizer and a card, to the Hugging Face hub.

All that can be wrong is looked at before anything is sent: the folder, file by file; the name; the token and what it
may do; whether a repository of that name is there, and who sees it. Then everything is one commit, so that the
repository has all of it or nothing. What is sent is a list of known files: no optimizer state, no completions, no data,
no configuration of the run with its paths.
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
from whet.errors import CheckpointError, ConfigError, WhetError, nearest
from whet.hub.base_model import licence_of_card
from whet.hub.model_card import make_model_card, read_card_facts
from whet.storage.checkpoint import step_of, verify_checkpoint, write_folder_atomic
from whet.storage.files import read_json
from whet.util.model_paths import hub_silence

__all__ = ["Giving", "PushResult", "check_hub_token", "push_folder", "push_to_hub"]

log = logging.getLogger("whet")

FINAL = "final"
_MODEL = re.compile(
    r"config\.json|generation_config\.json|adapter_config\.json"
    r"|(model|adapter_model)(-[0-9]+-of-[0-9]+)?\.safetensors|model\.safetensors\.index\.json"
    r"|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|.+\.(model|tiktoken|py)|chat_template\.(jinja|json)|preprocessor_config\.json"
)
"""The files of a model and its tokenizer."""


@dataclass(frozen=True, kw_only=True)
class PushResult:
    """What was sent, or would be.

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
    """Of the commit; None = nothing was sent (dry_run)."""


class Giving:
    """What a run has for giving its model away."""

    folder: Any

    def push_to_hub(self, repo: str | None = None, **options: Any) -> PushResult:
        """Sends the run's model, tokenizer and card to the hub: see run.push.push_to_hub, whose options these are.

        Raises: ConfigError: the run has no folder, or something is wrong; nothing is sent then.
        """
        if self.folder is None:
            raise ConfigError("a run without a folder has written no model; set trainer.run_dir")
        return push_to_hub(self.folder.path, repo, **options)


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
        run: its folder. repo, which, private, merged, license, evals, message, branch: as in config.push.PushConfig.
        dry_run: nothing is sent and the hub is not asked; what would be sent is returned.
        token: None = that of `hf auth login`, or HF_TOKEN.
        api: what speaks with the hub; None = huggingface_hub.HfApi.
    Raises: ConfigError: something is missing or wrong, or the hub does not answer. CheckpointError: a file of the model
        is damaged. In either case nothing was sent.
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
        api = _api(token) if api is None else api
    repo = _repo(repo, folder, None if dry_run else _who(api))
    if not dry_run:
        _check_visible(api, repo, private)
        if not facts.licence and facts.base:
            facts = read_card_facts(
                folder, step=step, evaluations=evals, licence=_asked_licence(api, facts.base), **changes
            )
    card = make_model_card(facts, title=repo)
    sizes = {"README.md": len(card.encode()), **{name: path.stat().st_size for name, path in sorted(files.items())}}
    if dry_run:
        return PushResult(repo=repo, private=private, files=sizes, card=card)
    log.info("sending %d files, %.1f MB, to %s", len(sizes), sum(sizes.values()) / 1e6, repo)
    url = _sent(api, repo, files, card, private=private, message=message or f"step {step}, by whet", branch=branch)
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
    """Sends the folder of a model, its tokenizer in it, with a card.

    Args: model: its folder; files besides those of a model and its tokenizer stay. repo: its name on the hub, the
        user's own where it names nobody. card: README.md. private, message, branch, token: as in push_to_hub.
    Raises: as push_to_hub does.
    """
    folder = Path(model)
    files = _files(folder, folder)
    _check_base(files.get("adapter_config.json"), False)
    api = _api(token)
    repo = _repo(repo, folder, _who(api))
    _check_visible(api, repo, private)
    sizes = {"README.md": len(card.encode()), **{name: path.stat().st_size for name, path in sorted(files.items())}}
    url = _sent(api, repo, files, card, private=private, message=message, branch=branch)
    return PushResult(repo=repo, private=private, files=sizes, card=card, url=url)


def check_hub_token(token: str | None = None) -> None:
    """Asks the hub whether the token may write, before anything is made that is to be sent. Raises: ConfigError: no."""
    _who(_api(token))


# ---- what is sent ----------------------------------------------------------------------------------------------------


def _model_of(folder: Path, which: str) -> tuple[Path, int]:
    """The folder of the model and its step. Raises ConfigError where the run has no such model."""
    if not (folder / "config.yaml").is_file():
        inside = folder.name == FINAL or folder.parent.name == "checkpoints"
        hint = f"; give the run's folder, {folder.parent}" if inside else nearest(folder.name, _beside(folder))
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml{hint}")
    if which == FINAL:
        if not any((folder / FINAL / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise ConfigError(
                f"{folder} has no {FINAL}/: the run has not finished; resume it, or give which=step-... of a checkpoint"
            )
        return folder / FINAL, _step_in(folder / FINAL / "run.json")
    trainer = read_yaml(folder / "config.yaml").get("trainer") or {}
    root = Path(trainer.get("checkpoint_root_directory") or folder / "checkpoints")
    name = _pointed(root, which) if which in (BEST, BEFORE_STOP) else which
    place = root / name
    if step_of(place) is None or not place.is_dir():
        there = [FINAL, *sorted(p.name for p in root.glob("step-*") if step_of(p) is not None)]
        raise ConfigError(f"which={which!r}: there is no {place}; there are {', '.join(there)}")
    verify_checkpoint(place, ["run.pt"])
    roles = sorted(p.parent for p in place.glob("*/optimizer.safetensors"))
    return (roles[0] if roles else place / "actor"), step_of(place) or 0  # of actor and critic the first


def _pointed(root: Path, which: str) -> str:
    """The checkpoint that a pointer names."""
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


def _beside(folder: Path) -> list[str]:
    return [p.name for p in folder.parent.iterdir() if p != folder] if folder.parent.is_dir() else []


def _check_base(adapter: Path | None, dry_run: bool) -> None:
    """Raises ConfigError where an adapter's base is a folder here, which nobody else has; logs it in a dry run."""
    base = None if adapter is None else json.loads(adapter.read_text()).get("base_model_name_or_path")
    if base is not None and (Path(base).is_absolute() or Path(base).exists()):
        told = (
            f"the adapter's base is the folder {base}, which nobody else has; send the whole model by merged=true, or "
            "train the adapter on a model of the hub"
        )
        if not dry_run:
            raise ConfigError(told)
        log.warning("%s", told)


def _files(model: Path, folder: Path) -> dict[str, Path]:
    """The files of a model by their names on the hub, each looked at. Raises CheckpointError where one is damaged."""
    found = {p.name: p for p in sorted(model.iterdir()) if p.is_file() and _MODEL.fullmatch(p.name)}
    if "generation_config.json" not in found and (folder / FINAL / "generation_config.json").is_file():
        found["generation_config.json"] = folder / FINAL / "generation_config.json"  # which checkpoints don't have
    needs = (
        {"config.json"} if "adapter_config.json" not in found else {"adapter_config.json", "adapter_model.safetensors"}
    )
    needs |= set() if "adapter_config.json" in found else _shards(model)
    if missing := sorted(needs - found.keys()):
        raise CheckpointError(f"{model} has no {', '.join(missing)}; the model is not whole")
    if not {"tokenizer.json", "tokenizer_config.json"} & found.keys():
        raise CheckpointError(f"{model} has no tokenizer; the model is not whole")
    for name, path in found.items():
        _check_file(name, path)
    return found


def _exported(model: Path, folder: Path) -> Path:
    """A checkpoint's whole weights, its fp32 masters, in the dtype that final/ would have: exported/ in the run's
    folder, made anew; the checkpoint itself where that is theirs, or holds an adapter alone.
    """
    try:
        own = read_json(model / "config.json")["dtype"]
    except (OSError, ValueError, KeyError, TypeError):
        return model  # no whole weights, or damaged ones, of which `_files` says more
    asked = (read_yaml(folder / "config.yaml").get("trainer") or {}).get("final_dtype", "auto")
    dtype = own if asked == "auto" else asked
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
    """An adapter merged into its base: merged/ in the run's folder, made anew.

    Raises: ConfigError: the model is no adapter, or its base can't be read.
    """
    if not (model / "adapter_config.json").is_file():
        raise ConfigError(f"merged=true: {model} is no adapter, so there is nothing to merge; leave it out")
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
    """The files that lie beside a model's weights."""
    for path in model.iterdir():
        others = "adapter" in path.name or path.name in ("config.json", "model.safetensors")
        if _MODEL.fullmatch(path.name) and not others and not (place / path.name).exists():
            shutil.copy(path, place / path.name)


def _shards(model: Path) -> set[str]:
    """The files that hold the weights, as the index says, if there is one."""
    index = model / "model.safetensors.index.json"
    if not index.is_file():
        return {"model.safetensors"}
    try:
        return set(read_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} can't be read: {error}; the model is not whole") from error


def _check_file(name: str, path: Path) -> None:
    """Raises CheckpointError for weights that are cut short, and JSON that is none."""
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


# ---- to whom ---------------------------------------------------------------------------------------------------------


def _api(token: str | None) -> Any:
    """What speaks with the hub. Raises ConfigError: it may not, or there is no token."""
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing can be sent; unset it")
    token = token or get_token()
    if token is None:
        raise ConfigError("there is no token for the hub; log in with `hf auth login`, or set HF_TOKEN")
    return HfApi(token=token, library_name="whet")


def _who(api: Any) -> dict[str, Any]:
    """Whose token it is. Raises ConfigError for one that is not valid or may not write."""
    try:
        found = dict(api.whoami())
    except Exception as error:
        raise _refused(error, "the token is not valid", "log in again: hf auth login") from error
    role = ((found.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise ConfigError(
            "the token may only read; make one that may write at https://huggingface.co/settings/tokens, and log in "
            "with it: hf auth login"
        )
    return found


def _repo(repo: str | None, folder: Path, who: Mapping[str, Any] | None) -> str:
    """The whole name. Raises ConfigError for one that the hub does not take, or under which the user may not write.

    Args: who: None = not asked: the user's own name is not known.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    name = folder.absolute().name if repo is None else repo
    whole = name if "/" in name else f"{'you' if who is None else who['name']}/{name}"
    try:
        validate_repo_id(whole)
    except HFValidationError as error:
        raise ConfigError(f"repo={whole!r} is not a name on the hub: {error}; write repo=user/name") from error
    owner = whole.partition("/")[0]
    if who is not None:
        mine = [who["name"], *(org["name"] for org in who.get("orgs") or ())]
        if owner not in mine:
            raise ConfigError(
                f"repo={whole!r}: the token is of {', '.join(mine)}, not of {owner}{nearest(owner, mine)}"
            )
    return whole


def _check_visible(api: Any, repo: str, private: bool) -> None:
    """Raises ConfigError where a repository of that name shows everybody what was to be private."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        there = api.repo_info(repo, repo_type="model")
    except RepositoryNotFoundError:
        return
    except Exception as error:
        raise _refused(error, f"the hub can't be asked for {repo}", "check the name and the token") from error
    if private and not there.private:
        raise ConfigError(f"{repo} is there and is public; set private=false to send to it, or give another repo")
    if not private and there.private:
        log.warning("%s is there and is private; it stays so", repo)


def _asked_licence(api: Any, base: str) -> dict[str, str]:
    """The licence that the hub knows of a model; {} where it knows none: the card then says so."""
    try:
        card = api.model_info(base).card_data
    except Exception as error:
        log.warning("the licence of %s could not be asked for: %s", base, error)
        return {}
    return licence_of_card(card.to_dict() if card is not None else {})


def _sent(
    api: Any, repo: str, files: Mapping[str, Path], card: str, *, private: bool, message: str, branch: str | None
) -> str:
    """Makes the repository where there is none, and one commit. Returns: its address."""
    from huggingface_hub import CommitOperationAdd

    content = {"README.md": card.encode(), **{name: str(path) for name, path in sorted(files.items())}}
    adds = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=held) for name, held in content.items()]
    try:
        api.create_repo(repo, private=private, repo_type="model", exist_ok=True)
        if branch is not None:
            api.create_branch(repo, branch=branch, exist_ok=True)
        made = api.create_commit(repo, operations=adds, commit_message=message, revision=branch)
    except Exception as error:
        raise _refused(
            error, f"{repo} did not take the model", "try again: what is there already is not sent twice"
        ) from error
    return str(made.commit_url)


def _refused(error: Exception, what: str, fix: str) -> WhetError:
    """An error of the hub's client in one message."""
    silent = hub_silence(error)
    if silent:
        return ConfigError(f"the hub does not answer ({silent}); look at the network, and send it again")
    return ConfigError(f"{what}: {(str(error).strip() or type(error).__name__).splitlines()[0]}; {fix}")

"""Saves and pushes the model, its metrics and its model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import yaml

from whet.hub.push import push_folder
from whet.util.install import DISTRIBUTION, REPOSITORY

__all__ = ["HubMixin", "model_card"]

_CARD_PACKAGES = ("whet", "torch", "transformers", "datasets")
"""Packages whose versions a model card lists."""


class HubMixin:
    """The methods of Trainer that save and push the model."""

    METHOD: ClassVar[str] = ""
    TRAINED_BY: ClassVar[str] = ""
    args: Any
    model: Any
    models: Any
    worker: Any
    processing_class: Any
    state: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model and the tokenizer in Hugging Face's format. Args: output_dir: None = args.output_dir."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.worker.export(folder if self.args.should_save else None, self.processing_class)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub("Model save")

    def save_user_files(self, folder: Path) -> None:
        """Calls a user's override of save_model for a checkpoint, so that the checkpoint has its files too."""
        if getattr(self.save_model, "__func__", None) is not HubMixin.save_model:
            self.save_model(str(folder), _internal_call=True)

    def save_state(self) -> None:
        """Writes trainer_state.json into output_dir."""
        if not self.args.should_save:
            return
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(str(Path(self.args.output_dir) / "trainer_state.json"))

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints metrics, sorted by name. Args: split: train, eval, ..."""
        if not self.args.should_log:
            return
        width = max(map(len, metrics), default=0)
        print(f"***** {split} metrics *****", *(f"  {n:<{width}} = {metrics[n]}" for n in sorted(metrics)), sep="\n")  # noqa: T201

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Writes metrics to {split}_results.json in output_dir. Args: combined: also add them to all_results.json."""
        if not self.args.should_save:
            return
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{split}_results.json").write_text(json.dumps(dict(metrics), indent=4, sort_keys=True))
        if combined:
            path = folder / "all_results.json"
            earlier = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**earlier, **metrics}, indent=4, sort_keys=True))

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Writes README.md into output_dir. Args: dataset_name: the data set's name on the hub. tags: further tags."""
        if not self.args.should_save:
            return
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        base = self.model.name_or_path or None
        tags = [tags] if isinstance(tags, str) else list(tags or ())
        name = model_name or self.args.hub_model_id or folder.resolve().name
        (folder / "README.md").write_text(model_card(name, self.TRAINED_BY or self.METHOD, base, dataset_name, tags))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card_fields: Any,
    ) -> str:
        """Saves the model, the tokenizer and the card in output_dir, and pushes them to the hub as one commit.

        Args:
            commit_message: the commit's message.
            blocking: has no effect; the call always waits for the push.
            token: None = hub_token, or the token of `hf auth login`.
            revision: the branch; None = hub_revision, or main.
            card_fields: create_model_card's arguments: model_name, dataset_name, tags.
        Returns: the commit's address.
        Raises: ConfigError: there is no token, or the hub can't be reached or rejects the push; nothing was sent.
        """
        args = self.args
        self.save_model(_internal_call=True)
        self.create_model_card(**card_fields)
        folder = Path(args.output_dir)

        def push() -> str:
            commit = push_folder(
                folder,
                args.hub_model_id or folder.resolve().name,
                (folder / "README.md").read_text(),
                private=args.hub_private_repo is not False,
                message=commit_message or "End of training",
                branch=revision or args.hub_revision,
                token=token or args.hub_token,
            )
            return str(commit.url)

        return self.models.ranks.call_on_writer(push)


def model_card(name: str, method: str, base: str | None, dataset: str | None, tags: Sequence[str]) -> str:
    """Returns the text of a model's README.md: the hub's metadata, the training method, and package versions.

    Args: name: the model's name. method: GRPO, ... base, dataset: names on the hub; a local base is left out. tags:
        further tags.
    """
    base = None if base is None or Path(base).exists() else base
    metadata = {
        "library_name": "transformers",
        "model_name": name,
        "tags": ["whet", method.lower().replace(" ", "-"), *tags],
        **({"base_model": base} if base else {}),
        **({"datasets": [dataset]} if dataset else {}),
    }
    of = f" of [{base}](https://huggingface.co/{base})" if base else ""
    on = f" on [{dataset}](https://huggingface.co/datasets/{dataset})" if dataset else ""
    versions = "\n".join(f"- {package}: {_version(package)}" for package in _CARD_PACKAGES)
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {name}\n\nA model trained{of}{on} by {method}, with "
        f"[whet]({REPOSITORY}).\n\n## Versions\n\n{versions}\n"
    )


def _version(package: str) -> str:
    try:
        return version(DISTRIBUTION if package == "whet" else package)
    except PackageNotFoundError:
        return "not installed"

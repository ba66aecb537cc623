"""The model card of a run, written from its folder: where the model comes from, how it was trained, how good it is.

model_card.md in the run folder, README.md on the hub. It names no folder of this machine: a base or a data set that
lies here and has no name on the hub is called by its last part. Its front matter is what the hub reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.config import read_yaml
from whet.config.data import source_paths
from whet.config.resume import command_of
from whet.errors import ConfigError
from whet.hub.base_model import find_base_model, find_licence, hub_name, read_card_metadata, trained_with_chat_template
from whet.observe.environment import read_environment
from whet.storage.files import finite_or_none, read_json, write_atomic
from whet.storage.run_folder import read_metrics
from whet.util.install import DISTRIBUTION

__all__ = ["CARD", "CardFacts", "make_model_card", "read_card_facts", "write_model_card"]

CARD = "model_card.md"
"""Its name in a run folder."""
_PIECES = ("advantages", "loss", "aggregation")
_VERSIONS = ("whet", "torch", "transformers", "tokenizers", "datasets", "python")
_SHOWN = ("reward", "accuracy", "loss", "completions/mean_length", "completions/clipped_ratio")
"""Numbers of an evaluation that a card shows, besides those that begin as follows."""
_OF_THEIR_OWN = ("cpo", "ipo", "kto", "orpo", "simpo")
"""Losses of preference training that are known by names of their own."""
_BEGINNINGS = ("pass@", "majority@")


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card says. Made by `read_card_facts`."""

    method: str
    """GRPO, PPO, SFT, ..., or "" where the configuration doesn't tell."""
    step: int
    """Of the model."""
    base: str | None
    """The base's name on the hub."""
    base_text: str
    """What the base is called."""
    datasets: Sequence[str] = ()
    """The names on the hub of the data sets that it was trained and evaluated on."""
    licence: Mapping[str, str] = field(default_factory=dict)
    """As hub.base_model.find_licence gives it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's configuration."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The run's environment.json."""
    rows: Sequence[Mapping[str, Any]] = ()
    """Its metrics."""
    evaluations: Sequence[Mapping[str, Any]] = ()
    """Further evaluations, as results.json of `whet eval` has them."""
    curves: bool = False
    """Whether curves.png lies beside the card."""
    pipeline: str = "text-generation"
    """What the model does, in the hub's words."""
    adapter: bool = False
    """Whether the weights are an adapter's alone."""
    templated: bool = False
    """Whether prompts went through a chat template."""


def read_card_facts(
    folder: str | Path, *, step: int | None = None, evaluations: Sequence[str | Path] = (), **changes: Any
) -> CardFacts:
    """What the folder of a run tells for its card.

    Args: folder: the run's. step: of the model; None = the last. evaluations: folders of `whet eval`, whose results are
        shown too. changes: further fields that are known otherwise.
    Raises: ConfigError: the folder is not a run's, or one of the others holds no results.
    """
    place = Path(folder)
    if not (place / "config.yaml").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml")
    settings, rows = read_yaml(place / "config.yaml"), read_metrics(place)
    model = next((m for name in ("actor", "reward_model") if (m := _section(settings, name).get("model"))), None)
    base, datasets = find_base_model(model), _datasets(_section(settings, "data"))
    if noted := read_card_metadata(place / CARD):  # written where the paths of the configuration led somewhere
        base, datasets = noted.get("base_model"), tuple(noted.get("datasets", ()))
    steps = [row["step"] for row in rows if row["mode"] == "train"]
    known = {
        "method": _method(settings),
        "step": max(steps, default=0) if step is None else step,
        "base": base,
        "base_text": base or (f"a local model, {Path(model).name}" if model else "a model given from Python"),
        "datasets": datasets,
        "licence": find_licence(model) or (find_licence(base) if base else {}),
        "settings": settings,
        "environment": read_environment(place),
        "rows": rows,
        "evaluations": [_results(path) for path in evaluations],
        "curves": (place / "curves.png").is_file(),
        "templated": _templated(place),
        "pipeline": "text-classification" if _method(settings) == "RM" else "text-generation",
    }
    return CardFacts(**{**known, **changes})


def _templated(folder: Path) -> bool:
    """Whether prompts went through a chat template: as the run says, else whether its tokenizer has one."""
    said = trained_with_chat_template(folder)
    return (folder / "final" / "chat_template.jinja").is_file() if said is None else said


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}


def _datasets(data: Mapping[str, Any]) -> tuple[str, ...]:
    names = (*source_paths(data.get("path")), *source_paths(data.get("eval_path")))
    return tuple(dict.fromkeys(name for path in names if (name := hub_name(path))))


def _method(settings: Mapping[str, Any]) -> str:
    """What a configuration trains by, from the keys of its algorithm."""
    command = command_of(settings)
    kind = str(_section(settings, "algo").get("loss_type"))
    return (kind if command == "dpo" and kind in _OF_THEIR_OWN else command).upper()


def _results(path: str | Path) -> dict[str, Any]:
    """The results of an evaluation. Args: path: its folder, or the file itself."""
    place = Path(path)
    place = place / "results.json" if place.is_dir() else place
    try:
        found = read_json(place)
        if not isinstance(found, dict) or not isinstance(found.get("results"), dict):
            raise ValueError("it holds no results")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not an evaluation: {error}; give a folder that `whet eval` has written"
        ) from error
    return found


def make_model_card(facts: CardFacts, *, title: str) -> str:
    """The card as Markdown with its front matter.

    Args: facts: as `read_card_facts` gives them. title: of the model.

    >>> facts = CardFacts(method="GRPO", step=3, base="a/b", base_text="a/b", licence={"license": "mit"})
    >>> print(make_model_card(facts, title="c").split("# c")[0])
    ---
    base_model: a/b
    library_name: transformers
    license: mit
    pipeline_tag: text-generation
    tags:
    - whet
    - grpo
    - reinforcement-learning
    ---
    <BLANKLINE>
    <BLANKLINE>
    """
    parts = [
        f"---\n{_front_matter(facts, title)}\n---",
        f"# {title}\n\n{_first(facts)}",
        _training(facts),
        "![Curves of the run](curves.png)" if facts.curves else "",
        _evaluation(facts),
        _use(facts, title),
        _versions(facts),
        _licence(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_model_card(folder: str | Path) -> Path:
    """Writes the card of a run into its folder. Raises: ConfigError: it is not the folder of a run."""
    place = Path(folder)
    text = make_model_card(read_card_facts(place), title=place.absolute().name)
    write_atomic(place / CARD, text.encode("utf-8", "replace"))
    return place / CARD


# ---- its parts -------------------------------------------------------------------------------------------------------


def _front_matter(facts: CardFacts, title: str) -> str:
    from huggingface_hub import ModelCardData

    learns = {"GRPO": ["reinforcement-learning"], "PPO": ["reinforcement-learning"]}.get(facts.method, [])
    results = _results_for_hub(facts)
    more: dict[str, Any] = {**facts.licence, **({"model_name": title, "eval_results": results} if results else {})}
    made = ModelCardData(
        base_model=facts.base,
        datasets=list(facts.datasets) or None,
        library_name="peft" if facts.adapter else "transformers",
        pipeline_tag=facts.pipeline,
        tags=["whet", *([facts.method.lower()] if facts.method else []), *learns],
        **more,
    )
    found = {name: value for name, value in sorted(made.to_dict().items()) if value is not None}
    return _yaml(found)


def _results_for_hub(facts: CardFacts) -> list[Any]:
    """The evaluations as the hub reads them (model-index): the run's own last one, and those of `whet eval`."""
    from huggingface_hub import EvalResult

    def of(data: Mapping[str, Any], values: Mapping[str, Any], known: Sequence[str] | None = None) -> list[Any]:
        path = next(iter(source_paths(data.get("eval_path") or data.get("path"))), "")
        kind = hub_name(path)
        kind = kind if known is None or kind in known else None
        name = kind or Path(path).name or "the evaluation data of the run"
        split = data.get("eval_split") or (data.get("split") if not data.get("eval_path") else None)
        numbers = {metric: finite_or_none(value) for metric, value in values.items()}
        return [
            EvalResult(
                task_type=facts.pipeline,
                dataset_type=kind or name,
                dataset_name=name,
                dataset_split=split,
                metric_type=metric,
                metric_name=metric,
                metric_value=round(value, 6),
            )
            for metric, value in numbers.items()
            if value is not None
        ]

    rows = [row for row in facts.rows if row["mode"] == "eval" and row["step"] <= facts.step]
    own = {n: x for n, x in rows[-1].items() if n in _SHOWN or n.startswith(_BEGINNINGS)} if rows else {}
    found = of(_section(facts.settings, "data"), own, facts.datasets)
    for one in facts.evaluations:
        values = {n: x.get("value") for n, x in one["results"].items() if isinstance(x, Mapping)}
        found += of(_section(one, "data"), values)
    return found


def _yaml(found: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(found), sort_keys=False, allow_unicode=True).rstrip()


def _first(facts: CardFacts) -> str:
    base = f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.base else facts.base_text
    by = f" by {facts.method}" if facts.method else ""
    return f"Trained{by} with whet from {base}: step {facts.step} of the run."


def _training(facts: CardFacts) -> str:
    """What the model was trained on, and how."""
    get = lambda section, name: _section(facts.settings, section).get(name)
    passes = _section(facts.environment, "passes")
    optim = _section(_section(facts.settings, "actor") or _section(facts.settings, "reward_model"), "optim")
    rewards = _rewards(facts)
    lines = {
        "data": _data(_section(facts.settings, "data"), facts.datasets),
        "steps": f"{facts.step}, each of {get('data', 'batch_size')} rows" if get("data", "batch_size") else facts.step,
        "completions of each prompt": get("algo", "num_generations"),
        "longest completion": get("rollout", "max_tokens_to_generate"),
        "rewards": ", ".join(rewards),
        **{name: passes.get(name) for name in _PIECES},
        "optimizer": f"{optim['name']}{_rate(facts, optim)}, {optim['schedule']}" if "name" in optim else "",
        "seed": get("trainer", "seed"),
    }
    rows = [f"| {name} | {_cell(value)} |" for name, value in lines.items() if value not in (None, "")]
    return "\n".join(["## Training", "", "| | |", "|---|---|", *rows])


def _rate(facts: CardFacts, optim: Mapping[str, Any]) -> str:
    """The learning rate: what was set, else the highest that the rows have, if any."""
    if optim.get("lr") is not None:
        return f", lr {optim['lr']:g}"
    rates = [row[name] for row in facts.rows for name in ("learning_rate", "actor/learning_rate") if name in row]
    return f", lr {max(rates):g}" if rates else ""


def _data(data: Mapping[str, Any], on_hub: Sequence[str]) -> str:
    paths = source_paths(data.get("path"))
    if not paths:
        return "given from Python"
    link = lambda hub: f"[{hub}](https://huggingface.co/datasets/{hub})"
    name = ", ".join(link(hub) if (hub := hub_name(path)) in on_hub else Path(path).name for path in paths)
    subset = f", {data['subset']}" if data.get("subset") else ""
    return f"{name}{subset}, split {data['split']}" if data.get("split") else name + subset


def _rewards(facts: CardFacts) -> list[str]:
    """The reward functions, with their weights where the configuration has them."""
    row = facts.rows[0] if facts.rows else {}
    names = [n.removeprefix("rewards/") for n in row if n.startswith("rewards/") and f"{n}/std" in row]
    weights = facts.settings.get("reward")
    by_name = {str(k).rpartition(":")[2]: v for k, v in weights.items()} if isinstance(weights, Mapping) else {}
    return [f"{n} (weight {by_name[n]:g})" if n in by_name else n for n in names]


def _evaluation(facts: CardFacts) -> str:
    """The run's own evaluations, before and at the model's step, and those of `whet eval`."""
    rows = [row for row in facts.rows if row["mode"] == "eval" and row["step"] <= facts.step]
    parts = []
    if rows:
        first, last = rows[0], rows[-1]
        names = [n for n in _SHOWN if n in last] + [n for n in last if n.startswith(_BEGINNINGS)]
        lines = [f"| {n} | {_number(first.get(n))} | {_number(last.get(n))} |" for n in names]
        head = [f"| metric | step {first['step']} | step {last['step']} |", "|---|---|---|"]
        dtype = _section(facts.environment, "compute_dtype").get("actor")
        parts.append("\n".join([f"On the evaluation data of the run{_computed_in(dtype)}:", "", *head, *lines]))
    parts += [_further(found) for found in facts.evaluations]
    return "\n\n".join(["## Evaluation", *parts]) if parts else ""


def _further(found: Mapping[str, Any]) -> str:
    """A table of `whet eval`."""
    by_source = _section(found, "by_source")
    columns = {"all": found["results"], **(by_source if len(by_source) > 1 else {})}
    paths, sampling = source_paths(_section(found, "data").get("path")), _section(found, "sampling")
    named = ", ".join(hub_name(path) or Path(path).name for path in paths) or "data"
    drawn = f"{sampling.get('num_generations')} completions of each prompt at temperature {sampling.get('temperature')}"
    lines = [
        f"| {n} | " + " | ".join(_with_error(of.get(n)) for of in columns.values()) + " |" for n in found["results"]
    ]
    head = ["| metric | " + " | ".join(map(_cell, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
    about = f"On {found.get('prompts')} prompts of {named}{_computed_in(found.get('dtype'))}, {drawn}"
    about += "; ± is the standard error:"
    return "\n".join([about, "", *head, *lines])


def _computed_in(dtype: Any) -> str:
    return f", in {_cell(dtype)}" if isinstance(dtype, str) else ""


def _with_error(one: Any) -> str:
    if not isinstance(one, Mapping):
        return "-"
    error = finite_or_none(one.get("se"))
    return _number(one.get("value")) + (f" ± {error:.2g}" if error is not None else "")


def _use(facts: CardFacts, title: str) -> str:
    if facts.adapter or facts.pipeline != "text-generation":
        return ""
    asked, answer = '"..."', '["generated_text"]'
    if facts.templated:
        system = _section(facts.settings, "data").get("system_prompt")
        before = f"{{'role': 'system', 'content': {system!r}}}, " if system else ""
        asked, answer = f"[{before}{{'role': 'user', 'content': '...'}}]", '["generated_text"][-1]["content"]'
    lines = (
        "from transformers import pipeline",
        "",
        f'generate = pipeline("text-generation", "{title}")',
        f"print(generate({asked}, max_new_tokens=256)[0]{answer})",
    )
    return "\n".join(["## Use", "", "```python", *lines, "```"])


def _versions(facts: CardFacts) -> str:
    versions = _section(facts.environment, "versions")
    called = {"whet": DISTRIBUTION}
    said = ", ".join(f"{called.get(name, name)} {versions[name]}" for name in _VERSIONS if versions.get(name))
    return f"## Versions\n\n{said}" if said else ""


def _licence(facts: CardFacts) -> str:
    if facts.licence:
        said = facts.licence.get("license_name") or facts.licence.get("license")
        link = facts.licence.get("license_link")
        return f"## Licence\n\nThat of the base model: {f'[{said}]({link})' if link else said}."
    where = f"see [its page](https://huggingface.co/{facts.base})" if facts.base else "ask whoever made it"
    return f"## Licence\n\nThe licence of the base model is not known here: {where}."


def _number(value: Any) -> str:
    found = finite_or_none(value)
    return "-" if found is None else f"{found:.4g}"


def _cell(value: Any) -> str:
    """A value in a cell of a table."""
    return str(value).replace("|", "\\|").replace("\n", " ")

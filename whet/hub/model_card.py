"""The model card of a run, written from its folder: the base model, the training and the evaluations.

It is model_card.md in the run folder and README.md on the hub. It has no local paths: a base or a data set without a
name on the hub is called by the last part of its path. The hub reads its front matter.
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
_PASSES = ("advantages", "loss", "aggregation")
_VERSIONS = ("whet", "torch", "transformers", "tokenizers", "datasets", "python")
_SCORES = ("accuracy", "pass@", "majority@", "rewards/accuracies", "reward", "loss")
"""Metrics that say how good a model is, best known first; a name that ends in @ is a prefix."""
_LENGTHS = ("completions/mean_length", "completions/clipped_ratio")
"""Further metrics in the card's table of evaluations; the hub does not get them."""
_NAMED_LOSSES = ("cpo", "ipo", "kto", "orpo", "simpo")
"""Losses of preference training that are known as methods of their own."""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """The facts of a card; `read_card_facts` reads them."""

    method: str
    """GRPO, PPO, SFT, ..., or "" if the configuration doesn't tell."""
    step: int
    """The step of the model."""
    base: str | None
    """The name of the base on the hub."""
    base_text: str
    """The name of the base in the text."""
    datasets: Sequence[str] = ()
    """The names on the hub of the data sets for training and evaluation."""
    licence: Mapping[str, str] = field(default_factory=dict)
    """From hub.base_model.find_licence."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's configuration."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The run's environment.json."""
    rows: Sequence[Mapping[str, Any]] = ()
    """The run's metrics."""
    evaluations: Sequence[Mapping[str, Any]] = ()
    """Further evaluations: results.json of `whet eval`."""
    curves: bool = False
    """Whether curves.png is beside the card."""
    pipeline: str = "text-generation"
    """The pipeline tag of the hub."""
    adapter: bool = False
    """Whether the weights are only an adapter."""
    templated: bool = False
    """Whether prompts were put into a chat template."""


def read_card_facts(
    folder: str | Path, *, step: int | None = None, evaluations: Sequence[str | Path] = (), **changes: Any
) -> CardFacts:
    """Reads the facts for a card from the folder of a run.

    Args: folder: of the run. step: of the model; None = the last. evaluations: folders of `whet eval` with results for
        the card. changes: fields that replace what the folder says.
    Raises: ConfigError: the folder is not a run's, or a folder of an evaluation has no results.
    """
    place = Path(folder)
    if not (place / "config.yaml").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml")
    settings, rows = read_yaml(place / "config.yaml"), read_metrics(place)
    model = next((m for name in ("actor", "reward_model") if (m := _section(settings, name).get("model"))), None)
    base, datasets = find_base_model(model), _datasets(_section(settings, "data"))
    if card := read_card_metadata(place / CARD):  # written where the configuration's relative paths were valid
        base, datasets = card.get("base_model"), tuple(card.get("datasets", ()))
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
        "templated": _is_templated(place),
        "pipeline": "text-classification" if _method(settings) == "RM" else "text-generation",
    }
    return CardFacts(**{**known, **changes})


def _is_templated(folder: Path) -> bool:
    """Returns whether prompts were put into a chat template: by the configuration, else whether the tokenizer
    has one.
    """
    configured = trained_with_chat_template(folder)
    return (folder / "final" / "chat_template.jinja").is_file() if configured is None else configured


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = settings.get(name)
    return section if isinstance(section, Mapping) else {}


def _datasets(data: Mapping[str, Any]) -> tuple[str, ...]:
    names = (*source_paths(data.get("path")), *source_paths(data.get("eval_path")))
    return tuple(dict.fromkeys(name for path in names if (name := hub_name(path))))


def _method(settings: Mapping[str, Any]) -> str:
    """Returns the training method of a configuration, by the keys of its algorithm."""
    command = command_of(settings)
    kind = str(_section(settings, "algo").get("loss_type"))
    return (kind if command == "dpo" and kind in _NAMED_LOSSES else command).upper()


def _results(path: str | Path) -> dict[str, Any]:
    """Reads the results of an evaluation. Args: path: its folder, or results.json itself."""
    place = Path(path)
    place = place / "results.json" if place.is_dir() else place
    try:
        results = read_json(place)
        if not isinstance(results, dict) or not isinstance(results.get("results"), dict):
            raise ValueError("it has no results")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not an evaluation: {error}; give a folder that `whet eval` wrote") from error
    return results


def make_model_card(facts: CardFacts, *, title: str, model: str | None = None) -> str:
    """Returns the card as Markdown with its front matter.

    Args: facts: from `read_card_facts`. title: of the card. model: the name or path that loads the model;
        None = the title.

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
        _use(facts, model or title),
        _versions(facts),
        _licence(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_model_card(folder: str | Path) -> Path:
    """Writes the card of a run into its folder. Raises: ConfigError: it is not the folder of a run."""
    place = Path(folder)
    name = place.absolute().name
    text = make_model_card(read_card_facts(place), title=name, model=f"{name}/final")
    write_atomic(place / CARD, text.encode("utf-8", "replace"))
    return place / CARD


# ---- its parts -------------------------------------------------------------------------------------------------------


def _front_matter(facts: CardFacts, title: str) -> str:
    import yaml
    from huggingface_hub import ModelCardData

    kind = ["reinforcement-learning"] if facts.method in ("GRPO", "PPO") else []
    results = _results_for_hub(facts)
    more: dict[str, Any] = {**facts.licence, **({"model_name": title, "eval_results": results} if results else {})}
    data = ModelCardData(
        base_model=facts.base,
        datasets=list(facts.datasets) or None,
        library_name="peft" if facts.adapter else "transformers",
        pipeline_tag=facts.pipeline,
        tags=["whet", *([facts.method.lower()] if facts.method else []), *kind],
        **more,
    )
    metadata = {name: value for name, value in sorted(data.to_dict().items()) if value is not None}
    return yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).rstrip()


def _results_for_hub(facts: CardFacts) -> list[Any]:
    """Returns the evaluations for the hub's model-index: the run's own last one, and those of `whet eval`."""
    from huggingface_hub import EvalResult

    def results_of(data: Mapping[str, Any], values: Mapping[str, Any], known: Sequence[str] | None = None) -> list[Any]:
        path = next(iter(source_paths(data.get("eval_path") or data.get("path"))), "")
        kind = hub_name(path)
        kind = kind if known is None or kind in known else None
        name = kind or Path(path).name or "the evaluation data of the run"
        split = data.get("eval_split") or (data.get("split") if not data.get("eval_path") else None)
        numbers = {metric: finite_or_none(values[metric]) for metric in dict.fromkeys([*_score_names(values), *values])}
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
    own = {name: rows[-1][name] for name in _score_names(rows[-1])} if rows else {}
    results = results_of(_section(facts.settings, "data"), own, facts.datasets)
    for evaluation in facts.evaluations:
        values = {n: x.get("value") for n, x in evaluation["results"].items() if isinstance(x, Mapping)}
        results += results_of(_section(evaluation, "data"), values)
    return results


def _score_names(row: Mapping[str, Any]) -> list[str]:
    """Returns the metrics of a row that say how good the model is, in the order of _SCORES."""
    return [n for score in _SCORES for n in row if n == score or (score.endswith("@") and n.startswith(score))]


def _first(facts: CardFacts) -> str:
    base = f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.base else facts.base_text
    by = f" by {facts.method}" if facts.method else ""
    return f"Trained{by} with whet from {base}: step {facts.step} of the run."


def _training(facts: CardFacts) -> str:
    """Returns the table of the training data and settings."""
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
        **{name: passes.get(name) for name in _PASSES},
        "optimizer": f"{optim['name']}{_rate(facts, optim)}, {optim['schedule']}" if "name" in optim else "",
        "seed": get("trainer", "seed"),
    }
    rows = [f"| {name} | {_cell(value)} |" for name, value in lines.items() if value not in (None, "")]
    return "\n".join(["## Training", "", "| | |", "|---|---|", *rows])


def _rate(facts: CardFacts, optim: Mapping[str, Any]) -> str:
    """Returns the learning rate: what was set, else the highest that the rows have, if any."""
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
    """Returns the reward functions, with their weights if the configuration has them."""
    row = facts.rows[0] if facts.rows else {}
    names = [n.removeprefix("rewards/") for n in row if n.startswith("rewards/") and f"{n}/std" in row]
    weights = facts.settings.get("reward")
    by_name = {str(k).rpartition(":")[2]: v for k, v in weights.items()} if isinstance(weights, Mapping) else {}
    return [f"{n} (weight {by_name[n]:g})" if n in by_name else n for n in names]


def _evaluation(facts: CardFacts) -> str:
    """Returns the run's own evaluations, before and at the model's step, and those of `whet eval`."""
    rows = [row for row in facts.rows if row["mode"] == "eval" and row["step"] <= facts.step]
    parts = []
    if rows:
        first, last = rows[0], rows[-1]
        names = [*_score_names(last), *(n for n in _LENGTHS if n in last)]
        lines = [f"| {n} | {_number(first.get(n))} | {_number(last.get(n))} |" for n in names]
        head = [f"| metric | step {first['step']} | step {last['step']} |", "|---|---|---|"]
        dtype = _section(facts.environment, "compute_dtype").get("actor")
        unit = "prompts" if "prompts/count" in last else "rows"
        count = finite_or_none(last.get(f"{unit}/count"))
        data = "the evaluation data of the run"
        about = f"On {data}" if count is None else f"On {count:.0f} {unit} of {data}"
        rollout = _section(facts.settings, "rollout")
        temperature = _section(rollout, "eval").get("temperature", rollout.get("temperature"))
        if unit == "prompts" and temperature is not None:
            about += f", at temperature {_cell(temperature)}"
        parts.append("\n".join([f"{about}{_computed_in(dtype)}:", "", *head, *lines]))
    parts += [_eval_table(results) for results in facts.evaluations]
    return "\n\n".join(["## Evaluation", *parts]) if parts else ""


def _eval_table(found: Mapping[str, Any]) -> str:
    """Returns a table of the results of `whet eval`."""
    by_source = _section(found, "by_source")
    columns = {"all": found["results"], **(by_source if len(by_source) > 1 else {})}
    paths, sampling = source_paths(_section(found, "data").get("path")), _section(found, "sampling")
    names = ", ".join(hub_name(path) or Path(path).name for path in paths) or "data"
    drawn = f"{sampling.get('num_generations')} completions of each prompt at temperature {sampling.get('temperature')}"
    lines = [
        f"| {n} | " + " | ".join(_with_error(of.get(n)) for of in columns.values()) + " |" for n in found["results"]
    ]
    head = ["| metric | " + " | ".join(map(_cell, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
    about = f"On {found.get('prompts')} prompts of {names}{_computed_in(found.get('dtype'))}, {drawn}"
    about += "; ± is the standard error:"
    return "\n".join([about, "", *head, *lines])


def _computed_in(dtype: Any) -> str:
    return f", in {_cell(dtype)}" if isinstance(dtype, str) else ""


def _with_error(one: Any) -> str:
    if not isinstance(one, Mapping):
        return "-"
    error = finite_or_none(one.get("se"))
    return _number(one.get("value")) + (f" ± {error:.2g}" if error is not None else "")


def _use(facts: CardFacts, model: str) -> str:
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
        f'generate = pipeline("text-generation", "{model}")',
        f"print(generate({asked}, max_new_tokens=256)[0]{answer})",
    )
    return "\n".join(["## Use", "", "```python", *lines, "```"])


def _versions(facts: CardFacts) -> str:
    versions = _section(facts.environment, "versions")
    packages = {"whet": DISTRIBUTION}
    text = ", ".join(f"{packages.get(name, name)} {versions[name]}" for name in _VERSIONS if versions.get(name))
    return f"## Versions\n\n{text}" if text else ""


def _licence(facts: CardFacts) -> str:
    if facts.licence:
        licence = facts.licence.get("license_name") or facts.licence.get("license")
        link = facts.licence.get("license_link")
        return f"## Licence\n\nThat of the base model: {f'[{licence}]({link})' if link else licence}."
    where = f"see [its page](https://huggingface.co/{facts.base})" if facts.base else "ask whoever made it"
    return f"## Licence\n\nThe licence of the base model is not known here: {where}."


def _number(value: Any) -> str:
    number = finite_or_none(value)
    return "-" if number is None else f"{number:.4g}"


def _cell(value: Any) -> str:
    """Returns a value in a cell of a table."""
    return str(value).replace("|", "\\|").replace("\n", " ")

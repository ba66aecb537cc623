"""Giving a model away: what is sent, what is refused before anything is sent, and the card. The hub is a stand-in."""

import dataclasses
import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
import yaml
from helpers import cluster, rows, tiny_model
from huggingface_hub import ModelCardData
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load
from transformers import AutoModelForCausalLM, AutoTokenizer

from whet.cli import main
from whet.config import CheckpointingOptions, DataConfig, GRPOConfig, LoraConfig, RLTrainingConfig
from whet.data.tokenizer import byte_tokenizer
from whet.errors import CheckpointError, ConfigError
from whet.hub import push
from whet.hub.base_model import find_base_model, find_licence, hub_name
from whet.hub.model_card import CARD, CardFacts, make_model_card, read_card_facts, write_model_card
from whet.hub.push import push_to_hub
from whet.learners.grpo import GRPOLearner
from whet.models.load import load_model, save_model
from whet.models.lora import adapter_tensors, merged_model
from whet.run import builtin_observers
from whet.run.builtin_observers import PushToHub, check_push_to_hub


class Hub:
    """What is asked of HfApi, noted."""

    token = "secret"

    def __init__(self, *, role="write", repos=None, licence=None, fails=None):
        self.role, self.repos, self.licence, self.fails = role, dict(repos or {}), licence, fails
        self.calls, self.sent = [], {}

    def whoami(self):
        self.calls.append("whoami")
        access = {"accessToken": {"role": self.role}}
        return {"name": "me", "orgs": [{"name": "lab"}], "auth": access}

    def repo_info(self, repo, *, repo_type):
        if repo not in self.repos:
            request = httpx.Request("GET", "https://huggingface.co")
            raise RepositoryNotFoundError("none", response=httpx.Response(404, request=request))
        return SimpleNamespace(private=self.repos[repo])

    def model_info(self, name):
        self.calls.append(f"model_info {name}")
        card = ModelCardData(license=self.licence) if self.licence else None
        return SimpleNamespace(card_data=card)

    def create_repo(self, repo, *, private, repo_type, exist_ok):
        self.calls.append(f"create_repo {repo} {private}")

    def create_branch(self, repo, *, branch, exist_ok):
        self.calls.append(f"create_branch {branch}")

    def create_commit(self, repo, *, operations, commit_message, revision):
        if self.fails:
            raise self.fails
        self.calls.append(f"commit {commit_message}")
        for add in operations:
            held = add.path_or_fileobj
            self.sent[add.path_in_repo] = held if isinstance(held, bytes) else open(held, "rb").read()
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo}/commit/1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three steps, the second of which is the best."""
    place = tmp_path_factory.mktemp("given")
    tiny_model(num_hidden_layers=1).save_pretrained(place / "base")
    byte_tokenizer().save_pretrained(place / "base")
    made = cluster(
        str(place / "base"),
        run_dir=str(place / "sums"),
        max_steps=3,
        eval_every_n_steps=1,
        keep_best="reward",
        checkpointing_options=CheckpointingOptions(save_interval_steps=1, max_to_keep=1),
        rollout={"max_tokens_to_generate": 4, "eval": {"temperature": 0.0}},
    )
    calls = []

    def score(completions, mode):
        calls.append(mode)
        right = calls.count("eval") == 3 and mode == "eval"  # the evaluation after step 2
        return [float(right)] * len(completions)

    return GRPOLearner(
        made, GRPOConfig(num_generations=2, beta=0.0), score, data=DataConfig(batch_size=2, shuffle=False)
    ).train(rows(8), rows(2))


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of its folder."""
    return shutil.copytree(finished.folder.path, tmp_path / "sums")


def front_matter(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_what_is_sent_is_the_model_its_tokenizer_and_the_card(finished, tmp_path):
    hub = Hub()
    done = finished.push_to_hub("sums", api=hub)
    assert done.repo == "me/sums" and done.private and done.url == "https://huggingface.co/me/sums/commit/1"
    assert hub.calls == ["whoami", "create_repo me/sums True", "commit step 3, by whet"]
    assert {n: len(content) for n, content in hub.sent.items()} == done.files
    final = {p.name for p in (finished.folder.path / "final").iterdir()} - {"run.json"}
    assert hub.sent.keys() == final | {"README.md"}
    for name, content in hub.sent.items():
        (tmp_path / name).write_bytes(content)
    sent = AutoModelForCausalLM.from_pretrained(tmp_path)
    trained = AutoModelForCausalLM.from_pretrained(finished.folder.path / "final")
    assert all(torch.equal(a, b) for a, b in zip(sent.parameters(), trained.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path)("ab").input_ids == list(b"ab")
    here = str(finished.folder.path.parent)
    assert not any(here.encode() in content for content in hub.sent.values())  # no path of this machine


def test_the_best_and_a_checkpoint_by_name_are_sent_without_the_optimizer(finished, tmp_path):
    hub = Hub()
    done = finished.push_to_hub("lab/sums", which="best", private=False, branch="best", api=hub)
    assert "step 2 of the run" in done.card and "| reward | 0 | 1 |" in done.card
    assert hub.calls[1:] == ["create_repo lab/sums False", "create_branch best", "commit step 2, by whet"]
    assert not {"optimizer.safetensors", "state.pt", "run.pt"} & hub.sent.keys()
    assert "generation_config.json" in hub.sent
    for name, content in hub.sent.items():
        (tmp_path / name).write_bytes(content)
    actor = finished.folder.path / "checkpoints" / "step-000002" / "actor"
    sent, kept = AutoModelForCausalLM.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(actor)
    assert all(torch.equal(a, b) for a, b in zip(sent.parameters(), kept.parameters(), strict=True))
    named = finished.push_to_hub("lab/sums", which="step-000002", private=False, dry_run=True)
    assert named.card == done.card and named.files == done.files


def test_a_checkpoint_is_sent_in_the_dtype_that_final_has(folder):
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["trainer"]["final_dtype"] = "bfloat16"
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    hub = Hub()
    push_to_hub(folder, "sums", which="best", api=hub)
    assert {t.dtype for t in load(hub.sent["model.safetensors"]).values()} == {torch.bfloat16}


def test_an_adapter_is_sent_merged_in_the_dtype_of_its_base(folder, tmp_path):
    pytest.importorskip("peft")
    tiny_model(num_hidden_layers=1).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    loaded = load_model(str(tmp_path / "base"), lora=LoraConfig(r=2))
    with torch.no_grad():
        for name, tensor in adapter_tensors(loaded.module).items():
            tensor.fill_(0.1 if "lora_B" in name else 0.5)
    for name in ("config.json", "model.safetensors"):
        (folder / "final" / name).unlink()
    save_model(loaded, None, folder / "final")
    hub = Hub()
    push_to_hub(folder, "sums", merged=True, api=hub)
    assert not any("adapter" in name for name in hub.sent) and "tokenizer.json" in hub.sent
    want = {name: p.to(torch.bfloat16) for name, p in merged_model(loaded.module).named_parameters()}
    sent = load(hub.sent["model.safetensors"])
    assert sent and all(torch.equal(tensor, want[name]) for name, tensor in sent.items())


def test_a_dry_run_asks_nobody_and_sends_the_same(finished, capsys):
    hub = Hub()
    dry = finished.push_to_hub("me/sums", dry_run=True, api=hub)
    assert hub.calls == [] and dry.url is None
    assert finished.push_to_hub("me/sums", api=hub).files == dry.files
    assert main(["push", str(finished.folder.path), "repo=me/sums", "dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("would be sent to me/sums (private):") and dry.card in out
    assert all(name in out for name in dry.files)


@pytest.mark.parametrize(
    ("given", "hub", "said"),
    [
        ({"repo": "a b"}, {}, "is not a name on the hub"),
        ({"repo": "other/x"}, {}, "the token belongs to me, lab, not to other"),
        ({"repo": "lap/x"}, {}, "did you mean lab"),
        ({}, {"role": "read"}, "the token may only read"),
        ({}, {"repos": {"me/sums": False}}, "me/sums exists and is public; set private=false"),
        (
            {"which": "best"},
            {"fails": ConnectionError("refused")},
            r"the hub does not answer \(refused\); check the network",
        ),
        ({}, {"fails": ValueError("too large")}, "me/sums did not accept the model: ValueError: too large"),
        ({"which": "bst"}, {}, "which='bst': there is no .*; there are final, step-000002, step-000003"),
        ({"which": "before_stop"}, {}, "the run had no trainer.stop_when"),
        ({"merged": True}, {}, "is not an adapter"),
        ({"evals": ["nowhere"]}, {}, "nowhere is not an evaluation"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_sent(finished, given, hub, said):
    hub = Hub(**hub)
    with pytest.raises(ConfigError, match=said):
        finished.push_to_hub(**{"repo": "me/sums", "api": hub, **given})
    assert hub.sent == {}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "final" / "model.safetensors").write_bytes(b"\x10" + bytes(20)), "can't be read"),
        (lambda f: (f / "final" / "model.safetensors").unlink(), "has no model.safetensors; the model is not whole"),
        (lambda f: (f / "final" / "config.json").write_text("{"), "can't be read"),
        (lambda f: [p.unlink() for p in (f / "final").glob("tokenizer*")], "has no tokenizer"),
        (lambda f: (f / "final" / "run.json").unlink(), "can't be read"),
        (
            lambda f: (f / "final" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.x"}}'),
            r"has no model-2\.x",
        ),
    ],
)
def test_a_model_that_is_not_whole_is_not_sent(folder, damage, said):
    damage(folder)
    with pytest.raises(CheckpointError, match=said):
        push_to_hub(folder, "me/sums", dry_run=True)


def test_a_damaged_checkpoint_is_not_sent(folder):
    weights = folder / "checkpoints" / "step-000002" / "actor" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        push_to_hub(folder, "me/sums", which="best", dry_run=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: shutil.rmtree(f / "final"), "has no final/: the run has not finished"),
        (lambda f: (f / "config.yaml").unlink(), "it has no config.yaml"),
    ],
)
def test_a_folder_without_a_finished_run_is_refused(folder, change, said):
    change(folder)
    with pytest.raises(ConfigError, match=said):
        push_to_hub(folder, dry_run=True)
    with pytest.raises(ConfigError, match="give the run's folder"):
        push_to_hub(folder / "final", dry_run=True)


@pytest.mark.parametrize("strategy", ["end", "every_save"])
def test_a_run_sends_its_checkpoints_and_its_final_model_while_it_trains(tmp_path, monkeypatch, caplog, strategy):
    hub = Hub()
    monkeypatch.setattr(push, "_make_api", lambda token: hub)
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "base")
    made = cluster(
        str(tmp_path / "base"),
        run_dir=str(tmp_path / "sums"),
        max_steps=2,
        hub_model_id="me/sums",
        hub_strategy=strategy,
        checkpointing_options=CheckpointingOptions(save_interval_steps=2, max_to_keep=1),
        rollout={"max_tokens_to_generate": 4},
    )
    learner = GRPOLearner(made, GRPOConfig(num_generations=2, beta=0.0), lambda completions: [0.0] * len(completions))
    learner.train([{"prompts": ["a", "b"]}] * 2)
    commits = [call for call in hub.calls if call.startswith("commit")]
    assert len(commits) == {"end": 1, "every_save": 2}[strategy]
    assert torch.equal(load(hub.sent["model.safetensors"])["model.norm.weight"], made.actor.module.model.norm.weight)
    hub.fails = OSError("the network is down")
    push_run = SimpleNamespace(folder=SimpleNamespace(path=tmp_path / "sums"))
    PushToHub(made.training_config).on_run_end(push_run, None)
    assert f"later: whet push {tmp_path / 'sums'} repo=me/sums" in caplog.text


def sender(monkeypatch, sent, **fields):
    """A PushToHub whose pushes are noted, and the run that it observes."""
    monkeypatch.setattr(
        builtin_observers, "push_to_hub", lambda run, repo, **how: (sent(**how), SimpleNamespace(url=""))[1]
    )
    run = SimpleNamespace(folder=SimpleNamespace(path="runs/a"))
    return PushToHub(RLTrainingConfig(hub_model_id="me/a", **fields)), run


@pytest.mark.parametrize("private", [True, False])
def test_what_a_run_sends_is_as_private_as_it_was_told(monkeypatch, private):
    seen = []
    observer, run = sender(monkeypatch, lambda private, **_: seen.append(private), hub_private_repo=private)
    observer.on_run_end(run, None)
    assert seen == [private] and RLTrainingConfig().hub_private_repo is True


def test_a_run_that_failed_sends_no_final_model(monkeypatch):
    observer, run = sender(monkeypatch, lambda **_: pytest.fail("it was sent"))
    observer.on_run_end(run, RuntimeError("boom"))


def test_a_checkpoint_is_left_out_while_the_one_before_is_on_its_way_and_the_next_is_sent(monkeypatch):
    free, seen = threading.Event(), []
    observer, run = sender(
        monkeypatch, lambda which, **_: (seen.append(which), free.wait(10)), hub_strategy="every_save"
    )
    observer.on_save(run, Path("step-000001"))
    observer.on_save(run, Path("step-000002"))
    free.set()
    observer._thread.join()
    observer.on_save(run, Path("step-000003"))
    observer.on_run_end(run, None)
    assert seen == ["step-000001", "step-000003", "final"]


def test_the_hub_is_asked_about_a_token_once(monkeypatch):
    hub = Hub()
    hub.token = "another"
    monkeypatch.setattr(push, "_make_api", lambda token: hub)
    for _ in range(2):
        push.check_hub_token()
    assert hub.calls == ["whoami"]


def test_a_run_that_is_to_send_its_model_is_refused_before_it_trains_where_it_can_not(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check_push_to_hub(RLTrainingConfig(hub_model_id="me/sums", run_dir=str(tmp_path / "a")))
    with pytest.raises(ConfigError, match=r"set trainer\.run_dir"):
        check_push_to_hub(RLTrainingConfig(hub_model_id="me/sums"))


def test_no_token_and_offline_are_said_before(finished, monkeypatch):
    from huggingface_hub import constants

    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        finished.push_to_hub("me/sums")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="there is no token for the hub; log in"):
        finished.push_to_hub("me/sums")


def test_a_run_without_a_folder_has_nothing_to_give():
    made = cluster(tiny_model(num_hidden_layers=1), max_steps=1, rollout={"max_tokens_to_generate": 2})
    run = GRPOLearner(made, GRPOConfig(num_generations=2, beta=0.0), "exact_match").train(rows(8, answer=["1"] * 8))
    with pytest.raises(ConfigError, match="a run without a folder"):
        run.push_to_hub("me/x")


# ---- the card --------------------------------------------------------------------------------------------------------


def test_every_run_has_a_card_in_its_folder(finished):
    text = (finished.folder.path / CARD).read_text()
    found = front_matter(text)
    (results,) = found.pop("model-index")
    assert results["name"] == "sums" and "reward" in [m["type"] for r in results["results"] for m in r["metrics"]]
    assert found == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["whet", "grpo", "reinforcement-learning"],
    }
    for said in (
        "Trained by GRPO with whet from a local model, base: step 3 of the run.",
        "| rewards | score |",
        "| loss | grpo(importance_sampling_level=token, epsilon=0.2) |",
        "| metric | step 0 | step 3 |",
        "prompts of the evaluation data of the run, at temperature ",
        'pipeline("text-generation", "sums/final")',
        f"torch {torch.__version__}",
    ):
        assert said in text, said
    assert str(finished.folder.path.parent) not in text


@pytest.mark.parametrize(
    ("card", "base", "licence"),
    [
        ("---\nlicense: mit\nbase_model: org/base\n---\n", "org/base", {"license": "mit"}),
        ("---\nbase_model: [org/base, org/b]\n---\n", "org/base", {}),
        (
            "---\nlicense: other\nlicense_name: own\nlicense_link: https://x.y\n---\n",
            None,
            {"license": "other", "license_name": "own", "license_link": "https://x.y"},
        ),
        ("---\n: [\n---\n", None, {}),
        ("no front matter", None, {}),
        ("---\nlicense: [1]\nbase_model: 3\n---\n", None, {}),
    ],
)
def test_base_and_licence_come_from_the_card_of_the_bases_folder(tmp_path, card, base, licence):
    (tmp_path / "README.md").write_text(card)
    assert (find_base_model(str(tmp_path)), find_licence(str(tmp_path))) == (base, licence)


def test_a_hub_name_is_no_path_file_or_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    found = [hub_name(n) for n in ("gpt2", "a/b", "runs/a", "runs/b/final", "d.jsonl", "f.py:rows", "./a", "", None)]
    assert found == ["gpt2", "a/b", None, None, None, None, None, None, None]


def test_the_licence_of_a_hub_model_is_asked_for_when_it_is_sent(folder):
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["actor"]["model"], settings["data"]["path"] = "org/base", "org/data"
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / CARD).unlink()
    hub = Hub(licence="apache-2.0")
    text = push_to_hub(folder, "sums", api=hub).card
    assert "model_info org/base" in hub.calls
    found = front_matter(text)
    assert (found["base_model"], found["license"], found["datasets"]) == ("org/base", "apache-2.0", ["org/data"])
    assert "[org/base](https://huggingface.co/org/base)" in text and "That of the base model: apache-2.0." in text
    own = push_to_hub(folder, "sums", license="mit", dry_run=True).card
    assert front_matter(own)["license"] == "mit"
    assert (
        "The licence of the base model is not known here: see [its page]" in push_to_hub(folder, "x", dry_run=True).card
    )


def test_the_names_are_those_that_they_were_where_the_run_was(folder, monkeypatch):
    """In another working folder a relative path may look like a name on the hub."""
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["actor"]["model"] = "runs/base"
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    assert read_card_facts(folder).base is None


def test_curves_and_evaluations_are_shown(folder, tmp_path):
    (folder / "curves.png").write_bytes(b"png")
    write_model_card(folder)
    assert "![Curves of the run](curves.png)" in (folder / CARD).read_text()
    found = {
        "prompts": 4,
        "data": {"path": "/secret/place/test.jsonl"},
        "sampling": {"num_generations": 8, "temperature": 0.6},
        "results": {"pass@1": {"value": 0.5, "se": 0.25}, "truncated": {"value": None, "se": None}},
        "by_source": {"a|b": {"pass@1": {"value": 1.0, "se": None}}, "c": {"pass@1": {"value": 0.25, "se": None}}},
    }
    (tmp_path / "results.json").write_text(json.dumps(found))
    hub = Hub()
    text = push_to_hub(folder, "sums", evals=[str(tmp_path)], api=hub).card
    assert hub.sent["curves.png"] == b"png"
    assert "On 4 prompts of test.jsonl, 8 completions of each prompt at temperature 0.6" in text
    assert "| metric | all | a\\|b | c |" in text and "| pass@1 | 0.5 ± 0.25 | 1 | 0.25 |" in text
    assert "secret" not in text
    results = {m["type"]: m["value"] for r in front_matter(text)["model-index"][0]["results"] for m in r["metrics"]}
    assert results["pass@1"] == 0.5 and "truncated" not in results and results["reward"] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("settings", "method", "tags"),
    [
        (
            {"actor": {}, "algo": {"advantage_estimator": "x", "gae_lambda": 1.0}},
            "PPO",
            ["ppo", "reinforcement-learning"],
        ),
        ({"actor": {}, "algo": {"loss_type": "nll"}}, "SFT", ["sft"]),
        ({"actor": {}, "algo": {"loss_type": "sigmoid", "beta": 0.1}}, "DPO", ["dpo"]),
        ({"actor": {}, "algo": {"loss_type": "simpo", "beta": 0.1}}, "SIMPO", ["simpo"]),
        ({"reward_model": {}, "algo": {}}, "RM", ["rm"]),
        ({}, "", []),
    ],
)
def test_the_method_is_told_by_the_configuration(tmp_path, settings, method, tags):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    facts = read_card_facts(tmp_path)
    found = front_matter(make_model_card(facts, title="x"))
    assert facts.method == method and found["tags"] == ["whet", *tags]
    assert found["pipeline_tag"] == ("text-classification" if method == "RM" else "text-generation")


def test_a_cards_rate_is_the_highest_of_a_schedule():
    optim = {"actor": {"optim": {"name": "adamw", "schedule": "linear", "lr": None}}}
    rates = [{"mode": "train", "step": i, "learning_rate": rate} for i, rate in enumerate((5e-5, 1e-4, 0.0))]
    facts = CardFacts(method="SFT", step=2, base="a/b", base_text="a/b", settings=optim, rows=rates)
    assert "| adamw, lr 0.0001, linear |" in make_model_card(facts, title="x")


def test_an_adapters_card_says_so():
    facts = CardFacts(method="SFT", step=1, base="a/b", base_text="a/b", adapter=True)
    assert front_matter(make_model_card(facts, title="x"))["library_name"] == "peft"


def test_the_example_of_a_card_is_a_conversation_where_the_model_was_trained_on_some():
    facts = CardFacts(
        method="SFT", step=2, base="a/b", base_text="a/b", settings={"data": {"system_prompt": "Be 'brief'"}}
    )
    plain, chat = (make_model_card(dataclasses.replace(facts, templated=given), title="x") for given in (False, True))
    assert """print(generate("...", max_new_tokens=256)[0]["generated_text"])""" in plain
    code = chat[chat.index("```python") : chat.rindex("```")].removeprefix("```python").split("```")[0]
    compile(code, "card", "exec")
    assert """generate([{'role': 'system', 'content': "Be 'brief'"}, {'role': 'user', 'content': '...'}], max""" in code
    assert """[0]["generated_text"][-1]["content"])""" in code

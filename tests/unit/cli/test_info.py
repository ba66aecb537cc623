"""What whet knows and prints: recipes, pages, schemas, completion, what it runs on."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from whet._version import __version__
from whet.cli import main
from whet.cli.registry import COMMANDS, config_class
from whet.cli.schema import schema
from whet.config import load_run, read_yaml

ROOT = Path(__file__).parents[3]


def test_recipes_are_listed_shown_and_copied_with_the_files_that_they_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{path.stem} " in listed for path in (ROOT / "recipes").glob("*.yaml"))
    assert main(["recipes", "demo"]) == 0 and "mini_batch_size: 16" in capsys.readouterr().out
    assert main(["recipes", "copy", "search", "there"]) == 0
    assert "whet grpo --config there/search.yaml" in capsys.readouterr().out
    assert main(["recipes", "copy", "demo"]) == 0 and "whet grpo --config demo.yaml" in capsys.readouterr().out
    assert sorted(os.listdir("there")) == ["search.yaml", "search_env.py"]
    assert main(["recipes", "copy", "search", "there"]) == 2 and "exists already" in capsys.readouterr().err
    assert main(["recipes", "copy", "serch"]) == 2 and "did you mean search?" in capsys.readouterr().err


def test_what_a_recipe_refers_to_is_found_beside_it_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_run(["--config", str(ROOT / "recipes" / "search.yaml")])
    assert config.rollout.env_path == str(ROOT / "recipes" / "search_env.py")
    assert config.data.path == f"{ROOT}/recipes/search_env.py:train_rows"
    config = load_run(["--config", str(ROOT / "recipes" / "gsm8k_qwen3_0.6b.yaml")])
    assert config.reward == {"last_number": 1.0, f"{ROOT}/recipes/gsm8k_rewards.py:boxed_once": 0.1}


def test_a_file_of_the_working_folder_is_named_as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("rewards.py").write_text("")
    Path("configs/run.yaml").write_text("model: a/b\ndata: rows.jsonl\nreward: rewards.py:score\n")
    assert load_run(["--config", "configs/run.yaml"]).reward == "rewards.py:score"
    Path("configs/rewards.py").write_text("")
    assert load_run(["--config", "configs/run.yaml"]).reward == "configs/rewards.py:score"
    assert load_run(["--config", "configs/run.yaml", "reward=rewards.py:score"]).reward == "rewards.py:score"


def test_pages_are_printed_by_name(capsys):
    assert main(["docs"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{path.stem} " in listed for path in (ROOT / "docs").glob("*.md") if path.stem != "README")
    assert main(["docs", "agents"]) == 0
    printed = capsys.readouterr().out
    assert '```python title="agent.py"' in printed and "skip" not in printed
    for name in ("lora", "docs/lora.md"):
        assert main(["docs", name]) == 0 and capsys.readouterr().out.startswith("# LoRA")
    assert main(["docs", "gpu_memory_utilization"]) == 0
    assert re.search(r"(?m)^from-verl +Rollout$", capsys.readouterr().out)
    assert main(["docs", "lorra"]) == 2 and "did you mean lora?" in capsys.readouterr().err
    assert main(["docs", "context", "length"]) == 0
    assert re.search(r"(?m)^glossary +Glossary$", capsys.readouterr().out)
    assert main(["docs", "a", "b"]) == 2 and "no page is called 'a b', and none has" in capsys.readouterr().err


def test_a_link_to_another_page_is_the_command_that_prints_it(capsys):
    for name in sorted(path.stem for path in (ROOT / "docs").glob("*.md")):
        assert main(["docs", name]) == 0
        text = capsys.readouterr().out
        assert not re.search(r"\]\([\w-]+\.md", text)
        assert all((ROOT / "docs" / f"{other}.md").is_file() for other in re.findall(r"\]\(whet docs ([\w-]+)\)", text))
    assert main(["docs", "supervised"]) == 0 and "](whet docs lora)" in capsys.readouterr().out


def test_every_page_that_a_message_names_can_be_printed():
    texts = [path.read_text() for path in (ROOT / "whet").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"whet docs ([a-z0-9-]+)", text)}
    assert len(named) > 5 and named <= {path.stem for path in (ROOT / "docs").glob("*.md")}


def _unknown(node, tree, whole, path=""):
    """The keys of a tree that a schema does not have."""
    if "$ref" in node:
        node = whole["$defs"][node["$ref"].rpartition("/")[2]]
    if "anyOf" in node:
        return min((_unknown(one, tree, whole, path) for one in node["anyOf"]), key=len)
    if not isinstance(tree, dict) or "properties" not in node:
        return [] if not isinstance(tree, dict) or node.get("type", "object") == "object" else [path]
    known = node["properties"]
    return [f"{path}.{k}" for k in tree if k not in known] + [
        bad for k in tree if k in known for bad in _unknown(known[k], tree[k], whole, f"{path}.{k}")
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_schema_has_every_key_of_a_recipe_and_none_that_is_misspelt(path):
    command = next(word for word in ("ppo", "sft", "rm", "dpo", "grpo") if f"whet {word} --config" in path.read_text())
    found = schema(*config_class(command))
    tree = read_yaml(path)
    assert _unknown(found, tree, found) == []
    tree |= {"trainr": {}, "trainer": {"max_stps": 1}}
    assert {*_unknown(found, tree, found)} == {".trainr", ".trainer.max_stps"}


def test_every_command_with_keys_has_a_schema_that_is_json_and_says_what_keys_are(capsys):
    for command in ("grpo", "ppo", "sft", "rm", "dpo", "eval", "generate", "chat", "push"):
        assert main(["schema", command]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["properties"] and found["additionalProperties"] is False
    assert main(["schema", "gppo"]) == 2 and "did you mean" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_the_keys_of_each(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    asked = "COMP_WORDS=({}); COMP_CWORD={}; _whet 2>/dev/null; echo ${{COMPREPLY[@]}}\n"
    lines = asked.format("whet ge", 1) + asked.format("whet grpo trainer.max_st", 2) + asked.format("whet schema ev", 2)
    done = subprocess.run(["bash", "-c", f"{script}\n{lines}"], capture_output=True, text=True)
    assert done.stdout.split("\n")[:3] == ["generate", "trainer.max_steps=", "eval"]


def test_every_shell_is_told_every_command(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in COMMANDS) and "actor.lora.r=" in text
    assert main(["completion", "tcsh"]) == 2


def test_the_environment_has_what_a_report_needs_and_no_names_of_people(capsys):
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert f"- whet-rl: {__version__}" in text
    assert all(f"- {name}: " in text for name in ("python", "torch", "extras", "platform", "devices", "C++ kernels"))
    assert os.uname().nodename not in text

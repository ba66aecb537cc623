"""What is nearly right is answered with what to write, on the command line, in files and from Python."""

import pytest

from whet import cli, config
from whet.cli.registry import load_command_config
from whet.errors import ConfigError

FILES = {
    "list.yaml": "- model: m\n- data: d\n",
    "text.yaml": "model:m\ndata:d\n",
    "section.yaml": "rollout:\n  temperature:0.5\n",
    "line.yaml": "rollout:\n  temperature:0.5\n  top_p: 1.0\n",
    "dashes.yaml": "rollout:\n- temperature: 0.5\n",
    "braces.yaml": "model: m\nrollout: {temperature:0.5, top_p:0.9, seed: 1}\n",
    "tab.yaml": "rollout:\n\ttemperature: 0.5\n",
}
BLANK = "a colon that ends a key has a blank behind it"


def told(*words, command="grpo"):
    with pytest.raises(ConfigError) as error:
        load_command_config(command, list(words))
    return str(error.value)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("list.yaml", "list.yaml: a configuration is a mapping of keys, got list; take the dashes away"),
        ("text.yaml", f"text.yaml: a configuration is a mapping of keys, got str; {BLANK}, in 'model:m data:d'"),
        ("section.yaml", f"rollout is a section: .*, got 'temperature:0.5'; {BLANK}: temperature: 0.5"),
        ("line.yaml", "line 3, column 8.*; is a blank missing behind a colon above"),
        ("dashes.yaml", "e.g. rollout.temperature, got .*; its keys have no dashes before them"),
        ("braces.yaml", f"line 2: 'temperature:0.5' has no value: {BLANK}; write {{temperature: 0.5, top_p: 0.9}}"),
        ("tab.yaml", "line 2.*; indent with blanks, not with tabs"),
    ],
)
def test_a_file(file, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).write_text(FILES[file])
    with pytest.raises(ConfigError, match=said):
        load_command_config("grpo", ["--config", file])


@pytest.mark.parametrize("command", ["grpo", "sft", "eval", "generate", "chat"])
def test_a_word_that_ends_in_yaml_is_a_file_of_settings(command, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: m\n")
    assert load_command_config(command, [str(file)]) == load_command_config(command, ["--config", str(file)])
    assert load_command_config(command, [str(file), "model=n"]) == load_command_config(command, ["model=n", str(file)])
    assert "No such file" in told("other.yaml", command=command)


def test_a_file_is_no_value_of_the_option_before_it(tmp_path):
    assert config.load_run(["--tokenizer", "a.yaml"]).tokenizer == "a.yaml"
    assert load_command_config("eval", ["--tokenizer", "a.yaml"]).tokenizer == "a.yaml"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--config", "config: no value; write --config FILE"),
        ("--config=", "config: no file; write --config FILE"),
        ("-c run.yaml", "'-c': expected key=value or --config FILE; write --config run.yaml"),
        ("train.jsonl", "did you mean data=train.jsonl?"),
        ("Qwen/Qwen3-0.6B", "did you mean model=Qwen/Qwen3-0.6B?"),
        ("model Qwen", "'model': expected key=value or --config FILE; write model=Qwen"),
        ("model = Qwen", "write model=Qwen, without blanks"),
        ("model= Qwen", "'Qwen': expected key=value or --config FILE; write model=Qwen, without a blank"),
        ("model:Qwen", "write model=Qwen"),
        ("algo.beta", "write algo.beta=VALUE"),
        ("rollout.eval={temperature: 0.0} seed=1", "a value with blanks is quoted: 'rollout.eval={temperature: 0.0}'"),
        ("rollout.eval={temperature:0.0}", f"{BLANK}; write 'rollout.eval={{temperature: 0.0}}', in quotes"),
        ("reward={f.py:score,exact_match:1.0}", "write 'reward={f.py:score: VALUE, exact_match: 1.0}', in quotes"),
        ("rollout.eval=temperature:0.0", f"got 'temperature:0.0'; {BLANK}: temperature: 0.0"),
        ("rollout.eval=[1,2]", "rollout.eval: expected keys with their values, {key: value}, got [1, 2]"),
        ("rollout=[1,2]", "rollout is a section: give its keys, e.g. rollout.temperature, got [1, 2]"),
        ("algo=dapo", "algo is a section: give its keys, e.g. algo.preset, got 'dapo'"),
        ("actor.optim=1e-6", "actor.optim is a section: give its keys, e.g. actor.optim.lr, got 1e-06"),
        ("rollout.stop=[1]", "rollout.stop.0: expected text, got 1; quote it: '\"1\"' on a command line"),
        ("trainer.resume=true", "resume=true names no checkpoint; write latest"),
        ("reward=[[a]]", "reward.0: expected text, got ['a']"),
        ("tokenizer=None", "tokenizer is the text 'None'; nothing is null in YAML, None in Python"),
        ("rollout.temperature=None", "rollout.temperature: expected a number, got 'None'; nothing is null in YAML"),
        ("rolout.temperature=1", "unknown key rolout.temperature; did you mean rollout.temperature?"),
        ("rollout.temperature.x=1", "rollout.temperature: expected a number, got {'x': 1}"),
        ("temperature=1", "unknown key temperature; did you mean rollout.temperature?"),
    ],
)
def test_words(words, said):
    assert said in told(*words.split())


def test_generate_has_prompts_where_others_have_data():
    assert "did you mean prompts=test.jsonl?" in told("test.jsonl", command="generate")


def test_a_command_that_was_forgotten(capsys):
    assert cli.main(["run.yaml", "model=m"]) == 2
    said = "'run.yaml' is not a command; write the command first, e.g. whet grpo run.yaml model=m"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: config.load_run("model=m"), "expected a list of words, e.g. ['model=a/b', 'data=rows.jsonl'], got"),
        (lambda: config.load_run({"model": "m"}), "expected a list of words"),
        (lambda: config.RunConfig(rollout=[1]), "RunConfig.rollout takes the class RunRolloutConfig, or a dict of its"),
        (lambda: config.RLTrainingConfig(checkpointing_options=5), "got 5; write CheckpointingOptions(save_interval"),
        (
            lambda: config.ClusterConfig(training_config=[config.RLTrainingConfig()]),
            "give the RLTrainingConfig without the brackets",
        ),
        (
            lambda: config.ClusterConfig(rollout_config={"temperature": 1.0}),
            "rollout_config is a dict of modes to RolloutConfigs; for both modes write RolloutConfig(**it)",
        ),
        (
            lambda: config.ClusterConfig(rollout_config=[config.RolloutConfig()]),
            "rollout_config is a list; give the RolloutConfig without the brackets",
        ),
        (lambda: config.RolloutConfig(eval=[("temperature", 0.0)]), "eval: expected keys with their values"),
        (lambda: config.RolloutConfig(temperature=None), "got None; leave it out for its default, 0.9"),
        (lambda: config.OptimConfig(betas=[0.9]), "OptimConfig.betas: expected 2 values, got 1: [0.9]"),
    ],
)
def test_from_python(make, said):
    with pytest.raises(ConfigError) as error:
        make()
    assert said in str(error.value)

"""`python -m whet.trl`: TRL's command line."""

import json

import pytest
from helpers import tiny_model

from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError
from whet.trl.command import main, run

ROWS = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}"} for i in range(8)]
FLAGS = ["--max_steps", "1", "--per_device_train_batch_size", "4", "--report_to", "none", "--use_cpu"]
FLAGS += ["--bf16", "no", "--disable_tqdm", "yes", "--gradient_checkpointing", "no", "--save_strategy", "no"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("model")
    byte_tokenizer().save_pretrained("model")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "own.py").write_text("def short(completions, **kwargs):\n    return [-len(c) for c in completions]\n")
    (tmp_path / "run.yaml").write_text("model_name_or_path: model\ndataset_name: rows.jsonl\nlearning_rate: 1.0e-3\n")
    return tmp_path


def test_a_file_of_trl_s_and_flags_over_it_train(place, capsys):
    words = ["--config", "run.yaml", "--output_dir", "out", "--learning_rate", "1e-4", *FLAGS]
    trainer = run("sft", [*words, "--accelerate_config", "single_gpu", "--num_processes=1"])
    assert (trainer.args.learning_rate, trainer.state.global_step) == (1e-4, 1)
    assert (place / "out" / "model.safetensors").exists()
    assert capsys.readouterr().out.splitlines()[-1] == "model: out"
    asked = ["--reward_funcs", "own.short", "own.py:short", "--num_generations", "2", "--max_completion_length", "2"]
    assert run("grpo", [*words, *asked]).args.num_generations == 2


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        ("grbo", [], "unknown command of TRL 'grbo'; did you mean grpo"),
        ("sft", ["--model_name_or_path", "model"], "there is no data set: give --dataset_name"),
        ("sft", ["--dataset_name", "rows.jsonl"], "there is no model: give --model_name_or_path"),
        ("sft", ["--config", "run.yaml", "--learningrate", "1"], "unknown argument '--learningrate'; .*learning_rate"),
        ("sft", ["--config", "run.yaml", "--num_processes", "2"], "'2' is not supported: one process trains here"),
        ("sft", ["--config", "run.yaml", "--eval_strategy", "epoch"], "the data have no such split; they have train"),
        ("grpo", ["--config", "run.yaml"], "there is no reward: give --reward_funcs"),
        ("grpo", ["--config", "run.yaml", "--reward_funcs", "acuracy_reward"], "did you mean accuracy_reward"),
    ],
)
def test_what_a_command_lacks_is_named(place, verb, words, message):
    with pytest.raises(ConfigError, match=message):
        run(verb, words)


def test_the_command_explains_an_error_and_lists_its_commands(capsys):
    assert main(["grbo"]) == 2
    assert capsys.readouterr().err.startswith("whet.trl grbo: unknown command")
    assert main([]) == 0
    assert "dpo, grpo, " in capsys.readouterr().out

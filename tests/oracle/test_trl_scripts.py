"""TRL's own scripts (trl/scripts) with their imports changed: the very files of the installed release run on whet."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml
from helpers import tiny_model

from whet.data.tokenizer import byte_tokenizer

SCRIPTS = Path(str(pytest.importorskip("trl").__file__)).parent / "scripts"
ROWS = {
    "sft": [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}"} for i in range(8)],
    "dpo": [{"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": "no"} for i in range(8)],
    "grpo": [{"prompt": f"{i}+{i}="} for i in range(8)],
}
MORE = {"grpo": ["--reward_funcs", "own_rewards.short", "--num_generations", "4", "--max_completion_length", "4"]}
REWARD = "def short(completions, **kwargs):\n    return [-float(len(text)) for text in completions]\n"


@pytest.mark.parametrize("name", ROWS)
def test_the_scripts_of_the_installed_trl_run_with_their_imports_changed(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    tiny_model().save_pretrained("model")
    byte_tokenizer().save_pretrained("model")
    Path("own_rewards.py").write_text(REWARD)
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS[name])))
    given = {"model_name_or_path": "model", "datasets": [{"path": "json", "data_files": "rows.jsonl"}], "max_steps": 1,
             "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "bf16": False,
             "disable_tqdm": True, "gradient_checkpointing": False}  # fmt: skip
    Path("run.yaml").write_text(yaml.safe_dump(given))
    Path("script.py").write_text(re.sub(r"from trl\b", "from whet.trl", (SCRIPTS / f"{name}.py").read_text()))
    spec = importlib.util.spec_from_file_location(f"{name}_of_trl", "script.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    words = ["--config", "run.yaml", "--output_dir", "out", *MORE.get(name, [])]
    script.main(*script.make_parser().parse_args_and_config(words, fail_with_unknown_args=False))
    assert "Training completed" in capsys.readouterr().out
    assert Path("out/model.safetensors").exists()

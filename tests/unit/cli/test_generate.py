"""`whet generate`, from its words to what is printed or written."""

import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import tiny_model

from whet import Sampler
from whet.cli import main
from whet.cli.generate import escape_control_characters, generate
from whet.config.generate import ChatConfig, GenerateConfig, load_sampling
from whet.errors import ConfigError, DataError


def words(model_folder, *more):
    return [f"model={model_folder}", "max_tokens=6", "seed=1", "apply_chat_template=false", *more]


def config(model_folder, *more):
    return load_sampling(GenerateConfig, words(model_folder, *more))


def jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_completion_in_a_pipe_is_the_text_alone(model_folder, capsys):
    assert main(["generate", *words(model_folder, "prompt=2+2=", "temperature=0")]) == 0
    assert capsys.readouterr().out == Sampler(model_folder)("2+2=", 6).text[0] + "\n"


def test_plain_text_goes_through_the_template_unless_the_run_that_made_the_model_did_without(
    model_folder, tmp_path, caplog
):
    caplog.set_level("INFO", logger="whet")
    templated = Sampler(model_folder)([{"role": "user", "content": "2+2="}], 6).text[0]
    plain = Sampler(model_folder)("2+2=", 6).text[0]
    shutil.copytree(model_folder, tmp_path / "run" / "final")
    for run, folder, said in (
        ({}, model_folder, templated),
        ({"apply_chat_template": False}, tmp_path / "run", plain),
        ({"apply_chat_template": True}, tmp_path / "run" / "final", templated),
    ):
        (tmp_path / "run" / "config.yaml").write_text(json.dumps({"trainer": {}, "data": run}))
        out = tmp_path / "o.jsonl"
        given = [f"model={folder}", "max_tokens=6", "prompt=2+2=", "temperature=0", f"out={out}", "overwrite=true"]
        generate(load_sampling(GenerateConfig, given))
        assert jsonl(out)[0]["completion"] == said and ("chat template: applied" in caplog.text) == (said == templated)
        caplog.clear()


def test_several_completions_have_headings(model_folder, capsys):
    assert generate(config(model_folder, "prompt=a", "prompt=b", "num_generations=2")) == 4
    out = capsys.readouterr().out
    assert [out.count(f"--- prompt {i}, generation {g}, ") for i in (0, 1) for g in (0, 1)] == [1] * 4


def test_texts_are_taken_as_they_stand_and_the_rest_is_yaml():
    c = load_sampling(
        GenerateConfig, ["prompt=Q: [1, #2", "--prompt={x: 1}=", "system_prompt=a: b", "temperature=1e-1"]
    )
    assert c.prompt == ("Q: [1, #2", "{x: 1}=") and c.system_prompt == "a: b" and c.temperature == 0.1
    assert load_sampling(ChatConfig, ["system-prompt=yes: no"]).system_prompt == "yes: no"


def test_standard_input_is_a_prompt(model_folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("2+2=\n"))
    generate(config(model_folder, "prompt=-", "temperature=0"))
    assert capsys.readouterr().out == Sampler(model_folder)("2+2=", 6).text[0] + "\n"


def test_a_file_in_and_a_file_out(model_folder, tmp_path):
    rows = [{"prompt": f"{i}+1=", "rewards": 1} for i in range(5)]
    rows.append({"prompt": [{"role": "user", "content": "hi"}], "rewards": 1})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:5]))
    (tmp_path / "chat.jsonl").write_text(json.dumps(rows[5]) + "\n")
    out = tmp_path / "out.jsonl"
    count = generate(config(model_folder, f"prompts={tmp_path / 'in.jsonl'}", "num_generations=3", f"out={out}"))
    made = jsonl(out)
    assert count == len(made) == 15
    assert [(r["row"], r["generation"], r["prompt"]) for r in made[:4]] == [
        (0, 0, "0+1="),
        (0, 1, "0+1="),
        (0, 2, "0+1="),
        (1, 0, "1+1="),
    ]
    sampler = Sampler(model_folder)
    whole = sampler(
        [r["prompt"] for r in rows[:5]], 6, temperature=0.7, seed=1, num_generations=3, return_logprobs=True
    )
    assert [r["tokens"] for r in made] == [t.tolist() for t in whole.tokens]
    assert [r["completion"] for r in made] == whole.text and [r["finish_reason"] for r in made] == whole.finish_reason
    assert np.allclose(np.concatenate([r["logprobs"] for r in made]), np.concatenate(whole.logprobs), atol=1e-5)
    generate(config(model_folder, f"prompts={tmp_path / 'chat.jsonl'}", f"out={tmp_path / 'c.jsonl'}"))
    assert jsonl(tmp_path / "c.jsonl")[0]["prompt"] == rows[5]["prompt"]


def test_the_batch_size_changes_no_draw(model_folder, tmp_path):
    made = []
    for size in (1, 4, 64):
        out = tmp_path / f"{size}.jsonl"
        prompts = [f"prompt={i}=" for i in range(5)]
        generate(config(model_folder, *prompts, "num_generations=2", f"batch_size={size}", f"out={out}"))
        made.append([r["tokens"] for r in jsonl(out)])
    assert made[0] == made[1] == made[2]


def test_an_output_file_is_not_overwritten_unless_asked(model_folder, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="exists; write overwrite=true"):
        generate(config(model_folder, "prompt=a", f"out={out}"))
    assert out.read_text() == "mine"
    generate(config(model_folder, "prompt=a", f"out={out}", "overwrite=true"))
    assert len(jsonl(out)) == 1
    with pytest.raises(ConfigError, match="there is no folder"):
        generate(config(model_folder, "prompt=a", f"out={tmp_path / 'no' / 'out.jsonl'}"))
    with pytest.raises(ConfigError, match=r"must end in \.jsonl"):
        generate(config(model_folder, "prompt=a", "out=out.txt"))


def test_an_overwritten_file_stays_as_it_was_until_the_new_one_is_whole(model_folder, tmp_path, monkeypatch):
    out, sample = tmp_path / "out.jsonl", Sampler.sample
    out.write_text("mine")

    def once(self, *args, **options):
        if options["first"]:
            raise KeyboardInterrupt
        return sample(self, *args, **options)

    monkeypatch.setattr(Sampler, "sample", once)
    asked = config(model_folder, "prompt=a", "prompt=b", "batch_size=1", "max_tokens=2", f"out={out}", "overwrite=true")
    with pytest.raises(KeyboardInterrupt):
        generate(asked)
    assert out.read_text() == "mine" and list(tmp_path.iterdir()) == [out]


def test_long_prompts_are_refused_cut_or_left_out(model_folder, tmp_path, caplog, capsys):
    given = [model_folder, "prompt=abcdef", "prompt=ab", "max_prompt_length=4", "temperature=0"]
    assert generate(config(*given, "on_long_prompt=truncate_left")) == 2
    assert generate(config(*given, "on_long_prompt=drop")) == 1
    assert "1 of 2 rows is over max_prompt_length 4: the longest has 6 tokens" in caplog.text
    assert main(["generate", *words(*given)]) == 2
    assert "1 of 2 rows is over max_prompt_length 4: the longest has 6 tokens" in capsys.readouterr().err


def test_beams_and_options_reach_the_model(model_folder, tmp_path):
    out = tmp_path / "out.jsonl"
    generate(config(model_folder, "prompt=ab", "temperature=0", "beam_size=3", "num_generations=3", f"out={out}"))
    expected = Sampler(model_folder)("ab", 6, beam_size=3, num_generations=3)
    assert [r["tokens"] for r in jsonl(out)] == [t.tolist() for t in expected.tokens]
    with pytest.raises(ConfigError, match="did you mean no_repeat_ngram_size"):
        generate(config(model_folder, "prompt=ab", "generation_kwargs={no_repeat_ngram_sise: 3}"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["promt=a"], "unknown key promt; did you mean prompt or prompts?"),
        (["prompt=a"], "no model; write model=<folder, run folder or hub name>"),
        (["model=m", "prompt=a", "prompts=b"], "prompt and prompts both give prompts; keep one"),
        (["model=m"], 'no prompt; write prompt="..." or prompts='),
        (["model=m", "max_tokens=0"], "max_tokens must be a positive integer. Got: 0"),
    ],
)
def test_what_is_wrong_is_one_message_before_a_model_is_loaded(given, message, capsys):
    assert main(["generate", *given]) == 2
    out = capsys.readouterr()
    assert out.err.startswith(f"whet generate: {message}") and out.out == ""


def test_settled_configurations_are_printed_and_read_back(tmp_path, capsys):
    assert main(["generate", "--print_config", "model=m", "prompt=a: b", "top_k=3"]) == 0
    (tmp_path / "g.yaml").write_text(capsys.readouterr().out)
    c = load_sampling(GenerateConfig, ["--config", str(tmp_path / "g.yaml"), "top_k=4"])
    assert (c.model, c.prompt, c.top_k) == ("m", ("a: b",), 4)


def test_help_lists_keys_and_loads_no_torch():
    code = (
        "import sys; from whet.cli import main; main(['generate', '--help', 'all']); main(['chat', '--help']); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        done.returncode == 0 and "  num_generations=1  (positive int)\n      Completions of each prompt." in done.stdout
    )


def test_control_characters_do_not_reach_a_terminal():
    assert escape_control_characters("a\x1b[2Jb\x00\tc\nü\x9b\x7f") == "a␛[2Jb␀\tc\nü\ufffd\ufffd"


def test_a_terminal_is_shown_a_completion_as_it_is_made(model_folder, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    generate(config(model_folder, "prompt=ab", "temperature=0"))
    assert capsys.readouterr().out == escape_control_characters(Sampler(model_folder)("ab", 6).text[0]) + "\n"
    generate(config(model_folder, "prompt=ab", "prompt=cd", "temperature=0.5", "num_generations=2"))
    out = capsys.readouterr().out
    assert "prompt 0" in out and "prompt 1" in out and out.count("6 tokens, length") + out.count("stop") == 4


def test_a_model_in_memory_agrees_with_the_folder(model_folder, tokenizer):
    assert Sampler(tiny_model(), tokenizer)("ab", 6).text == Sampler(model_folder)("ab", 6).text


def test_beams_need_no_temperature_and_refuse_one(model_folder, tmp_path):
    out, again = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    generate(config(model_folder, "prompt=ab", "beam_size=3", "num_generations=3", f"out={out}"))
    generate(config(model_folder, "prompt=ab", "beam_size=3", "num_generations=3", "temperature=0", f"out={again}"))
    assert len(jsonl(out)) == 3 and jsonl(out) == jsonl(again)
    for beams in ("beam_size=3", "generation_kwargs={num_beams: 3}"):
        with pytest.raises(ConfigError, match=r"temperature=0\.7 has no meaning for a beam search"):
            config(model_folder, "prompt=ab", beams, "temperature=0.7")
        assert config(model_folder, beams).effective_temperature == 0.0
    assert config(model_folder, "beam_size=1").effective_temperature == 0.7


def test_standard_input_that_is_no_text_is_an_error_in_words(model_folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with pytest.raises(DataError, match="standard input is not utf-8 text"):
        generate(config(model_folder, "prompt=-"))


def test_the_mock_engine_completes_with_the_models_own_vocabulary(model_folder, capsys):
    assert main(["generate", *words(model_folder, "prompt=2+2=", "rollout_engine=mock")]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_a_device_that_is_not_there_is_an_error_in_words(model_folder, capsys):
    assert main(["generate", *words(model_folder, "prompt=a", "device=cuda:99")]) == 2
    assert "device 'cuda:99' can't be used here" in capsys.readouterr().err

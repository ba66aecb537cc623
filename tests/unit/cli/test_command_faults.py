"""Faults on the way in and out of the commands: expressions, files that are taken or full, sums that are none."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from whet.cli import main
from whet.cli.generate import generate
from whet.config import load_run
from whet.config.generate import GenerateConfig, load_sampling
from whet.errors import CheckpointError, ConfigError, DataError
from whet.storage.checkpoint import verify_checkpoint


@pytest.mark.parametrize("text", ["[0-9]+", "[0-9]{1,4}", "#[0-9]+", "yes: [0-9]", "12", r"\d+"])
def test_an_expression_is_taken_as_it_stands(text):
    assert load_sampling(GenerateConfig, [f"constraint.regex={text}"]).constraint.regex == text
    assert load_run([f"rollout.constraint.regex={text}"]).rollout.constraint.regex == text
    assert load_sampling(GenerateConfig, [f"constraint.regex='{text}'"]).constraint.regex == f"'{text}'"


def test_words_of_set_keep_backslashes_and_say_what_is_open():
    from whet.cli.chat import _split_words

    assert _split_words(r"constraint.regex=\d+ seed=3") == [r"constraint.regex=\d+", "seed=3"]
    assert _split_words("constraint='{regex: a}'") == ["constraint={regex: a}"]
    assert _split_words("""'constraint={regex: "[0-9 ]+"}' seed=3""") == ['constraint={regex: "[0-9 ]+"}', "seed=3"]
    assert _split_words("""'stop=["a b", "}"]'  seed=3""") == ['stop=["a b", "}"]', "seed=3"]
    assert _split_words("constraint.regex=[0-9]{1,2}'x' a") == ["constraint.regex=[0-9]{1,2}x", "a"]
    assert _split_words("") == [] and _split_words("a={b c") == ["a={b", "c"]
    for line in ("'", "a='b", "seed=3 stop='a"):
        with pytest.raises(ConfigError, match="close the quotes"):
            _split_words(line)


@pytest.mark.parametrize("content", ["[1, 2]", '{"run.pt": null}'])
def test_sums_that_are_no_sums_are_an_error_in_words(tmp_path, content):
    (tmp_path / "run.pt").write_text("x")
    (tmp_path / "sums.json").write_text(content)
    with pytest.raises(CheckpointError, match="earlier step"):
        verify_checkpoint(tmp_path)


def _run(tmp_path, monkeypatch, before=lambda: None, **keys):
    from whet import Sampler
    from whet.cli import generate as g
    from whet.demo import small_model

    def opened(*_, **__):
        before()
        return Sampler(small_model(seed=0), "byte")

    monkeypatch.setattr(g, "open_sampler", opened)
    return g.generate(GenerateConfig(model="m", prompt=("a", "b"), max_tokens=2, **keys))


def test_a_file_that_another_process_has_made_meanwhile_is_kept(tmp_path, monkeypatch):
    out = tmp_path / "o.jsonl"
    with pytest.raises(ConfigError, match="another process"):
        _run(tmp_path, monkeypatch, lambda: out.write_text("theirs\n"), out=str(out))
    assert out.read_text() == "theirs\n"
    _run(tmp_path, monkeypatch, out=str(out), overwrite=True)
    assert [json.loads(x)["row"] for x in out.read_text().splitlines()] == [0, 1]


@pytest.mark.parametrize("where", ["folder", "full"])
def test_an_output_that_cannot_be_written_is_an_error_in_words(tmp_path, monkeypatch, where):
    out = tmp_path / "o.jsonl"
    out.mkdir() if where == "folder" else out.symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="can't be written"):
        _run(tmp_path, monkeypatch, out=str(out), overwrite=True)


def test_what_a_killed_command_has_left_stops_no_later_one(tmp_path):
    from whet.cli.generate import _open_output

    out = tmp_path / "o.jsonl"
    for path in (out, tmp_path / ".o.jsonl.tmp"):
        path.write_text("old\n")
    with _open_output(out, overwrite=True) as file:
        file.write("new\n")
        assert out.read_text() == "old\n"
    assert out.read_text() == "new\n" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_reward_that_closes_a_stream_ends_no_run(tmp_path, monkeypatch, model_folder, name):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n' * 2)
    (tmp_path / "closes.py").write_text(
        f"import sys\ndef reward(completions, **_):\n    sys.{name}.close()\n    return [1.0] * len(completions)\n"
    )
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, open(tmp_path / stream, "w"))
    run, sections = (
        tmp_path / "run",
        ("rollout.max_tokens_to_generate=2", "data.batch_size=2", "trainer.max_steps=2", "algo.num_generations=2"),
    )
    words = [f"model={model_folder}", f"data={tmp_path / 'rows.jsonl'}", f"reward={tmp_path / 'closes.py'}:reward"]
    assert main(["grpo", *words, f"trainer.run_dir={run}", *sections, "actor.dtype=float32"]) == 0
    assert (run / "final" / "run.json").is_file()
    assert f"final model: {run / 'final'}" in (tmp_path / "stderr").read_text()


def test_a_row_without_a_prompt_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"answer": 1}\n')
    with pytest.raises(DataError, match="row 1: no prompt column"):
        generate(GenerateConfig(model="m", prompts=str(tmp_path / "rows.jsonl")))


def test_a_first_row_that_says_nothing_is_named(tmp_path, model_folder, capsys):
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    words = [f"model={model_folder}", f"data={tmp_path / 'rows.jsonl'}", f"trainer.run_dir={tmp_path / 'run'}"]
    assert main(["sft", *words]) == 2
    assert "row 0: column 'messages' holds list []; expected a text or a list of messages" in capsys.readouterr().err


def test_an_answer_that_standard_output_cannot_take_ends_the_chat_in_one_line(monkeypatch, model_folder, capsys):
    monkeypatch.setattr(sys, "stdin", lines := io.StringIO("hi\nnever\n"))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["chat", f"model={model_folder}", "max_tokens=4"]) == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith(
        "whet chat: standard output can't be written: [Errno 28] No space left on device; free some space"
    )
    assert lines.read() == "never\n"


@pytest.mark.parametrize("there", [False, True])
def test_a_command_that_is_stopped_says_what_lies_in_its_file(tmp_path, monkeypatch, there):
    from whet import Sampler

    out, sample = tmp_path / "o.jsonl", Sampler.sample

    def once(self, *args, **options):
        if options["first"]:
            raise KeyboardInterrupt
        return sample(self, *args, **options)

    monkeypatch.setattr(Sampler, "sample", once)
    if there:
        out.write_text("mine\n")
    said = f"stopped; {out} has not changed" if there else f"stopped; {out} holds 1 completion"
    with pytest.raises(KeyboardInterrupt, match=f"^{said}$"):
        _run(tmp_path, monkeypatch, out=str(out), overwrite=there, batch_size=1)
    assert len(out.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "model=FOLDER", "prompt=a"],
        ["push", "FOLDER"],
        ["grpo", "model=FOLDER", "data=FOLDER/rows.jsonl", "reward=exact_match"],
        ["grpo", "trainer.run_dir=FOLDER", "trainer.resume=latest"],
        ["grpo", "model=a/b", "trainer.resume=FOLDER/checkpoints/step-000001"],
    ],
)
def test_a_folder_that_may_not_be_entered_is_one_line(words, tmp_path, monkeypatch, capsys):
    usual, folder = Path.stat, tmp_path / "theirs"
    folder.mkdir()

    def stat(path, **options):  # as for another user, which root is not
        if folder in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert main([word.replace("FOLDER", str(folder)) for word in words]) == 2
    said = capsys.readouterr().err
    assert "Permission denied" in said and str(folder) in said and "Traceback" not in said


def test_a_full_disk_is_one_line_of_eval_and_push(monkeypatch, tmp_path, capsys):
    from whet.cli import evaluate, push

    done = SimpleNamespace(results={}, by_source={}, folder="evals/a", private=True, url="u", repo="r")
    monkeypatch.setattr(evaluate, "Evaluator", lambda config: SimpleNamespace(run=lambda what, **_: done))
    monkeypatch.setattr(push, "push_to_hub", lambda *_, **__: done)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    sampled = ["model=a", f"data={tmp_path}/rows.jsonl", "reward=exact_match", f"out={tmp_path}/e"]
    for words, said in (
        (["eval", *sampled], "No space left on device; the results are in"),
        (["push", "a"], "No space"),
    ):
        with open("/dev/full", "w") as full, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", full)
            assert main(words) == 2
        assert said in (err := capsys.readouterr().err) and "standard output can't be written" in err

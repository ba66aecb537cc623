"""`whet eval`, from its words to the table and the folder."""

import json
import signal

import pytest

from whet import evaluate
from whet.cli import main
from whet.data.prompt_stream import hold_out
from whet.evaluation.estimators import Estimate
from whet.evaluation.table import format_table, print_table

PLAIN = ("data.apply_chat_template=false",)
ROWS = [{"prompt": f"{i}+1=", "answer": str(i), "source": "ab"[i % 2]} for i in range(5)]


@pytest.fixture
def words(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return ["eval", f"model={model_folder}", "data=d.jsonl", "reward=last_number", "max_tokens=6", *PLAIN]


def test_the_table_is_printed_and_the_results_are_those_of_python(words, model_folder, tmp_path, capsys):
    assert main([*words, "num_generations=4", "temperature=1.0", "seed=2", "out=e"]) == 0
    found = evaluate(model_folder, "d.jsonl", "last_number", num_generations=4, temperature=1.0, seed=2, max_tokens=6)
    assert capsys.readouterr().out == f"{found}\n"
    written = json.loads((tmp_path / "e" / "results.json").read_text())
    assert {**written, "seconds": 0} == {"format": 1, **found.plain(), "seconds": 0}
    assert {p.name for p in (tmp_path / "e").iterdir()} == {
        "completions", "config.yaml", "environment.json", "evaluation.json", "results.json"
    }  # fmt: skip


def test_what_it_wrote_repeats_it(words, tmp_path):
    assert main([*words, "num_generations=2", "temperature=1.0", "out=e"]) == 0
    assert main(["eval", "--config", "e/config.yaml", "out=f"]) == 0
    first, second = (json.loads((tmp_path / n / "results.json").read_text()) for n in "ef")
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_without_out_a_folder_of_its_own_is_made_and_an_empty_one_is_not_left(words, tmp_path, capsys):
    assert main(words) == 0
    (made,) = (tmp_path / "evals").iterdir()
    assert (made / "results.json").is_file()
    assert main([*words, "reward=exact_macth"]) == 2 and "did you mean exact_match" in capsys.readouterr().err
    assert list((tmp_path / "evals").iterdir()) == [made]


def test_the_held_out_rows_of_a_run_are_evaluated_alone(words, tmp_path):
    assert main([*words, "data.eval_fraction=0.4", "data.eval_fraction_seed=3", "out=e"]) == 0
    import pandas

    kept = pandas.read_parquet(tmp_path / "e" / "completions" / "eval-000000.parquet")
    assert kept.prompt.tolist() == [row["prompt"] for row in hold_out(ROWS, 0.4, 3)[1]]


def test_a_reward_of_the_users_file_and_its_errors(words, tmp_path, capsys):
    (tmp_path / "r.py").write_text("def f(completions):\n    return [1 / 0 for _ in completions]\n")
    assert main([*words[:3], "reward=r.py:f", "max_tokens=6", "out=e"]) == 2
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and "continue with resume=true out=e" in err
    (tmp_path / "s.py").write_text("def f(completions):\n    return [0.0 for _ in completions]\n")
    assert main([*words[:3], "reward=s.py:f", "max_tokens=6", "out=e", "resume=true"]) == 0
    assert "5 of 5 prompts were completed before" in capsys.readouterr().err


def test_a_signal_ends_it_after_a_batch_and_it_can_be_continued(words, tmp_path, capsys):
    code = "import os, signal\ndef f(completions):\n    {}\n    return [0.0] * len(completions)\n"
    (tmp_path / "r.py").write_text(code.format("os.kill(os.getpid(), signal.SIGTERM)"))
    assert main([*words[:3], "reward=r.py:f", "max_tokens=6", "batch_size=2", "out=e"]) == 130
    err = capsys.readouterr().err
    assert "SIGTERM: stopping after this batch" in err and "stopped after 2 of 5 prompts" in err
    assert "continue with resume=true out=e" in err and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    (tmp_path / "s.py").write_text(code.format("pass"))
    assert main([*words[:3], "reward=s.py:f", "max_tokens=6", "batch_size=2", "out=e", "resume=true"]) == 0
    assert "2 of 5 prompts were completed before" in capsys.readouterr().err


def test_print_config_and_help(words, capsys):
    assert main([*words, "--print_config"]) == 0
    assert "reward: last_number" in capsys.readouterr().out
    main(["eval", "--help", "all"])
    said = capsys.readouterr().out
    assert "  pass_threshold=null" in said and "num_generations = rollout.num_generations_eval" in said
    main(["push", "--help", "all"])
    assert "  private=true  (bool)" in capsys.readouterr().out


RESULTS = {
    "reward": Estimate(0.5, 0.05, 4),
    "rewards/f": Estimate(0.5, 0.05, 4),
    "pass@1": Estimate(0.5, 0.05, 4),
    "tokens": Estimate(12.25, float("nan"), 1),
    "truncated": Estimate(float("nan"), float("nan"), 0),
}


def test_the_table_has_a_row_for_each_number():
    assert format_table(RESULTS, {"a": RESULTS, "b": RESULTS}).splitlines() == [
        "source     all          a            b",
        "prompts    4            4            4",
        "reward     0.5 ±0.05    0.5 ±0.05    0.5 ±0.05",
        "pass@1     50.0 ±5.0 %  50.0 ±5.0 %  50.0 ±5.0 %",
        "tokens     12.25        12.25        12.25",
        "truncated  -            -            -",
    ]


def test_sources_that_do_not_fit_a_terminal_stand_below_the_others():
    lines = format_table(RESULTS, {letter * 20: RESULTS for letter in "abcd"}).splitlines()
    assert max(map(len, lines)) <= 80 and lines.count("") == 1
    heads = [line.split() for line in lines if line.startswith("source")]
    assert heads == [["source", "all", "a" * 20, "b" * 20], ["source", "c" * 20, "d" * 20]]


def test_after_the_table_the_best_and_the_worst_completion_are_shown(words, tmp_path, capsys):
    (tmp_path / "r.py").write_text(
        "def f(completions, prompts):\n    return [float(p[0] == '3') - float(p[0] == '1') for p in prompts]\n"
    )
    assert main([*words[:3], "reward=r.py:f", "max_tokens=6", *PLAIN]) == 0
    said = capsys.readouterr().err
    assert "best (reward 1, " in said and "row 3: 3+1=" in said
    assert "worst (reward -1, " in said and "row 1: 1+1=" in said and "row 0" not in said
    (tmp_path / "alike.py").write_text("def f(completions):\n    return [0.5 for c in completions]\n")
    assert main([*words[:3], "reward=alike.py:f", "max_tokens=6", *PLAIN]) == 0
    said = capsys.readouterr().err
    assert "one of 5, no reward better than another (reward 0.5, " in said and "worst" not in said


def test_no_name_in_the_table_moves_the_cursor(capsys):
    print_table(RESULTS, {"\x1b[2Ja": RESULTS, "[red]b": RESULTS})
    out = capsys.readouterr().out
    assert "50.0 ±5.0 %" in out and "[2Ja" in out and "[red]b" in out and "\x1b[2J" not in out

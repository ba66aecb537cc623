"""`whet data`, and what a run settles by its rows: template and lengths. No weights lie in the model's folder."""

import json
import subprocess
import sys

import pytest
from helpers import tiny_model

from whet.cli import main
from whet.cli.resolve_defaults import resolve_defaults
from whet.config import PPORunConfig, RunConfig, load_run
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError
from whet.types import Prompt

PLAIN = [{"prompt": "x" * n, "answer": n} for n in (3, 9, 4, 20)]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with data, and with a model of 128 positions that has no weights."""
    monkeypatch.chdir(tmp_path)
    tiny_model().config.save_pretrained(tmp_path / "m")
    byte_tokenizer().save_pretrained(tmp_path / "m")
    lines(tmp_path / "plain.jsonl", PLAIN)
    lines(tmp_path / "pairs.jsonl", [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}] * 3)
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    lines(tmp_path / "chats.jsonl", [{"messages": talk}] * 3)
    return tmp_path


def said(words, capsys, status=0):
    assert main(["data", *words]) == status
    found = capsys.readouterr()
    return found.out if status == 0 else found.err


# ---- whet data -------------------------------------------------------------------------------------------------------


def test_prompts_are_shown_with_their_lengths(folder, capsys):
    out = said(["data=plain.jsonl", "model=m", "rows=2", "rollout.max_prompt_length=28"], capsys)
    assert (
        out
        == """\
row 0: 22 tokens
  | <|im_start|>user\\n
  | xxx<|im_end|>\\n
  | <|im_start|>assistant\\n
  chat template: from the tokenizer
  system prompt: none

row 1: 28 tokens
  | <|im_start|>user\\n
  | xxxxxxxxx<|im_end|>\\n
  | <|im_start|>assistant\\n
  chat template: from the tokenizer
  system prompt: none

training, tokens of prompts:
  4 rows: median 23, 95 % have 39 or fewer, longest 39 tokens
  22-23  2 ########################################
  24-25  0
  26-27  0
  28-29  1 ####################
  30-31  0
  32-33  0
  34-35  0
  36-37  0
  38-39  1 ####################
1 of 4 rows is over rollout.max_prompt_length 28: the longest has 39 tokens,
  95 % of all rows have 39 or fewer; the run refuses them
a run has rollout.max_prompt_length=28, rollout.max_tokens_to_generate=89
"""
    )
    assert max(map(len, out.splitlines())) < 80


def test_the_rows_of_supervised_commands_are_shown_by_their_name(folder, capsys):
    out = said(["sft", "data=chats.jsonl", "model=m", "rows=1", "data.max_length=20"], capsys)
    assert "  + 4<|im_end|>\\n\n" in out and "median 26" in out and "  9 tokens are trained" in out
    assert "3 of 3 rows are over data.max_length 20" in out and "the run refuses them" in out
    assert "none is over the model's max_position_embeddings 128" in out
    out = said(["dpo", "data=pairs.jsonl", "tokenizer=m", "rows=1", "data.apply_chat_template=false"], capsys)
    assert "row 0, chosen: 6 tokens" in out and "row 0, rejected: 6 tokens" in out and "plain text" in out
    assert said(["rm", "data=pairs.jsonl", "model=m", "rows=0"], capsys).startswith("training, tokens of sequences")
    lines(folder / "bare.jsonl", [{"chosen": "x", "rejected": "y"}])  # a score reads what a policy can't foretell
    assert "row 0, chosen: 2 tokens" in said(["rm", "data=bare.jsonl", "model=m"], capsys)


def test_evaluation_rows_and_streams_are_looked_at_too(folder, capsys):
    out = said(["data=plain.jsonl", "model=m", "rows=0", "data.eval_fraction=0.25"], capsys)
    assert "training, tokens of prompts:\n  3 rows" in out and "evaluation, tokens of prompts:\n  1 row:" in out
    out = said(["data=plain.jsonl", "model=m", "data.streaming=true", "data.shuffle=false"], capsys)
    assert "training, the first 1000 rows of a stream, tokens of prompts:\n  4 rows" in out


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["model=m"], "no data; write data="),
        (["data=plain.jsonl"], "no tokenizer; write model="),
        (
            ["data=plain.jsonl", "model=whet.demo:sft_model"],
            "a run creates model=whet.demo:sft_model by a function; write tokenizer=",
        ),
        (["data=plain.jsonl", "model=m", "rows=few"], "rows=few: expected how many rows"),
        (["sft", "data=plain.jsonl", "model=m", "algo.beta=1"], "unknown key algo.beta"),
        (["data=chats.jsonl", "model=m"], "row 0 ends with the assistant's turn '4'"),
    ],
)
def test_what_is_wrong_is_said(folder, capsys, words, found):
    assert found in said(words, capsys, status=2)


def test_both_ways_on_from_a_row_with_its_answer_are_keys(folder, capsys):
    words = ["data=chats.jsonl", "model=m", "rows=1"]
    assert said([*words, "data.on_answered=take_off"], capsys).startswith(
        "row 0: 23 tokens\n  | <|im_start|>user\\n\n  | 2+2?<|im_end|>\\n\n  | <|im_start|>assistant\\n\n  chat"
    )
    assert "  | <|im_start|>assistant\\n\n  | 4\n" in said([*words, "data.on_answered=continue"], capsys)
    rows = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    found = settle("data.on_answered=take_off", train=rows)
    assert [p.columns for p in found.train] == [{"answer": "4"}] * 3


def test_help(capsys):
    assert main(["data", "--help"]) == 0
    assert "whet data sft data=chats.jsonl" in capsys.readouterr().out


# ---- what a run settles ----------------------------------------------------------------------------------------------


def settle(*words, train=PLAIN, evaluation=None, kind=RunConfig):
    return resolve_defaults(load_run(["model=m", *words], kind), train, evaluation)


def test_defaults_of_the_command_line_and_what_the_models_context_leaves_of_them(folder):
    for kind, generations in ((RunConfig, 8), (PPORunConfig, 1)):
        c = settle(kind=kind).config
        assert (c.algo.num_generations, c.algo.beta, c.rollout.temperature) == (generations, 0.0, 1.0)
        assert c.data.apply_chat_template is True
        assert (c.rollout.max_prompt_length, c.rollout.max_tokens_to_generate) == (39, 128 - 39)
    tiny_model(max_position_embeddings=4096).config.save_pretrained("m")
    c = settle(evaluation=[{"prompt": "x" * 100}]).config  # evaluation shares the limit
    assert (c.rollout.max_prompt_length, c.rollout.max_tokens_to_generate) == (119, 512)


def test_what_was_given_stays_and_the_prompts_are_encoded_once(folder):
    given = ("rollout.max_prompt_length=40", "rollout.max_tokens_to_generate=7")
    found = settle(*given)
    assert all(isinstance(p, Prompt) for p in found.train) and found.config.rollout.max_prompt_length == 40
    found = settle(given[1])
    assert all(isinstance(p, Prompt) for p in found.train) and [p.columns["answer"] for p in found.train] == [
        3,
        9,
        4,
        20,
    ]
    assert (found.config.rollout.max_prompt_length, found.config.rollout.max_tokens_to_generate) == (39, 7)


def test_prompts_beyond_the_context_are_refused_or_as_was_said_left_out(folder):
    with pytest.raises(DataError, match=r"1 of 4 prompts can't fit.*: 39 prompt tokens .* = 139, .*_length=28 with"):
        settle("rollout.max_tokens_to_generate=100")
    said = r"1 of 5 prompts can't fit.* the longest: 219 prompt tokens .*; set rollout.max_prompt_length=64 with"
    with pytest.raises(DataError, match=said):
        settle(train=[*PLAIN, {"prompt": "x" * 200}])
    with pytest.raises(ConfigError, match="max_tokens_to_generate=128 leaves no room in 128 positions"):
        settle("rollout.max_tokens_to_generate=128")
    found = settle("rollout.on_long_prompt=drop", train=[*PLAIN, {"prompt": "x" * 200}])
    assert [p.row for p in found.train] == [0, 1, 2, 3] and found.config.rollout.max_tokens_to_generate == 64
    assert found.config.rollout.max_prompt_length == 64


def test_of_a_stream_the_limit_has_to_be_said(folder):
    with pytest.raises(ConfigError, match=r"rollout.max_prompt_length is needed: the data are a stream"):
        settle(train=(row for row in PLAIN))
    found = settle("rollout.max_prompt_length=50", train=(row for row in PLAIN))
    assert found.config.rollout.max_tokens_to_generate == 78


def test_ready_made_batches_are_measured_and_stay_batches(folder):
    batches = [{"prompts": ["x" * 5, "x" * 6], "answer": [5, 6]}]
    found = settle(train=batches)
    assert found.train is batches and found.config.rollout.max_prompt_length == 25


def test_the_chat_template_is_applied_to_plain_text_and_said_in_one_line(folder, caplog):
    caplog.set_level("INFO", logger="whet")
    line = "chat template: each plain-text prompt is a user's turn in it (data.apply_chat_template=auto; false keeps "
    assert settle().config.data.apply_chat_template is True and caplog.text.count(line) == 1
    caplog.clear()
    assert len(settle("data.apply_chat_template=false").train[0].tokens) == 3 and line not in caplog.text
    settle(train=[{"messages": [{"role": "user", "content": "2+2?"}]}])
    assert line not in caplog.text  # conversations go through it in any case
    bare = byte_tokenizer()
    bare.chat_template = None
    bare.save_pretrained("bare")
    assert settle("tokenizer=bare").config.data.apply_chat_template is False
    dated = "data.chat_template_kwargs={chat_template: '{{ strftime_now(\"%d/%m\") }}{{ messages[0].content }}'}"
    made = settle("tokenizer=bare", dated, train=[{"prompt": "x"}])  # and keeps its date in the run's configuration
    day = made.config.rollout.chat_template_kwargs["strftime_now"]
    assert f"it writes the date, which stays {day} (rollout.chat_template_kwargs.strftime_now)" in caplog.text
    assert made.train[0].tokens.tolist() == [*f"{day[8:]}/{day[5:7]}x".encode()]
    again = dated.replace("}'}", "}', strftime_now: 2020-02-03}")
    (prompt,) = settle("tokenizer=bare", again, train=[{"prompt": "x"}]).train
    assert bytes(prompt.tokens.tolist()) == b"03/02x"
    own = settle("tokenizer=bare", "data.chat_template_kwargs={chat_template: '<{{ messages[0].content }}>'}")
    assert bytes(own.train[0].tokens.tolist()) == b"<xxx>" and own.config.rollout.chat_template_kwargs


def test_commands_that_train_nothing_import_no_code_of_models():
    heavy = ["whet.cluster", "whet.models.attention", "whet.learners.grpo"]
    heavy += ["whet.rollout.policy_rollouts", "transformers"]
    code = f"""import sys, whet.cli.push
assert "torch" not in sys.modules
import whet.cli.data
print([name for name in {heavy} if name in sys.modules])"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

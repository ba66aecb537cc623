import functools
import io
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from whet._version import __version__
from whet.cli import main, run_and_report
from whet.cli.help import COMMON_KEYS
from whet.cli.registry import COMMANDS, INFO_COMMANDS, config_class
from whet.config import SHORTHANDS, RunConfig, dump_tree, load_run
from whet.config.introspection import leaves
from whet.errors import ConfigError, DataError

WHOLE = ["model=m", "data=d.jsonl", "reward=exact_match"]


def whole():
    return {"actor": {"model": "m"}, "data": {"path": "d.jsonl"}, "reward": "exact_match"}


@pytest.fixture
def called(monkeypatch):
    """whet.cli.commands with commands that only note what they were called with."""
    calls = []
    fake = types.SimpleNamespace(grpo=lambda config: calls.append(config), demo=lambda words: calls.append(words))
    monkeypatch.setitem(sys.modules, "whet.cli.commands", fake)
    monkeypatch.setattr("whet.cli.commands", fake, raising=False)
    monkeypatch.setattr("whet.observe.progress.setup_logging", lambda: None)
    return calls


def failing(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("whet.cli.commands.grpo", fail)


def test_grpo_is_given_the_checked_configuration(called):
    assert main(["grpo", *WHOLE, "algo.beta=0.0"]) == 0
    assert called == [RunConfig(**whole(), algo={"beta": 0.0})]


def test_the_demo_is_given_its_words(called):
    assert main(["demo", "seed=3"]) == 0 and called == [["seed=3"]]


def test_profile_is_a_flag_of_both_commands_that_train(called):
    assert main(["grpo", "--profile", *WHOLE]) == 0 and main(["demo", "--profile", "seed=3"]) == 0
    assert called == [RunConfig(**whole(), trainer={"profile": True}), ["trainer.profile=true", "seed=3"]]


def test_print_config_prints_yaml_and_runs_nothing(called, capsys, tmp_path):
    assert main(["grpo", "--print_config", *WHOLE]) == 0
    text = capsys.readouterr().out
    (tmp_path / "c.yaml").write_text(text)
    assert called == [] and main(["grpo", "--config", str(tmp_path / "c.yaml")]) == 0
    assert called == [RunConfig(**whole())]


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["help"]])
def test_help_lists_every_command(words, capsys):
    assert main(words) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command}" in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_is_one_screen_of_keys_that_there_are(command, capsys):
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 0 < len(lines) <= 45 and max(map(len, lines)) <= 100
    if command in INFO_COMMANDS:
        return
    kind, short = config_class({"data": "grpo", "demo": "grpo", "plan": "grpo"}.get(command, command))
    known = {key for key, *_ in leaves(kind)} | {key for key, *_ in leaves(kind, optional=True)} | {*short}
    known |= {"algo.preset"} | {"data": {"rows=3"}, "plan": {"memory_gb=24", "num_processes=8"}}.get(command, {"seed"})
    keys = [key for _, keys in COMMON_KEYS[command] for key in keys]
    assert [key for key in keys if key not in known and key.partition("=")[0] not in known] == []
    assert all(any(line.startswith(f"  {key}") for line in lines) for key in keys)


def test_the_help_of_the_demo_has_the_values_of_its_recipe():
    config = dump_tree(load_run(["--config", str(Path(__file__).parents[3] / "recipes" / "demo.yaml")]))
    for key, _, value in (key.partition("=") for key in COMMON_KEYS["demo"][0][1]):
        path = {"seed": "trainer.seed"}.get(key, SHORTHANDS.get(key, key)).split(".")
        if path[-1] not in ("run_dir", "preset"):
            assert functools.reduce(dict.__getitem__, path, config) == float(value), key


def test_help_says_the_default_that_the_class_has(capsys):
    main(["grpo", "--help"])
    text = capsys.readouterr().out
    for line in ("data.batch_size=8 ", "algo.num_generations=8 ", "rollout.temperature=1.0 ", "actor.lr=... "):
        assert f"\n  {line}" in text
    main(["ppo", "--help"])
    assert "\n  algo.num_generations=1 " in capsys.readouterr().out


@pytest.mark.parametrize(("command", "own"), [("grpo", "algo.policy_loss_fn=grpo"), ("ppo", "algo.gae_lambda=0.95")])
def test_help_all_lists_every_key_with_its_docstring(command, own, capsys):
    main([command, "--help", "all"])
    text = capsys.readouterr().out
    assert f"\n  {own}  (" in text and "rollout.vllm.max_num_seqs=" not in text
    assert "  data.batch_size=8  (positive int)\n      Rows of one step: prompts, conversations or pairs." in text


def test_help_of_a_section_or_key_shows_it_alone(capsys):
    main(["grpo", "--help", "critic"])
    text = capsys.readouterr().out
    assert text.startswith("  critic=null") and "  critic.optim.lr=null" in text and "actor.model=" not in text
    main(["grpo", "--help=rollout.vllm"])
    assert "  rollout.vllm.max_num_seqs=" in capsys.readouterr().out
    main(["grpo", "--help", "actor.lr"])
    assert capsys.readouterr().out.startswith("  actor.optim.lr=null")
    main(["grpo", "--help", "data"])  # a section, and the short key of data.path
    assert "  data.batch_size=8" in capsys.readouterr().out
    assert main(["grpo", "--help", "rolout"]) == 2
    assert "--help rolout: there is no such section or key; did you mean rollout" in capsys.readouterr().err


def test_help_keeps_its_columns_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["grpo", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and any(line.startswith(" " * 36) for line in lines)


def test_the_version(capsys):
    assert main(["version"]) == 0 and capsys.readouterr().out == f"whet {__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["grop"]) == 2
    known = ", ".join(sorted(COMMANDS))
    assert capsys.readouterr().err == f"whet: unknown command 'grop'; did you mean grpo? Known: {known}\n"
    assert main(["train"]) == 2
    assert "did you mean whet grpo, ppo, sft, rm or dpo? `whet --help`" in capsys.readouterr().err
    assert main(["grpo", "--halp"]) == 2
    assert "unknown flag --halp; did you mean --help?" in capsys.readouterr().err


def test_wrong_keys_are_one_message_with_status_2(called, capsys):
    assert main(["grpo", "actor.lrr=3", "trainer.max_steps=0"]) == 2
    out = capsys.readouterr()
    assert out.out == "" and "Traceback" not in out.err and called == []
    said = [line.split()[:3] for line in out.err.splitlines()]
    assert said[:2] == [["whet", "grpo:"], ["unknown", "key", "actor.lrr;"]] and said[2][0] == "trainer.max_steps"
    assert [line[1:] for line in said[3:]] == [
        ["data;", "write"],
        ["reward;", "write"],
    ]  # a model may be in actor


def test_whet_debug_shows_where_an_error_came_from(called, monkeypatch):
    monkeypatch.setenv("WHET_DEBUG", "1")
    with pytest.raises(ConfigError):
        main(["grpo", "actor.lrr=3"])


def test_errors_of_whet_are_messages_and_bugs_are_tracebacks(called, monkeypatch, capsys):
    monkeypatch.setattr("whet.cli._log_inputs", lambda *_: None)
    failing(monkeypatch, DataError("no column 'prompt'"))
    assert main(["grpo", *WHOLE]) == 2 and capsys.readouterr().err == "whet grpo: no column 'prompt'\n"
    failing(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["grpo", *WHOLE])


def test_ctrl_c_is_status_130(called, monkeypatch, capsys, tmp_path):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))  # torchrun would name a process that only waited
    failing(monkeypatch, KeyboardInterrupt())
    assert main(["grpo", *WHOLE]) == 130 and "Traceback" not in capsys.readouterr().err
    assert "stopped by Ctrl-C" in file.read_text()


def test_only_rank_0_speaks_but_any_rank_can_name_an_error_of_its_own(called, monkeypatch, capsys):
    monkeypatch.setattr("whet.cli._log_inputs", lambda *_: None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["version"]) == 0 and main(["grpo", "x=1"]) == 2
    assert capsys.readouterr() == ("", "")
    failing(monkeypatch, DataError("rank 1's own"))
    assert main(["grpo", *WHOLE]) == 2 and capsys.readouterr().err == "[rank 1] whet grpo: rank 1's own\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchrun_reports_the_error_of_the_first_rank_that_failed(called, monkeypatch, tmp_path, capsys, rank):
    """torchrun ends the other ranks, which may have printed nothing by then."""
    file = tmp_path / "error.json"
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(file)}.items():
        monkeypatch.setenv(name, value)
    start = int(time.time())
    assert main(["grpo", "x=1"]) == 2
    failure = ProcessFailure(local_rank=int(rank), pid=1, exitcode=2, error_file=str(file))
    assert start <= failure.timestamp <= time.time()
    report = str(ChildFailedError("whet", {int(rank): failure}))
    assert "  traceback : whet grpo:" in report and "unknown" in report
    assert ("whet grpo:" in capsys.readouterr().err) is (rank == "0")


def test_a_process_whose_connection_is_lost_does_not_hide_the_one_that_ended(monkeypatch, tmp_path, capsys):
    """As it loads a model, say, before a run knows its phase. Of equal seconds torchrun would take the lower rank."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file := tmp_path / "error.json"))

    def work():
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]")

    start = int(time.time())
    assert run_and_report("whet grpo", work) == 2
    assert capsys.readouterr().err == "whet grpo: another process ended; its own message says why\n"
    assert int(json.loads(file.read_text())["message"]["extraInfo"]["timestamp"]) > start


@pytest.mark.parametrize("rank", ["x", "1"])  # what is left in an environment silences nothing
def test_a_rank_of_no_job_of_several_speaks(called, monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["grpo", "x=1"]) == 2 and "x" in capsys.readouterr().err
    assert main(["version"]) == 0 and capsys.readouterr().out


def test_the_module_runs_as_a_program_and_help_imports_the_standard_library_alone():
    code = (
        "import sys; from whet.cli import main; main(['--help']); "
        "heavy = {'torch', 'transformers', 'pydantic', 'yaml', 'numpy'} & set(sys.modules); sys.exit(len(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
    out = subprocess.run([sys.executable, "-m", "whet.cli", "version"], capture_output=True, text=True)
    assert out.returncode == 0 and out.stdout == f"whet {__version__}\n"


def test_the_package_runs_as_a_program():
    out = subprocess.run([sys.executable, "-m", "whet", "version"], capture_output=True, text=True)
    assert out.returncode == 0 and out.stdout == f"whet {__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["grpo", "--profil"], "unknown flag --profil; did you mean --profile?"),
        (["grpo", "--profil", "model=m"], "unknown flag --profil; did you mean --profile?"),
        (["demo", "--profil"], "unknown flag --profil; did you mean --profile?"),
        (["grpo", "--print-conf"], "unknown flag --print-conf; did you mean --print_config?"),
        (["grpo", "--confg", "run.yaml"], "unknown flag --confg; did you mean --config?"),
        (
            ["generate", "--profile", "model=m"],
            "--profile is not a flag of whet generate, only of whet demo, whet grpo, whet ppo, whet sft, whet rm, "
            "whet dpo",
        ),
        (
            ["demo", "--print-config"],
            "--print-config is not a flag of whet demo, only of whet chat, whet compare, whet eval, whet generate, "
            "whet push, whet report, whet serve, whet watch, whet grpo, whet ppo, whet sft, whet rm, whet dpo",
        ),
    ],
)
def test_a_flag_that_is_misspelt_or_another_commands_is_named_and_takes_no_value(called, capsys, words, said):
    assert main(words) == 2 and called == []
    assert capsys.readouterr().err == f"whet {words[0]}: {said}\n"


def test_keys_whose_names_are_near_a_flags_are_keys(called, capsys):
    from whet.config.generate import GenerateConfig, load_sampling

    assert load_sampling(GenerateConfig, ["--prompts", "a.jsonl"]).prompts == "a.jsonl"
    assert main(["generate", "--prompts", "nowhere.jsonl"]) == 2
    assert capsys.readouterr().err == "whet generate: no model; write model=<folder, run folder or hub name>\n"


def test_a_section_given_at_the_top_is_named_where_it_lies(called, capsys):
    assert main(["grpo", *WHOLE, "constraint={regex: a}"]) == 2
    assert "\n  unknown key constraint; did you mean rollout.constraint?\n" in capsys.readouterr().err
    assert main(["grpo", *WHOLE, "constraint.regex=a"]) == 2
    assert "did you mean rollout.constraint?" in capsys.readouterr().err


def test_closed_streams_are_no_traceback(model_folder):
    def run(words, closed):
        line = f"{sys.executable} -m whet {words} {closed}"
        return subprocess.run(line, shell=True, capture_output=True, text=True)

    asked = run(f"generate model={model_folder} prompt=-", "<&-")
    assert asked.returncode == 2
    said = "prompt=- reads standard input, which is closed; pipe a prompt in, or write prompt=TEXT"
    assert asked.stderr == f"whet generate: {said}\n"
    talk = run(f"chat model={model_folder}", "<&-")
    assert talk.returncode == 2
    assert talk.stderr.startswith("whet chat: a chat reads standard input, which is closed")
    assert run("version", ">&-").returncode == 0 and run("grop", "2>&-").returncode == 2


# ---- output that nobody takes ----------------------------------------------------------------------------------------


@pytest.fixture
def dead(monkeypatch):
    """Makes both output streams pipes whose reader has gone."""
    made = []

    def make():  # in the test: pytest sets the streams anew after the fixtures
        for name in ("stdout", "stderr"):
            reader, writer = os.pipe()
            os.close(reader)
            made.append(open(writer, "w"))
            monkeypatch.setattr(sys, name, made[-1])

    yield make
    for stream in made:
        stream.close()


def test_training_goes_on_whatever_becomes_of_what_it_prints(called, monkeypatch, dead):
    def prints(_):
        for _ in range(2):
            print("to nobody", flush=True)
            print("to nobody", file=sys.stderr, flush=True)
        called.append("done")

    monkeypatch.setattr("whet.cli.commands.grpo", prints)
    monkeypatch.setattr("whet.cli.commands.demo", prints)
    dead()
    assert main(["grpo", *WHOLE]) == main(["demo"]) == 0 and called == ["done", "done"]


@pytest.mark.parametrize("prints", [True, False])
def test_a_broken_pipe_of_a_run_itself_is_no_success(called, monkeypatch, dead, prints):
    def fails(_):
        if prints:
            print("to nobody", flush=True)
        raise BrokenPipeError("a server's")

    monkeypatch.setattr("whet.cli.commands.grpo", fails)
    dead()
    with pytest.raises(BrokenPipeError, match="a server's"):
        main(["grpo", *WHOLE])


def test_with_a_dead_stderr_the_status_is_what_it_would_be(called, monkeypatch, dead):
    failing(monkeypatch, KeyboardInterrupt("stopped after step 3"))
    dead()
    assert main(["grpo", *WHOLE]) == 130 and main(["grop"]) == 2


@pytest.mark.parametrize("words", [["version"], ["grpo", "--help"], ["grpo", "--print_config", *WHOLE]])
def test_what_only_prints_ends_quietly_where_nobody_reads_on_and_in_words_on_a_full_disk(words, dead, monkeypatch):
    dead()
    assert main(words) == 0
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(words) == 2
    assert "standard output can't be written: [Errno 28] No space left on device" in said.getvalue()


def test_the_command_to_continue_names_torchrun_where_several_processes_run(monkeypatch):
    from whet.cli.commands import program

    assert "torch" not in program()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert re.fullmatch(r".*torch\S*run --standalone --nproc_per_node=4 -m whet", program())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert re.fullmatch(r".*torch\S*run --nnodes=2 --nproc_per_node=2 -m whet", program())

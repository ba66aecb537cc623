import functools
import subprocess
import sys

import pytest

from whet.config import (
    SHORTHANDS,
    ClusterConfig,
    GRPOConfig,
    OptimConfig,
    RLTrainingConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    diff,
    dump,
    dump_tree,
    help_text,
    load,
    load_run,
    parse_config_args,
    read_yaml,
)
from whet.config.evaluate import load_eval
from whet.config.generate import ChatConfig, GenerateConfig, load_sampling
from whet.config.introspection import field_docs, leaves
from whet.config.push import load_push
from whet.errors import ConfigError


def message(*argv):
    with pytest.raises(ConfigError) as error:
        load_run(argv)
    return str(error.value)


RICH = RunConfig(
    actor=RoleConfig(model="m", optim=OptimConfig(lr=3e-7, schedule_kwargs={"min_lr": 1e-9})),
    critic=RoleConfig(),
    rollout=RolloutConfig(stop=("\n", "yes", "1e-3", "12:30"), eos_tokens=(1, 2), eval={"temperature": 0.0}),
    algo=GRPOConfig(epsilon_high=0.28),
    trainer=RLTrainingConfig(
        max_steps=3,
        loggers=("wandb",),
        checkpointing_options={"max_to_keep": None},
        metrics_logging_options={"backend_kwargs": {"wandb": {"mode": "offline"}}},
    ),
    reward={"a.py:f": 1.0, "b": 0.5},
)


@pytest.mark.parametrize("config", [RunConfig(), RICH])
def test_dump_and_load_give_an_equal_config(config, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(dump(config))
    assert load_run(["--config", str(path)]) == config
    assert diff(config, read_yaml(path)) == []


def test_words_come_with_or_without_dashes_and_after_every_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("algo: {beta: 0.5, num_generations: 4}\n")
    argv = ["--algo.beta", "0.0", "trainer.max-steps=3", "--config", str(path), "--algo.epsilon=0.1"]
    made = load_run(argv)
    wanted = RunConfig(algo=GRPOConfig(beta=0.0, num_generations=4, epsilon=0.1)).algo
    assert made.algo == wanted and made.trainer.max_steps == 3


def test_later_files_and_words_win(tmp_path):
    for name, beta in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name).write_text(f"algo: {{beta: {beta}}}")
    files = ["--config", str(tmp_path / "a"), "--config", str(tmp_path / "b")]
    assert load_run(files).algo.beta == 0.2
    assert load_run(["algo.beta=0.3", "algo.beta=0.4", *files]).algo.beta == 0.4


def test_shorthands_work_on_the_command_line_and_in_files(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: d.jsonl\nactor: {lr: 1e-5, betas: [0.9, 0.95]}\n")
    for made in (
        load_run(["--config", str(path)]),
        load_run(["model=m", "data=d.jsonl", "actor.lr=1e-5", "actor.betas=[0.9, 0.95]"]),
    ):
        assert (made.actor.model, made.data.path) == ("m", "d.jsonl")
        assert made.actor.optim == OptimConfig(lr=1e-5, betas=(0.9, 0.95))
    assert set(SHORTHANDS) >= {"model", "data", "actor.lr", "critic.warmup_steps", "reward_workers"}


def test_a_section_is_no_shorthand():
    assert load_run(["data={path: d, batch_size: 2}"]).data.batch_size == 2
    assert "actor.lr and actor.optim.lr are the same key" in message("actor={lr: 1, optim: {lr: 2}}")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("actor.lrr=3", "unknown key actor.lrr; did you mean actor.lr"),
        ("modell=x", "unknown key modell; did you mean model?"),
        ("lr=3", "did you mean actor.lr"),
        ("trainer.checkpointing_options.max_keep=3", "did you mean trainer.checkpointing_options.max_to_keep?"),
        ("trainer.profiler_options.skip=3", "unknown key trainer.profiler_options.skip"),
        (
            "trainer.profiler_options.profile_steps=3",
            "trainer.profiler_options.profile_steps; did you mean trainer.profiler_options.profiler_steps",
        ),
        (
            "trainer.profiler_options.skip_first_n_steps=-1",
            "trainer.profiler_options.skip_first_n_steps must not be neg",
        ),
        ("trainer.metrics_logging_options.run=x", "did you mean trainer.metrics_logging_options.run_name"),
        ("actor.optim.betas=[0.9, 2]", "actor.optim.betas must lie in [0, 1), got (0.9, 2.0)"),
        ("critic.optim.eps=-1", "critic.optim.eps must be positive, got -1.0"),
        ("rollout.eval.temprature=0", "rollout.eval.temprature: unknown key; did you mean eval.temperature"),
        ("critic.optim.lrr=3", "unknown key critic.optim.lrr; did you mean critic.optim.lr?"),
        ("actor.lr=abc", "actor.optim.lr: expected a number, got 'abc'"),
        ("actor.lr=.nan", "actor.optim.lr: expected a finite number, got nan"),
        ("actor.dtype=fp8", "actor.dtype: input should be 'auto', 'float32' or 'bfloat16', got 'fp8'"),
        ("trainer.max_steps=2.5", "trainer.max_steps must be a positive integer. Got: 2.5"),
        ("trainer=3", "trainer is a section: give its keys"),
        ("actor=my/model", "actor is a section: give its keys, e.g. actor.model, got 'my/model'"),
        ("rollout.eval.temperature=hot", "rollout.eval.temperature: expected a number, got 'hot'"),
        ("trainer.actor_optimizer.lr=1", "set actor.optim"),
        ("reward={a: b}", "reward.a: expected a number, got 'b'"),
        ("algo.num_generations=1", "algo.num_generations must be greater than 1"),
        ("algo.use_rollout_logps=yes", "expected true or false, got 'yes'"),
        ("rollout.tensor_parallel_size=2", "rollout.tensor_parallel_size: the processes that divide matrices"),
        ("actor.betas={", "actor.betas: not YAML"),
        ("trainer.run_dir=", "trainer.run_dir must not be empty, got ''; leave the key out"),
        ("model=", "actor.model must not be empty"),
        ("actor.betas=[0.9]", "actor.optim.betas: expected 2 values, got 1: [0.9]"),
        ("actor.betas=[0.9, 0.9, 0.9]", "actor.optim.betas: expected 2 values, got 3: [0.9, 0.9, 0.9]"),
        ("actor.betas=0.9", "actor.optim.betas: expected a list, [a, b], got 0.9"),
        ("trainer.reward_timeout_s=1e300", "trainer.reward_timeout_s must be between 0 and"),
        ("trainer.checkpointing_options.save_interval_s=-1", "save_interval_s must be between 0 and"),
        ("rollout.max_batch_size=1000000000", "rollout.max_batch_size must be at most 1000000, got 1000000000"),
        ("trainer.max_steps=1000000001", "trainer.max_steps must be at most 1000000000, got 1000000001"),
        ("trainer.seed=-1", "trainer.seed must be an integer between 0 and 2**63 - 1, got -1"),
        ("rollout.top_k=9223372036854775808", "rollout.top_k must be an integer of 64 bits, -2**63 to 2**63 - 1, got"),
        ("actor.eps=1e39", "actor.optim.eps must be between -3.4e+38 and 3.4e+38, the range of fp32, got 1e+39"),
        (
            "actor.eps=1e-39",
            "actor.optim.eps must be 0 or at least 1.2e-38 in magnitude, which fp32 can hold, got 1e-39",
        ),
        ("rollout.temperature=-1", "rollout.temperature must not be negative, got -1.0; 0.0 is greedy"),
        ("rollout.temperature=1e-7", "rollout.temperature must be 0.0 (greedy) or between 1e-06 and 1e+06"),
        ("rollout.eval.temperature=1e7", "rollout.eval.temperature must be 0.0 (greedy) or between"),
        ("--algo.beta", "algo.beta: no value; write algo.beta=VALUE"),
        ("algo.beta", "expected key=value or --config FILE"),
    ],
)
def test_messages_say_the_key_the_rule_and_the_nearest(word, expected):
    assert expected in message(word)


def test_sizes_that_do_not_divide_are_told_at_once_however_large():
    sizes = "trainer.mini_batch_size=999983", "trainer.train_micro_batch_size=499992"
    assert message(*sizes).endswith("use trainer.train_micro_batch_size=1 or 999983")


def test_keys_of_mappings_for_others_stay_what_they_are(tmp_path):
    made = load_run(["rollout.generation_kwargs={a: {1: x, 2.5: y, true: z, null: w}}"])
    (tmp_path / "run.yaml").write_text(dump(made))
    assert load_run(["--config", str(tmp_path / "run.yaml")]) == made


def test_a_dash_word_is_no_value():
    assert "algo.beta: no value" in message("--algo.beta", "--algo.epsilon=1")


def test_every_problem_comes_at_once():
    assert len(message("actor.lrr=3", "actor.dtype=fp8", "trainer.max_steps=0").splitlines()) == 3


def test_files_that_are_not_there_or_no_mapping_are_named(tmp_path):
    assert "No such file" in message("--config", str(tmp_path / "x.yaml"))
    for text, words in (("- 1", "a mapping of keys, got list"), ("a: [", "not YAML")):
        (tmp_path / "y.yaml").write_text(text)
        assert words in message("--config", str(tmp_path / "y.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    assert load_run(["--config", str(tmp_path / "empty.yaml")]) == RunConfig()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1.5e3", 1500.0), ("-.5", -0.5), ("2.", 2.0), ("10", 10), ("-3", -3), ("007", "007"),
        ("yes", "yes"), ("off", "off"), ("true", True), ("12:30", "12:30"), ("2024-01-01", "2024-01-01"),
        ("0x10", "0x10"), ("null", None), ("", ""), ("a.py:f", "a.py:f"), ("[a, 1]", ["a", 1]), ("1e", "1e"),
        ("1_000", 1000),
    ],
)  # fmt: skip
def test_yaml_scalars_mean_what_they_look_like(text, value):
    got = parse_config_args([f"k={text}"])["k"]
    assert got == value and type(got) is type(value)


def test_diff_lists_changes_additions_and_losses():
    old, new = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": [1]}
    assert diff(old, new) == ["a.b: 1 -> 3", "a.c: 2 -> (none)", "d: (none) -> [1]"]


def test_objects_are_dumped_by_name_and_read_back_as_references():
    made = ClusterConfig(rollout_engine=functools.partial(max, 1), device="cpu")
    found = dump_tree(made)
    assert found["rollout_engine"] == "builtins:max" and found["device"] == "cpu"
    assert dump_tree(GRPOConfig(policy_loss_fn=load))["policy_loss_fn"] == "whet.config.loader:load"


def test_help_shows_every_key_with_default_type_and_docstring():
    text = help_text(RunConfig, SHORTHANDS)
    assert "  algo.beta=0.0  (float)\n      Weight of the KL" in text
    assert "  trainer.max_steps=null  (positive int | None)\n" in text
    assert "  actor.lr = actor.optim.lr" in text
    assert "InstanceOf" not in text and "Annotated" not in text


def test_help_lists_the_keys_of_every_nested_section_or_says_where_they_are():
    text = help_text(RunConfig, SHORTHANDS)
    again = (
        "critic.",
        "reference.",
        "reward_model.",
        "teacher.",
        "trainer.actor_optimizer.",
        "trainer.critic_optimizer.",
    )
    nested = [(k, f, c) for k, f, c in leaves(RunConfig, True) if not k.startswith(again)]
    assert [k for k, *_ in nested if f"\n  {k}=" not in f"\n{text}"] == []
    assert [k for k, f, c in nested if field_docs(c)[f.name].splitlines()[0] not in text] == []
    assert "  trainer.checkpointing_options.max_to_keep=3  (positive int | None)\n      Number of checkpoints" in text
    for role in ("critic", "reference", "teacher"):
        assert f"  Keys: {role}.* as actor.* above." in text
    assert "critic_optimizer.*" not in text  # refused in a run's configuration


def test_the_config_imports_neither_torch_nor_transformers():
    code = "import sys, whet, whet.cli, whet.config; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


# ---- text as it was typed -------------------------------------------------------------------------------------------

TYPED = [
    "Be brief # really",
    "Answer: the number",
    "one\ntwo",
    ' "Be" ',
    "'a'",
    "[a, b]",
    "{",
    "*x",
    "1e-3",
    "yes",
    "~",
    "",
]


@pytest.mark.parametrize("text", TYPED)
def test_a_key_of_text_takes_the_word_as_it_was_typed_in_every_command(text):
    word = f"system_prompt={text}"
    for made in (load_run([f"data.{word}"]), load_eval([f"data.{word}"])):
        assert made.data.system_prompt == text
    for kind in (GenerateConfig, ChatConfig):
        assert load_sampling(kind, [word]).system_prompt == text
    assert load_push(["runs/a", f"message={text}"]).message == text


def test_text_that_may_be_absent_is_null_by_that_word_alone():
    made = load_run(
        ["trainer.run_dir=runs/a #1", "data.eval_path=null", "data=a: b.jsonl", "model= m", "--data.split", "a #"]
    )
    assert (made.trainer.run_dir, made.data.eval_path, made.data.path) == ("runs/a #1", None, "a: b.jsonl")
    assert (made.actor.model, made.data.split) == (" m", "a #")
    assert load_run(["trainer.run_dir=~"]).trainer.run_dir == "~"
    assert load_run(["algo.loss_agg_mode=a.py:f # x"]).algo.loss_agg_mode == "a.py:f # x"


def test_where_a_list_or_a_mapping_may_stand_too_a_bracket_or_a_quote_makes_yaml():
    stops = lambda word: load_run([f"rollout.stop={word}"]).rollout.stop
    assert [stops(word) for word in ("# end", "a: b", "12", '["a # b", "12"]', '"\\n"')] == [
        ("# end",),
        ("a: b",),
        ("12",),
        ("a # b", "12"),
        ("\n",),
    ]
    rewards = lambda word: load_run([f"reward={word}"]).reward
    assert rewards("a #1.py:f") == "a #1.py:f" and rewards("[a, b]") == ["a", "b"] and rewards("{a: 2}") == {"a": 2.0}
    assert load_run(["actor.lora.target_modules=q_proj # x"]).actor.lora.target_modules == "q_proj # x"


def test_what_is_no_text_stays_yaml():
    made = load_run(["algo.beta=0.5 # half", "data.apply_chat_template=true", "rollout.eval={temperature: 0.0}"])
    assert made.algo.beta == 0.5 and made.data.apply_chat_template is True and made.rollout.eval == {"temperature": 0.0}


def test_keys_inside_mappings_whose_type_is_known_take_text_as_the_keys_of_sections_do():
    template = "{% for m in messages %}{{ m['content'] }} # {% endfor %}"
    made = load_run(["rollout.eval.stop=a: b # c", f"rollout.chat_template_kwargs.chat_template={template}"])
    assert made.rollout.for_mode("eval").stop == ("a: b # c",)
    assert made.rollout.chat_template_kwargs["chat_template"] == template
    assert load_run(["rollout.eval.temperature=0.5 # half"]).rollout.eval == {"temperature": 0.5}

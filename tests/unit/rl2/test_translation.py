"""RL2's commands as its README and examples have them, and every key of its configurations."""

import pytest

from whet.config import DPORunConfig, PPORunConfig, RMRunConfig, RunConfig, SFTRunConfig
from whet.config.introspection import leaves
from whet.errors import ConfigError
from whet.rl2.command import main, usage
from whet.rl2.keys import KEYS
from whet.rl2.parsed_args import find_field
from whet.rl2.ppo import CONTENTS_ALONE
from whet.rl2.translate import translate_command

LEAST = {
    "ppo": [
        "actor.model_name=m",
        "data.path=d.jsonl",
        "data.prompts_per_rollout=8",
        "rollout.env_path=env.py",
        "rollout.train_sampling_params.max_new_tokens=16",
    ]
}


def at(config, key):
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


# ---- its published commands, without the sizes of several ranks ------------------------------------------------------

ORZ = [
    "data.train_data_path=Chenmien/OpenReasonerZero",
    "data.test_data_path=Chenmien/OlympiadBench",
    "data.prompts_per_rollout=128",
    "data.responses_per_prompt=64",
    "actor.model_name=Qwen/Qwen2.5-7B",
    "actor.max_length_per_device=16384",
    "actor.save_freq=32",
    "rollout.train_sampling_params.max_new_tokens=8192",
    "rollout.env_path=envs/orz.py",
    "trainer.project=OpenReasonerZero",
    "trainer.experiment_name=qwen2.5-7b",
    "trainer.test_freq=8",
]
SEARCH = [
    "data.train_data_path=train@Chenmien/SearchR1",
    "data.test_data_path=test@Chenmien/SearchR1",
    "data.prompts_per_rollout=256",
    "data.responses_per_prompt=8",
    "actor.model_name=Qwen/Qwen2.5-3B-Instruct",
    "actor.use_liger_kernel=true",
    "actor.max_length_per_device=8192",
    "actor.rollout.max_turns=4",
    "actor.rollout.train_sampling_params.max_new_tokens=512",
    "actor.rollout.env_path=envs/searchr1.py",
    "adv.estimator=reinforce",
    "trainer.disable_wandb=true",
]
COUNTDOWN = [
    "rollout.train.path=train@Chenmien/Countdown",
    "rollout.train.prompts_per_rollout=128",
    "rollout.train.responses_per_prompt=4",
    "rollout.train.sampling_params.max_new_tokens=1024",
    "rollout.train.sampling_params.stop=['</answer>']",
    "rollout.train.apply_chat_template=false",
    "rollout.test.path=test@Chenmien/Countdown",
    "rollout.env_path=envs/countdown.py",
    "actor.model_name=Qwen/Qwen2.5-3B-Instruct",
    "actor.max_length_per_device=8192",
    "trainer.total_steps=512",
    "trainer.test_freq=8",
    "trainer.save_freq=32",
]
PUBLISHED = {
    "orz_ppo": (
        [*ORZ, "actor.freeze_steps=4", "adv.estimator=gae"],
        {
            "data.path": "Chenmien/OpenReasonerZero",
            "data.eval_path": "Chenmien/OlympiadBench",
            "data.eval_split": "train",
            "data.batch_size": 128,
            "data.apply_chat_template": True,
            "actor.model": "Qwen/Qwen2.5-7B",
            "actor.optim.lr": 1e-6,
            "actor.optim.weight_decay": 1e-2,
            "actor.optim.schedule": "constant",
            "actor.gradient_checkpointing": "full",
            "critic.optim.lr": 5e-6,
            "critic.model": None,
            "algo.advantage_estimator": "gae",
            "algo.num_generations": 64,
            "algo.gae_lambda": 1.0,
            "algo.value_loss_fn": "ppo-rl2",
            "algo.clip_range_value": 0.5,
            "algo.critic_warmup_steps": 4,
            "algo.critic_updates": 12,
            "algo.entropy_coef": 0.0,
            "data.prompt_column": "messages",
            "algo.dynamic_sampling": True,
            "rollout.max_tokens_to_generate": 8192,
            "rollout.max_prompt_length": 8192,
            "rollout.temperature": 1.0,
            "rollout.eval": {"temperature": 0.0},
            "rollout.num_generations_eval": 1,
            "trainer.max_tokens_per_microbatch": 16384,
            "trainer.mini_batch_size": 128,
            "trainer.num_epochs": 1,
            "trainer.eval_every_n_steps": 8,
            "trainer.run_dir": "ckpts/qwen2.5-7b",
            "trainer.loggers": ("wandb",),
            "trainer.metrics_logging_options.project_name": "OpenReasonerZero",
            "trainer.metrics_logging_options.run_name": "qwen2.5-7b",
            "trainer.checkpointing_options.save_interval_steps": 32,
            "trainer.checkpointing_options.max_to_keep": None,
            "offload_to_cpu": True,
            "reward_names": ("envs/orz.py:reward_fn",),
        },
    ),
    "orz_reinforce": (
        [*ORZ, "adv.estimator=reinforce"],
        {
            "algo.advantage_estimator": "reinforce",
            "algo.norm_var": False,
            "algo.loss_agg_mode": "token-mean",
            "algo.epsilon": 0.2,
            "algo.beta": 0.0,
            "algo.max_num_gen_batches": 10,
            "critic": None,
        },
    ),
    "searchr1": (
        SEARCH,
        {
            "data.split": "train",
            "data.eval_split": "test",
            "data.eval_path": "Chenmien/SearchR1",
            "rollout.max_turns": 4,
            "rollout.env_path": "envs/searchr1.py",
            "rollout.max_prompt_length": 7680,
            "rollout.max_episode_tokens": 8192,
            "trainer.loggers": (),
        },
    ),
    "countdown_reinforce": (
        COUNTDOWN,
        {
            "data.apply_chat_template": False,
            "data.prompt_column": "prompt",
            "rollout.chat_template_kwargs": {"chat_template": CONTENTS_ALONE},
            "rollout.stop": ("</answer>",),
            "rollout.for_mode": None,
            "actor.optim.schedule": "cosine_with_min_lr",
            "actor.optim.schedule_kwargs": {"min_lr": 1e-7},
            "actor.optim.warmup_ratio": 0.03,
            "algo.entropy_coef": 0.0,
            "trainer.max_steps": 512,
        },
    ),
    "september": (
        [
            "train_data.path=Chenmien/OpenReasonerZero",
            "train_data.prompts_per_rollout=128",
            "train_data.responses_per_prompt=64",
            "test_data.path=Chenmien/OlympiadBench",
            "actor.model_name=Qwen/Qwen2.5-7B",
            "rollout.train_sampling_params.max_new_tokens=8192",
            "rollout.env_path=envs/orz.py",
            "adv.estimator=gae",
            "critic.scheduler=cosine",
            "trainer.use_wandb=false",
        ],
        {
            "data.path": "Chenmien/OpenReasonerZero",
            "data.eval_path": "Chenmien/OlympiadBench",
            "data.batch_size": 128,
            "data.apply_chat_template": False,
            "data.prompt_column": None,
            "rollout.chat_template_kwargs": {},
            "algo.num_generations": 64,
            "algo.critic_updates": 1,
            "algo.entropy_coef": 0.0,
            "algo.sampler_is_threshold": 2.0,
            "actor.optim.schedule": "constant",
            "actor.optim.warmup_ratio": 0.0,
            "critic.optim.schedule": "cosine",
            "critic.optim.warmup_ratio": 0.1,
            "trainer.num_epochs": 1,
        },
    ),
    "deepseek_grpo": (
        [
            *LEAST["ppo"],
            "data.responses_per_prompt=8",
            "adv.norm_var=true",
            "actor.avg_level=sequence",
            "actor.kl.coef=1e-3",
            "actor.kl.type=loss",
            "actor.kl.loss_estimator=k3",
        ],
        {
            "algo.norm_var": True,
            "algo.advantage_eps": 2.0**-23,
            "algo.loss_agg_mode": "sequence-mean-token-mean",
            "algo.loss_agg_units": "all",
            "algo.beta": 1e-3,
            "algo.kl_type": "loss",
            "algo.kl_loss_mode": "k3",
        },
    ),
    "a group filter": (
        [
            *LEAST["ppo"],
            "rollout.group_filtering.lower=0.1",
            "rollout.group_filtering.upper=0.9",
            "data.responses_per_prompt=4",
        ],
        {"algo.dynamic_sampling": True, "algo.group_reward_bounds": (0.1, 0.9)},
    ),
    "groups of one": (
        LEAST["ppo"],
        {"algo.dynamic_sampling": False, "algo.num_generations": 1, "trainer.run_dir": None},
    ),
    "own keys": (
        [*LEAST["ppo"], "whet.trainer.seed=3", "whet.rollout.max_prompt_length=77", "+trainer.n_epochs=2"],
        {"trainer.seed": 3, "rollout.max_prompt_length": 77, "trainer.num_epochs": 2},
    ),
    "sampling of its own in evaluation": (
        [
            *LEAST["ppo"],
            "rollout.train_sampling_params.top_p=0.9",
            "rollout.test_sampling_params.temperature=0.6",
            "rollout.test_sampling_params.max_new_tokens=8",
            "actor.kl.coef=0.1",
            "actor.kl.type=advantage",
        ],
        {
            "rollout.top_p": 0.9,
            "rollout.eval": {"top_p": 1.0, "temperature": 0.6, "max_tokens_to_generate": 8},
            "algo.kl_loss_mode": "k1",
            "algo.kl_type": "advantage",
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_command_is_this_configuration(name):
    words, want = PUBLISHED[name]
    made = translate_command("ppo", words)
    assert type(made) is (PPORunConfig if "adv.estimator=gae" in words else RunConfig)
    for key, value in want.items():
        if key != "rollout.for_mode":
            assert at(made, key) == value, key
    if name == "countdown_reinforce":
        assert made.rollout.for_mode("eval").stop == ("</answer>",)  # its test takes training's


@pytest.mark.parametrize(
    ("words", "averaged", "rate", "schedule", "kept"),
    [
        (("data.path=d", "data.max_length=8", "trainer.disable_wandb=true"), "sequence-mean-", 5e-6, "cosine", 0.0),
        (("data.path=d", "data.max_length=8", "trainer.use_wandb=false"), "", 5e-6, "cosine", 0.0),
        (("data.train.path=d", "data.train.max_length=8", "trainer.use_wandb=false"), "", 1e-6, "cosine_with_", 0.03),
    ],
    ids=["July 2025", "September 2025", "2026"],
)
def test_a_command_has_the_defaults_of_its_generation(words, averaged, rate, schedule, kept):
    made = translate_command("sft", ["actor.model_name=m", *words])
    assert made.algo.loss_agg_mode == f"{averaged}token-mean"
    assert made.actor.optim.lr == rate and made.actor.optim.schedule.startswith(schedule)
    assert made.data.eval_fraction == kept


@pytest.mark.parametrize(
    ("verb", "words", "want"),
    [
        ("dpo", ["actor.model_name=m", "data.path=d"], {"actor.optim.lr": 5e-7, "actor.optim.warmup_ratio": 0.1}),
        ("rm", ["critic.model_name=m", "data.path=d"], {"reward_model.optim.lr": 1e-5}),
        (
            "rm",
            ["critic.model_name=m", "data.train.path=d"],
            {"reward_model.optim.lr": 5e-6, "reward_model.optim.schedule_kwargs": {"min_lr": 5e-7}},
        ),
        (
            "ppo",
            [
                *LEAST["ppo"],
                "adv.estimator=gae",
                "actor.weight_decay=0.1",
                "actor.kl.coef=0.1",
                "actor.kl.type=loss",
                "critic.clip=0.3",
                "trainer.save_dir=out/actor/",
            ],
            {
                "critic.optim.weight_decay": 0.1,
                "algo.kl_loss_mode": "k2",
                "algo.clip_range_value": 0.3,
                "trainer.run_dir": "out",
            },
        ),
        (
            "ppo",
            [word.replace("data.p", "train_data.p") for word in LEAST["ppo"]],
            {"algo.sampler_is": "token", "algo.sampler_is_threshold": 2.0, "algo.sampler_is_kl": True},
        ),
    ],
)
def test_each_trainer_has_the_defaults_of_its_own(verb, words, want):
    length = [] if verb == "ppo" else [f"{words[1].rpartition('path')[0]}max_length=8"]
    made = translate_command(verb, [*words, *length])
    assert {key: at(made, key) for key in want} == want


LATER = {
    "ppo": [
        *("actor.model_name=m", "rollout.train.path=d.jsonl", "rollout.train.prompts_per_rollout=8"),
        *("rollout.env_path=env.py", "rollout.train.sampling_params.max_new_tokens=16", "trainer.total_steps=2"),
    ],
    "sft": ["actor.model_name=m", "data.train.path=d.jsonl"],
    "rm": ["critic.model_name=m", "data.train.path=d.jsonl"],
    "dpo": ["actor.model_name=m", "data.train.path=d.jsonl"],
}
TRAINED = {"ppo": "actor", "sft": "actor", "rm": "reward_model", "dpo": "actor"}


@pytest.mark.parametrize("verb", KEYS)
def test_a_scheduler_is_given_by_name_least_rate_and_warmup(verb):
    role = "critic" if verb == "rm" else "actor"
    words = [f"{role}.scheduler.name=cosine_with_min_lr", f"{role}.scheduler.min_lr=1e-8"]
    made = translate_command(verb, [*LATER[verb], *words, f"{role}.scheduler.warmup_ratio=0.25"])
    optim = at(made, f"{TRAINED[verb]}.optim")
    assert (optim.schedule, optim.warmup_ratio, optim.schedule_kwargs) == ("cosine_with_min_lr", 0.25, {"min_lr": 1e-8})
    words = [f"{role}.scheduler.name=constant", f"{role}.scheduler.min_lr=null"]
    constant = at(translate_command(verb, [*LATER[verb], *words]), f"{TRAINED[verb]}.optim")
    assert (constant.schedule, constant.schedule_kwargs) == ("constant", {})


@pytest.mark.parametrize(("updates", "of_critic"), [(1, 12), (5, 2), (20, 1)])
def test_the_critic_of_july_2025_has_twelve_updates_or_the_multiple_of_the_actors_below(updates, of_critic):
    words = ["actor.model_name=m", "data.path=d.jsonl", "data.prompts_per_rollout=20", "rollout.env_path=env.py"]
    words += ["rollout.train_sampling_params.max_new_tokens=16", "adv.estimator=gae"]
    made = translate_command("ppo", [*words, f"actor.update_per_rollout={updates}"])
    assert made.algo.critic_updates == of_critic


def test_the_critic_of_ppo_has_a_scheduler_of_its_own():
    words = ["adv.estimator=gae", "critic.scheduler.name=linear", "critic.scheduler.warmup_ratio=0.5"]
    made = translate_command("ppo", [*LATER["ppo"], *words])
    assert (made.critic.optim.schedule, made.critic.optim.warmup_ratio) == ("linear", 0.5)
    assert (made.actor.optim.schedule, made.actor.optim.warmup_ratio) == ("cosine_with_min_lr", 0.03)


@pytest.mark.parametrize("word", ["data.max_length=8", "data.train.max_length=8"])
def test_max_length_counts_what_the_model_reads(word):
    data = "data.path=d" if word.startswith("data.max") else "data.train.path=d"
    longest = {}
    for verb in ("sft", "rm", "dpo"):
        role = "critic" if verb == "rm" else "actor"
        longest[verb] = translate_command(verb, [f"{role}.model_name=m", data, word]).data.max_length
        assert translate_command(verb, [f"{role}.model_name=m", data]).data.max_length is None
    assert longest == {"sft": 9, "rm": 8, "dpo": 9}


def test_a_budget_of_max_length_holds_the_longest_sequence():
    made = translate_command("sft", [*LATER["sft"], "data.train.max_length=8", "actor.max_length_per_device=8"])
    assert made.trainer.max_tokens_per_microbatch == made.data.max_length == 9


KEYED = ["rollout.train.prompt_key=question", "rollout.train.messages_key=chat"]


def test_the_chat_template_decides_which_column_is_read():
    plain = "rollout.train.apply_chat_template=false"
    column = lambda *words: translate_command("ppo", [*LATER["ppo"], *words]).data.prompt_column
    assert [column(), column(plain), column(*KEYED), column(*KEYED, plain)] == [
        "messages",
        "prompt",
        "chat",
        "question",
    ]
    assert column(*KEYED, "rollout.test.prompt_key=question") == "chat"
    assert column("rollout.test.messages_key=messages") == "messages"
    with pytest.raises(ConfigError, match=r"rollout.test.messages_key='other' is refused"):
        column("rollout.test.messages_key=other")
    plain, keys = "data.train.apply_chat_template=false", ("data.train.prompt_key=q", "data.train.messages_key=chat")
    data = translate_command("sft", [*LATER["sft"], *keys]).data
    assert (data.messages_column, data.prompt_column, data.response_column) == ("chat", None, None)
    data = translate_command("sft", [*LATER["sft"], *keys, plain]).data
    assert (data.messages_column, data.prompt_column, data.response_column) == (None, "q", "response")
    data = translate_command("dpo", [*LATER["dpo"], "data.train.chosen_key=good", plain]).data
    assert (data.prompt_column, data.chosen_column, data.rejected_column) == ("prompt", "good", "rejected")


def test_a_prompt_of_several_turns_may_fill_the_budget_but_for_one_turn():
    made = translate_command("ppo", [*LEAST["ppo"], "actor.max_length_per_device=100", "rollout.max_turns=3"])
    assert (made.rollout.max_prompt_length, made.trainer.max_tokens_per_microbatch) == (84, 100)


def test_an_adapter_has_the_alpha_of_rl2_by_default():
    assert translate_command("ppo", [*LEAST["ppo"], "actor.lora.rank=8"]).actor.lora.lora_alpha == 16


@pytest.mark.parametrize(
    ("words", "on"),
    [
        ((), True),
        (("actor.offload_model=false",), False),
        (("actor.offload_optimizer=false",), False),
        (("actor.offload_model=false", "actor.offload_optimizer=true"), True),
        (("actor.offload_model=true",), True),
    ],
)
def test_offloading_is_off_where_a_key_says_so_and_none_asks_for_it(words, on):
    assert translate_command("ppo", [*LEAST["ppo"], *words]).offload_to_cpu is on


def test_a_reward_model_is_saved_where_and_when_the_critics_keys_say():
    words = ["critic.model_name=m", "data.path=d", "critic.save_dir=out/critic", "critic.save_freq=4"]
    made = translate_command("rm", words)
    assert made.trainer.run_dir == "out"
    assert made.trainer.checkpointing_options.save_interval_steps == 4


# ---- references ------------------------------------------------------------------------------------------------------


def test_references_stand_for_the_values_of_other_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("RL2_OUT", "place")
    (tmp_path / "rl2.yaml").write_text(
        "defaults: [_self_, {actor: fsdp}]\n"
        "critic: {model_name: '${actor.model_name}', optimizer: {lr: '${actor.optimizer.lr}'}, clip: 0.4,\n"
        "  max_grad_norm: '${.clip}'}\n"
        "ref_actor: {dtype: '${actor.dtype}'}\n"
        "trainer: {save_dir: '${oc.env:RL2_OUT}/${trainer.experiment_name}', experiment_name: 'x${actor.clip}'}\n"
    )
    words = ["adv.estimator=gae", "actor.optimizer.lr=3e-6", "actor.clip=0.1", "critic.dtype=${actor.dtype}"]
    made = translate_command("ppo", [*LATER["ppo"], f"--config={tmp_path}/rl2.yaml", *words])
    assert (made.critic.optim.lr, made.critic.optim.max_grad_norm, made.critic.model) == (3e-6, 0.4, "m")
    assert made.trainer.run_dir == "place/x0.1" and made.trainer.metrics_logging_options.run_name == "x0.1"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("actor.clip=${critic.clip}", r"actor.clip=\$\{critic.clip\}: critic.clip is not given; give it too"),
        ("actor.clip=${actor.clip}", "actor.clip refers to itself"),
        ("trainer.save_dir=out-${now:%Y}", "the resolver now is not supported, only oc.env"),
        ("trainer.save_dir=${oc.env:RL2_NOWHERE}", "the environment has no variable RL2_NOWHERE"),
    ],
)
def test_a_reference_without_a_value_is_refused(word, told):
    with pytest.raises(ConfigError, match=told):
        translate_command("ppo", [*LEAST["ppo"], word])


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED = [
    ("actor.sp_size=2", "sp_size (cp_size)=2 does not divide torchrun's 1 process(es); start a multiple of 2"),
    ("actor.tp_size=2", "ddp_size=1 x fsdp_size=1 x tp_size=2 = 2 processes, and torchrun has started 1"),
    ("rollout.tp_size=2", "rollout.tp_size=2 is refused"),
    ("actor.fsdp_size=8", "ddp_size=1 x fsdp_size=8 = 8 processes, and torchrun has started 1; start torchrun"),
    ("actor.clipp=0.1", "unknown key actor.clipp; did you mean actor.clip"),
    ("adv.lambda=0.9", "did you mean adv.lamda"),
    ("nonsense.key=1", "unknown key nonsense.key; docs/from-rl2.md lists them"),
    ("actor=megatron", "does not use Megatron"),
    ("actor.tf_config.tensor_model_parallel_size=4", "does not use Megatron"),
    ("rollout.train.partial_rollout=true", "a step ends before the next begins"),
    ("rollout.server_args.attention_backend=fa3", "SGLang's own"),
    ("actor.optimizer_dir=x", "trainer.load_ckpt_from"),
    ("data.batch_size=4", "ppo has prompts_per_rollout"),
    ("actor.kl.coef=0.1", "acts nowhere without actor.kl.type"),
    ("actor.freeze_steps=4", "would train nothing"),
    (
        "actor.update_per_rollout=3",
        "does not divide the 8 prompts of a rollout: groups stay whole; take one of 1, 2, 4",
    ),
    ("actor.update_per_rollout=0", "expected a whole number above 0, got 0"),
    ("actor.temperature=0.5", "it is 1.0 for the others"),
    ("critic.lr=1e-5", "only adv.estimator=gae has a critic"),
    ("adv.estimator=grpo", "unknown adv.estimator 'grpo'"),
    ("actor.dtype=float16", "unknown actor.dtype 'float16'"),
    ("actor.max_length_per_device=16", "holds no prompt besides max_new_tokens=16"),
    ("rollout.train.path=other.jsonl", "these are one key here; give one of them"),
    ("whet.trainer.sed=1", "unknown key whet.trainer.sed; did you mean whet.trainer.seed?"),
    ("actor.lr=fast", "expected a number, got 'fast'"),
    ("hydra.run.dir=x", "hydra's own options are not here"),
]


@pytest.mark.parametrize(("word", "words"), REFUSED)
def test_what_can_not_be_carried_out_is_refused_with_the_reason(word, words):
    with pytest.raises(ConfigError) as told:
        translate_command("ppo", [*LEAST["ppo"], word])
    assert words in str(told.value)


SIZES = [  # words, and (copies, parts of a row, tokens of a pass, parts of a matrix) or the refusal, on four processes
    ("", (1, 1, 100)),
    ("actor.fsdp_size=4", (1, 1, 100)),
    ("actor.ddp_size=2", (2, 1, 100)),
    ("actor.ddp_size=2 actor.fsdp_size=0", (2, 1, 100)),
    ("actor.ddp_size=4 actor.fsdp_size=1", (4, 1, 100)),
    ("actor.sp_size=2", (1, 2, 200)),
    ("actor.cp_size=4 actor.ddp_size=2 actor.fsdp_size=2 trainer.total_steps=1", (2, 4, 400)),
    ("actor.sp_size=2 ref_actor.sp_size=${actor.sp_size} ref_actor.ddp_size=2", (2, 2, 200)),
    ("ref_actor.sp_size=2", (1, 2, 200)),
    ("actor.ddp_size=2 actor.fsdp_size=4", "ddp_size=2 x fsdp_size=4 = 8 processes, and torchrun has started 4; start"),
    ("actor.ddp_size=3", "actor: ddp_size=3 x fsdp_size=1 = 3 processes, and torchrun has started 4"),
    ("actor.tp_size=2", (1, 1, 100, 2)),
    ("actor.tp_size=2 actor.ddp_size=2 ref_actor.fsdp_size=1", (2, 1, 100, 2)),
    ("actor.tp_size=2 actor.cp_size=2 trainer.total_steps=1", (1, 2, 200, 2)),
    ("actor.tp_size=2 actor.cp_size=4", "sp_size (cp_size)=4 does not divide torchrun's 4 process(es) by tp_size=2"),
    ("actor.tp_size=2 ref_actor.tp_size=1", "actor.tp_size=2 and ref_actor.tp_size=1: all roles share one mesh"),
    ("actor.cp_size=3", "sp_size (cp_size)=3 does not divide torchrun's 4 process(es); start a multiple of 3, or set"),
    ("actor.cp_size=2 ref_actor.cp_size=1", "actor.cp_size=2 and ref_actor.cp_size=1: all roles share one mesh; give"),
    ("actor.ddp_size=2 ref_actor.ddp_size=4", "actor.ddp_size=2 and ref_actor.ddp_size=4: all roles share one mesh"),
    ("actor.cp_size=0", "actor.cp_size: expected a whole number above 0, got 0"),
    ("actor.cp_size=2 rollout.train_sampling_params.max_new_tokens=200", "max_length_per_device=100 holds no prompt"),
]


@pytest.mark.parametrize(("words", "expected"), SIZES)
def test_the_sizes_of_a_mesh_are_those_of_all_roles_and_must_give_torchruns_processes(words, expected, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    command = [*LEAST["ppo"], "actor.max_length_per_device=100", *words.split()]
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as told:
            translate_command("ppo", command)
        assert expected in str(told.value)
        return
    made = translate_command("ppo", command)
    loop = made.trainer
    sizes = loop.data_parallel_replicate_size, loop.context_parallel_size, loop.max_tokens_per_microbatch
    assert (*sizes, loop.tensor_parallel_size) == (*expected, 1)[:4] and not made.offload_to_cpu
    assert made.rollout.max_prompt_length == expected[2] - 16
    assert translate_command("ppo", [*command, "actor.offload_model=true"]).offload_to_cpu


def test_the_budget_of_supervised_training_is_that_of_all_processes_of_a_pass(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = ["actor.max_length_per_device=8", "actor.cp_size=2"]
    assert translate_command("sft", [*LATER["sft"], *words]).trainer.max_tokens_per_microbatch == 16


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as told:
        translate_command("ppo", ["actor.cp_size=2", "actor.clipp=1"])
    assert str(told.value).count("\n") == 1
    with pytest.raises(ConfigError) as told:
        translate_command("ppo", ["actor.clip=0.1"])
    for what in ("the model", "the data", "the prompts of a step", "the longest completion", "the file with reward_fn"):
        assert f"{what} is not given" in str(told.value)


@pytest.mark.parametrize(
    "word",
    [
        "actor.fsdp_size=0",
        "actor.fsdp_size=1",
        "actor.sp_size=1",
        "actor=fsdp",
        "rollout.dynamic_filtering=false",
        "trainer.eval_only=false",
        "actor.optimizer_dir=null",
        "actor.lora.rank=0",
    ],
)
def test_values_that_ask_for_nothing_are_taken(word):
    assert translate_command("ppo", [*LEAST["ppo"], word]) == translate_command("ppo", LEAST["ppo"])


def test_an_adapter_is_that_of_its_role():
    words = ["actor.lora.rank=8", "actor.lora.alpha=16", "actor.lora.target_modules=all-linear"]
    made = translate_command("ppo", [*LEAST["ppo"], *words])
    assert (made.actor.lora.r, made.actor.lora.lora_alpha, made.actor.lora.target_modules) == (8, 16, "all-linear")
    assert translate_command("ppo", LEAST["ppo"]).actor.lora is None


# ---- the table -------------------------------------------------------------------------------------------------------

SIZES = """
ddp_size tp_size cp_size sp_size fsdp_size
""".split()
OPTIM = """
lr weight_decay max_grad_norm warmup_ratio optimizer.lr optimizer.weight_decay scheduler.name scheduler.min_lr
scheduler.warmup_ratio scheduler offload_optimizer
""".split()
ROLE = """
model_name dtype use_liger_kernel max_length_per_device max_inference_length_per_device offload_model
""".split()
SAVED = """
optimizer_dir gradient_checkpointing enable_gradient_checkpointing save_dir save_freq save_optimizer
""".split()
ACTOR = """
temperature update_per_rollout clip tis_coef avg_level freeze_steps kl.coef kl.type kl.reward_estimator
kl.loss_estimator entropy.coef
""".split()
LORA = """
lora.rank lora.alpha lora.target_modules lora.dropout
""".split()
MEGATRON = """
tf_config.pipeline_model_parallel_size tf_config.recompute_granularity ddp_config.use_distributed_optimizer
optimizer.min_lr optimizer.clip_grad scheduler.lr_decay_style scheduler.start_wd
""".split()
PARAMS = [
    f"{n}.{p}"
    for n in ("train_sampling_params", "test_sampling_params", "train.sampling_params", "test.sampling_params")
    for p in ("temperature", "max_new_tokens", "stop", "top_p")
]
ROWS = """
path prompt_key messages_key apply_chat_template prompts_per_rollout responses_per_prompt save_dir
""".split()
ROLLOUT = """
server_args.model_path server_args.dtype server_args.tp_size server_args.mem_fraction_static test_ratio env_path
bucket_size tp_size gpu_memory_utilization max_turns group_filtering.lower group_filtering.upper
train.dynamic_filtering train.partial_rollout
""".split()
TRAINER = """
project experiment_name load_ckpt_from total_steps eval_only test_freq save_dir save_freq use_wandb n_epochs
disable_wandb
""".split()
LISTED = [
    *(f"actor.{k}" for k in [*ROLE, *SIZES, *OPTIM, *SAVED, *ACTOR, *LORA, *MEGATRON]),
    *(f"critic.{k}" for k in [*ROLE, *SIZES, *OPTIM, *SAVED, *LORA, "clip", "update_per_rollout", "avg_level"]),
    *(f"ref_actor.{k}" for k in [*ROLE, *SIZES]),
    *(f"rollout.{k}" for k in [*PARAMS, *ROLLOUT, *(f"{m}.{k}" for m in ("train", "test") for k in ROWS)]),
    *(f"adv.{k}" for k in "estimator gamma lamda responses_per_prompt global_norm norm_var".split()),
    *(f"trainer.{k}" for k in TRAINER),
    *(f"data.{k}" for k in "path max_length batch_size prompts_per_rollout responses_per_prompt".split()),
    *(f"{d}_data.{k}" for d in ("train", "test") for k in "path prompts_per_rollout responses_per_prompt".split()),
]


def test_the_table_has_every_find_field_rl2():
    assert [k for k in LISTED if find_field(k, KEYS["ppo"]) is None] == []


@pytest.mark.parametrize("verb", KEYS)
def test_every_place_in_the_table_is_a_find_field_whets(verb):
    known = {k for c in (RunConfig, PPORunConfig, SFTRunConfig, RMRunConfig, DPORunConfig) for k, *_ in leaves(c, True)}
    known |= {f"{s}.{k}" for s in ("rollout.eval",) for k in ("constraint.regex", "constraint.json_schema")}
    known |= {k.replace("rollout.", "rollout.eval.") for k in known if k.startswith("rollout.")}
    places = {place.strip() for key in KEYS[verb].values() for place in key.key.split(",") if place.strip()}
    assert sorted(places - known) == []
    for name, key in KEYS[verb].items():
        assert key.state in ("works", "differs") or (key.note and not key.key), name
        assert key.state != "works" or key.key, name


def test_help_and_unknown_trainers(capsys):
    assert main(["ppo", "--help"]) == 0 and main([]) == 0
    said = capsys.readouterr().out
    assert usage("ppo") in said and "actor.freeze_steps" in said
    assert main(["pppo"]) == 2
    assert "did you mean ppo" in capsys.readouterr().err
    assert main(["ppo", *LEAST["ppo"], "--print_config"]) == 0
    assert "advantage_estimator: reinforce" in capsys.readouterr().out


def test_words_of_keys_that_take_text_are_taken_as_they_are_typed_and_quoted_ones_as_hydra_has_them():
    words = [
        "data.path=rows #1: new.jsonl",
        "trainer.experiment_name=a: b #2",
        "whet.data.system_prompt=Be: brief # now",
    ]
    config = translate_command("ppo", [w for w in LEAST["ppo"] if not w.startswith("data.path")] + words)
    assert (config.data.path, config.data.system_prompt) == ("rows #1: new.jsonl", "Be: brief # now")
    assert config.trainer.metrics_logging_options.run_name == "a: b #2"
    config = translate_command("ppo", [*LEAST["ppo"], "actor.model_name='my model'"])
    assert config.actor.model == "my model"
    tested = ["rollout.test_sampling_params.stop=# end", "whet.trainer.resume=null"]
    config = translate_command("ppo", [*LEAST["ppo"], *tested])
    assert config.rollout.eval["stop"] in ("# end", ("# end",)) and config.trainer.resume is None

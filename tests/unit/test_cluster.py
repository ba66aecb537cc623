import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    END,
    Replay,
    cluster,
    drawn,
    length_reward,
    prompt,
    rows,
    same,
    tiny_model,
    weights_of,
)
from transformers import BloomConfig, BloomForCausalLM

import whet
from whet.config import DataConfig, GRPOConfig, Mode, RoleConfig, RolloutConfig
from whet.errors import ConfigError
from whet.learners.grpo import GRPOLearner
from whet.rollout.base import EngineCaps
from whet.rollout.driver import Episode, completion
from whet.rollout.hf import HFEngine
from whet.rollout.mock import MockEngine
from whet.rollout.policy_rollouts import PolicyRollouts
from whet.types import TokenBatch

PROMPTS = ["1+1=", "what?", "a", "1+1="]


# ---- generate ------------------------------------------------------------------------------------------------------


def sampled(c, **options):
    encode = c.encoder()
    prompts = [encode({"prompt": text}, i) for i, text in enumerate(PROMPTS)]
    return [g.completions[0].tokens.tolist() for g in c.sample(prompts, **options)]


def test_training_evaluation_and_calls_share_no_draw():
    c = cluster()
    drawn = [sampled(c, mode=mode, seed=seed) for mode in ("train", "eval", "generate") for seed in range(3)]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])


def test_the_rollouts_own_seed_comes_before_the_runs():
    assert sampled(cluster(rollout={"seed": 5}, seed=3)) == sampled(cluster(seed=5)) != sampled(cluster(seed=3))


# ---- logprobs ------------------------------------------------------------------------------------------------------


# ---- updates -------------------------------------------------------------------------------------------------------


def test_sync_weights_raises_the_version_that_tokens_are_stamped_with():
    c = cluster()
    encoded = [c.encoder()({"prompt": "a"}, 0)]
    assert c.sample(encoded)[0].completions[0].versions.tolist().count(0) > 0
    c.sync_weights()
    c.sync_weights()
    assert set(c.sample(encoded)[0].completions[0].versions.tolist()) == {2}
    assert c.actor.version == 2


def test_an_engine_without_a_method_is_refused_by_its_name():
    class Half(Replay):
        stats = property()

    with pytest.raises(ConfigError, match=r"the engine Half has no stats; .*QueueEngine"):
        cluster(engine=Half).build_engine()


# ---- engines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine",
    ["embedded", "hf", HFEngine, functools.partial(HFEngine), "whet.rollout.hf:HFEngine"],
    ids=["embedded", "hf", "class", "partial", "reference"],
)
def test_the_engine_is_a_name_a_class_a_partial_or_a_reference(engine):
    c = cluster(engine=engine)
    assert len(drawn(c, PROMPTS)) == 4
    before = drawn(cluster(), PROMPTS, seed=1)
    assert drawn(c, PROMPTS, seed=1) == before  # every engine draws alike


def test_an_unknown_engine_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean embedded"):
        cluster(engine="embeded")


def test_a_model_that_cannot_be_packed_trains_with_the_hf_engine():
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=264, hidden_size=32, n_head=4, n_layer=2, eos_token_id=END))
    c = cluster(model, rollout={"max_tokens_to_generate": 4})
    assert not c.actor.loaded.packable and isinstance(c.engine, HFEngine)
    before = weights_of(model)
    algo = GRPOConfig(num_generations=4, beta=0.0)
    run = GRPOLearner(c, algo, length_reward, data=DataConfig(batch_size=2)).train(rows(4))
    assert run.step == 2 and not same(weights_of(model), before)


# ---- metrics -------------------------------------------------------------------------------------------------------


# ---- construction and end ------------------------------------------------------------------------------------------


def test_models_are_read_from_folders_with_their_own_optimizer_and_dtype(model_folder):
    c = cluster(RoleConfig(model=model_folder, dtype="bfloat16"), reference=model_folder, tokenizer=model_folder)
    assert c.dtypes["actor"] == "bfloat16"
    assert c.actor.optim.masters["model.norm.weight"].dtype == torch.float32
    assert len(drawn(c, PROMPTS)) == 4


def test_a_role_without_a_model_or_its_head_is_refused():
    with pytest.raises(ConfigError, match="can't be the reward model: it has no score head"):
        whet.RLCluster(actor=tiny_model(), reward=tiny_model(), tokenizer="byte", cluster_config=whet.ClusterConfig())
    with pytest.raises(ConfigError, match=r"actor\.model is not set"):
        cluster(RoleConfig())


def test_close_ends_the_engine_and_frees_the_optimizers():
    c = cluster(engine=Replay)
    c.build_engine()
    c.close()
    assert c.engine.closed and c.actor.optim is None


# ---- options of transformers' generate -------------------------------------------------------------------------------


def test_draws_under_options_agree_with_the_trainer_under_full_support():
    c = cluster(rollout={"generation_kwargs": {"no_repeat_ngram_size": 1}, "logprobs_mode": "full"})
    groups = c.sample([prompt("2+2="), prompt("7-1=", 1)], num_generations=3)
    tokens = [x.tokens.tolist() for g in groups for x in g.completions]
    assert all(len(set(t)) == len(t) for t in tokens)
    batch = TokenBatch.from_groups(groups)
    assert (c.actor.logprobs(batch).logprobs - batch.sampler_logprobs).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("options", "words"),
    [({"num_beams": 2}, "num_beams=2 searches"), ({"top_h": 0.4}, "does not know the distribution")],
)
def test_a_learner_refuses_options_that_the_trainer_can_not_follow(options, words):
    with pytest.raises(ConfigError, match=words):
        GRPOLearner(cluster(rollout={"generation_kwargs": options}), GRPOConfig(beta=0.0), [length_reward])


def test_a_resting_engine_holds_no_memory_and_samples_again_after_the_sync():
    c = cluster()
    draw = lambda: [x.tokens.tolist() for x in c.sample([prompt("abc")], num_generations=2, step=1)[0].completions]
    want = draw()
    assert c.engine.stats().kv_bytes > 0
    c.release_engine_memory()
    assert c.engine.stats().kv_bytes == 0
    c.sync_weights()
    assert draw() == want


def test_an_engine_rests_once_and_wakes_for_who_samples_before_the_sync(monkeypatch):
    c, trims = cluster(), []
    freed = lambda: trims.append(c.engine.stats().kv_bytes)
    monkeypatch.setattr("whet.train.role_workers.release_freed_memory", freed)
    want = drawn(c, PROMPTS, seed=1)
    c.release_engine_memory()
    c.release_engine_memory()  # the next mini-batch
    assert trims == [0]
    assert drawn(c, PROMPTS, seed=1) == want
    assert c.engine.stats().kv_bytes > 0
    c.release_engine_memory()
    assert trims == [0, 0]


class Sleeper(MockEngine):
    """An engine that notes when it sleeps, wakes and takes weights."""

    def __init__(self, log, **caps):
        super().__init__(vocabulary=8)
        self.caps, self.log = EngineCaps(sleep=True, **caps), log

    def sleep(self):
        self.log.append("sleep")

    def wake_up(self):
        self.log.append("wake")

    def update_weights(self, version, weights=None):
        self.log.append(("update", weights is not None))


@pytest.mark.parametrize(
    ("place", "shared", "rests"),
    [("cpu", True, True), ("cuda", True, True), ("cuda", False, True), ("cpu", False, False)],
)
def test_an_engine_rests_where_that_makes_room_and_freed_memory_leaves_then(place, shared, rests, monkeypatch):
    c, log = cluster(), []
    monkeypatch.setattr("whet.train.role_workers.empty_cache", lambda device: log.append(f"empty {device}"))
    engine = Sleeper(log, shared_weights=shared)
    policy = SimpleNamespace(version=0, device=torch.device(place), named_weights=c.actor.named_weights)
    c._rollouts = PolicyRollouts(lambda: engine, policy)
    assert c.engine is engine
    for _ in range(2):  # two mini-batches
        c.release_engine_memory()
    c.sample([])
    c.sample([])
    between = [("update", False)] if shared else []
    assert log == (["sleep", "empty cpu", "wake", *between] if rests else [])
    log.clear()
    c.release_engine_memory()
    c.sync_weights()
    woken = ["wake"] if rests else []
    assert log == [*(["sleep", "empty cpu"] if rests else []), "empty cpu", *woken, ("update", not shared)]


def test_an_engine_whose_sleep_drops_its_weights_gets_them_again_between_two_updates():
    c, log = cluster(), []
    policy = SimpleNamespace(version=0, device=torch.device("cuda"), named_weights=c.actor.named_weights)
    c._rollouts = PolicyRollouts(lambda: Sleeper(log, shared_weights=False, sleep_keeps_weights=False), policy)
    c.build_engine()
    c.release_engine_memory()
    c.sample([])
    assert log == ["sleep", "wake", ("update", True)]


def test_what_loading_left_is_given_back_before_the_engine_looks_for_memory(monkeypatch):
    log = []
    monkeypatch.setattr("whet.train.role_workers.empty_cache", lambda device: log.append("empty"))
    make = whet.cluster.make_engine
    monkeypatch.setattr("whet.cluster.make_engine", lambda *a, **o: (log.append("engine"), make(*a, **o))[1])
    c = cluster()
    assert log == ["empty"] and c.engine is c.engine
    assert log == ["empty", "engine"]


def test_a_default_token_budget_that_grows_is_logged_once(caplog):
    long = {"max_prompt_length": 2000, "max_tokens_to_generate": 100}
    with caplog.at_level("INFO", "whet"):
        made = cluster(tiny_model(max_position_embeddings=4096), reference=tiny_model(1), rollout=long)
        given = cluster(max_tokens_per_microbatch=200)
        cluster()
    assert [w.saturating_tokens for w in (*made.workers.values(), given.actor)] == [1536, 1536, None]
    assert [w.max_tokens for w in made.workers.values()] == [2176, 2176]
    grown = [r.message for r in caplog.records if "max_tokens_per_microbatch" in r.message]
    assert len(grown) == 1 and "from the default 2048 to 2176" in grown[0]


def test_the_token_budget_of_a_limit_beyond_the_models_positions_stays_the_default():
    made = cluster(reference=tiny_model(1, max_position_embeddings=64), rollout={"max_prompt_length": 10**7})
    assert [w.max_tokens for w in made.workers.values()] == [2048, 2048]


def expecting(c):
    """Notes what each request of a cluster's engine expects."""
    seen, submit = [], c.engine.submit
    c.engine.submit = lambda requests: seen.append([r.expected for r in requests]) or submit(requests)
    return seen


def test_a_row_drawn_again_expects_the_longest_completion_that_it_had():
    stops = {"eos_tokens": list(range(60))}  # a random model draws one soon
    c, prompts = cluster(rollout=stops), [prompt([5, 6], row=3), prompt([7], row=9)]
    seen = expecting(c)
    groups = c.sample(prompts, num_generations=2)
    longest = [max(len(x.tokens) for x in g.completions) for g in groups]
    assert longest[0] != longest[1]
    c.sample(prompts[::-1], num_generations=2, step=1, mode=Mode.EVAL)  # whose lengths are others
    again = c.sample(prompts[::-1], num_generations=2, step=1)
    assert seen == [[None] * 4, [None] * 4, [longest[1]] * 2 + [longest[0]] * 2]
    resumed = cluster(rollout=stops)
    resumed.restore(c.state())
    seen = expecting(resumed)
    resumed.sample(prompts, num_generations=1, step=2)
    assert seen == [[max(len(x.tokens) for x in g.completions) for g in again[::-1]]]


# ---- the engine, when it is asked for ------------------------------------------------------------------------------


def no_engine(*args, **options):
    raise AssertionError("an engine was built")


def test_a_cluster_that_only_trains_builds_no_engine(monkeypatch):
    groups = cluster().sample([prompt("2+2=")], num_generations=2)
    batch = TokenBatch.from_groups(groups).replace(advantages=torch.ones(sum_tokens(groups)))
    monkeypatch.setattr("whet.cluster.make_engine", no_engine)
    c = cluster()
    c.actor.logprobs(batch)
    c.release_engine_memory()
    c.actor_trainer.update(c.actor_trainer.add_loss_weights(batch))
    c.sync_weights()
    assert c.actor.version == 1 and "rollout" not in c.describe()
    state = c.state()
    c.restore(state)
    assert c.state().keys() == state.keys() == {"next_id", "dtypes", "lengths"}
    c.close()


def sum_tokens(groups):
    return sum(len(x.tokens) for g in groups for x in g.completions)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rollout": {"stop": ["<|im_end|>"]}}, "special token"),
        ({"rollout": {"constraint": {"regex": "("}}}, "is refused"),
        ({"engine": "vllmm"}, "did you mean vllm"),
    ],
)
def test_what_is_wrong_with_the_sampling_is_said_before_an_engine_is_built(options, words, monkeypatch):
    monkeypatch.setattr("whet.cluster.make_engine", no_engine)
    with pytest.raises(ConfigError, match=words):
        cluster(**options)


def test_a_learner_builds_the_engine_so_that_what_it_refuses_is_said_before_the_first_step():
    class Half(Replay):
        stats = property()

    with pytest.raises(ConfigError, match="the engine Half has no stats"):
        GRPOLearner(cluster(engine=Half), GRPOConfig(beta=0.0), length_reward)


def test_an_engine_that_is_built_late_draws_what_one_built_at_once_draws():
    early, late = cluster(), cluster()
    early.build_engine()
    drawn = []
    for c in (early, late):
        c.sync_weights()
        c.sync_weights()
        (group,) = c.sample([prompt("2+2=")], num_generations=3, step=4)
        drawn.append([x.tokens.tolist() for x in group.completions])
        assert {v for x in group.completions for v in x.versions.tolist()} == {2}
    assert drawn[0] == drawn[1]


def test_an_engine_with_weights_of_its_own_that_is_built_late_gets_those_of_now():
    log, c = [], cluster()
    policy = SimpleNamespace(version=3, device=torch.device("cpu"), named_weights=c.actor.named_weights)
    c._rollouts = PolicyRollouts(lambda: Sleeper(log, shared_weights=False), policy)
    c.build_engine()
    assert log == [("update", True)]


def test_episodes_of_a_cluster_go_on_after_a_release_and_beside_its_samples():
    c = cluster(rollout={"temperature": 1.0})

    def run(episode):
        first = yield episode.request(episode.prompt.tokens, c.sampling())
        context = np.concatenate([episode.prompt.tokens, first.tokens, [65, 66]]).astype(np.int32)
        second = yield episode.request(context, c.sampling())
        return completion(first, np.array([65, 66]), second, generation=episode.generation)

    episodes = lambda: [Episode(prompt("2+2="), (0, 1, 0, g), run) for g in range(2)]
    want = [x.tokens.tolist() for x in c.driver.run(episodes())[0].completions]
    c.release_engine_memory()
    rollouts = c.driver
    rollouts.start(episodes())
    (other,) = c.sample([prompt("abc")], step=9)
    alone = cluster(rollout={"temperature": 1.0}).sample([prompt("abc")], step=9)
    assert other.completions[0].tokens.tolist() == alone[0].completions[0].tokens.tolist()
    done = rollouts.ready()
    assert [x.tokens.tolist() for g in done for x in g.completions] == want
    batch = TokenBatch.from_groups(done)
    gaps = (c.actor.logprobs(batch).logprobs - batch.sampler_logprobs)[batch.mask]
    assert (~batch.mask).sum() == 4 and gaps.abs().max() < 1e-4


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_an_engine_cannot_draw_in_evaluation_is_refused_when_it_is_built(monkeypatch, engine):
    monkeypatch.setattr(f"whet.rollout.{engine}.import_package", lambda: None)  # all that comes before the check
    wrong = {"vllm": {"temperature": 3.0}, "sglang": {"repetition_penalty": 1.5}}[engine]
    modes = {Mode.TRAIN: RolloutConfig(), Mode.EVAL: RolloutConfig(**wrong)}
    with pytest.raises(ConfigError, match=rf"{engine}.*(temperatures of 0|counts only tokens)"):
        cluster(engine=engine, rollout=modes).build_engine()

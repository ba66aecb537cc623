"""Adapters in a cluster: the sampler sees them, the reference is the base, checkpoints and resumed runs hold them."""

import json
import logging
import shutil

import pytest
import torch
from helpers import cluster, length_reward, prompt, random_batch, rows, same, tiny_model, weights_of
from safetensors.torch import load_file

from whet.cli import main
from whet.config import (
    DataConfig,
    GRPOConfig,
    LoraConfig,
    OptimConfig,
    RLTrainingConfig,
    Role,
    RoleConfig,
    config_from_dict,
    dump_tree,
    load_run,
)
from whet.errors import CheckpointError, ConfigError
from whet.hub.push import push_to_hub
from whet.learners.grpo import GRPOLearner
from whet.models.load import load_model, save_model
from whet.rollout.sampler import Sampler
from whet.train.role_workers import RoleWorkers
from whet.train.worker import ModelWorker
from whet.types import TokenBatch

pytest.importorskip("peft")
BATCH = random_batch((4, [6, 3]), (7, [5, 8]))
WEIGHTED = BATCH.replace(weights=torch.ones(BATCH.num_tokens))
nll = lambda x: (-x.logprobs, {})


@pytest.fixture
def base(model_folder):
    return model_folder


def role(base, rank=2, **fields):
    return RoleConfig(model=base, dtype="float32", lora=LoraConfig(r=rank, **fields))


def adapted(base, **options):
    return cluster(role(base), **options)


def stir(module):
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.1)


def sampled(c):
    """Logprobs of what the sampler drew, and the trainer's of the same tokens."""
    groups = c.sample([prompt("1+1="), prompt("what?", 1)], num_generations=3)
    batch = TokenBatch.from_groups(groups)
    return batch.sampler_logprobs, c.actor.logprobs(batch).logprobs


# ---- rollout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_the_sampler_sees_the_adapter_as_the_trainer_does(base, engine):
    c = adapted(base, engine=engine)
    before, trainer = sampled(c)
    torch.testing.assert_close(before, trainer, atol=1e-5, rtol=1e-5)
    stir(c.actor.module)
    c.sync_weights()
    after, trainer = sampled(c)
    torch.testing.assert_close(after, trainer, atol=1e-5, rtol=1e-5)
    bare, _ = sampled(cluster(base))
    torch.testing.assert_close(bare, before, atol=1e-5, rtol=1e-5)  # nothing is added at first
    assert after.shape != before.shape or (after - before).abs().max() > 1e-3
    if engine == "embedded":
        said = c.describe()
        assert said["rollout"]["backbone"] == "fused" and "around 14 frozen" in said["training"]["actor"]["adapter"]
        assert said["rollout"]["products"] == cluster_paths(base)["products"]


def cluster_paths(base):
    c = cluster(base)
    sampled(c)
    return c.describe()["rollout"]


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_is_the_base_without_a_second_copy(base):
    c = adapted(base, reference="actor")
    worker = c.worker(Role.REFERENCE)
    assert worker.module is c.actor.module and worker.loaded.snapshot.tensors == ()
    stir(c.actor.module)
    want = ModelWorker(load_model(base)).logprobs(BATCH).logprobs
    assert torch.equal(worker.logprobs(BATCH).logprobs, want)
    assert not torch.equal(c.actor.logprobs(BATCH).logprobs, want)
    assert all(p.requires_grad == ("lora_" in n) for n, p in c.actor.module.named_parameters())
    explicit = adapted(base, reference=base)  # stays its own
    assert explicit.worker(Role.REFERENCE).module is not explicit.actor.module
    plain = cluster(base, reference="actor")
    assert plain.worker(Role.REFERENCE).module is not plain.actor.module
    for made, is_own in ((c, False), (plain, True)):  # only weights of its own are freed
        made.unload(Role.REFERENCE)
        assert made.worker(Role.REFERENCE).module.lm_head.weight.is_meta is is_own
    half = cluster(RoleConfig(model=base, dtype="bfloat16"), reference="actor")
    assert half.worker(Role.REFERENCE).dtype == half.actor.dtype == torch.bfloat16
    given = cluster(load_model(base, lora=LoraConfig(r=2)).module, reference="actor")
    assert given.worker(Role.REFERENCE).module is given.actor.module
    module = tiny_model()
    assert same(*(weights_of(w.module) for w in cluster(module, reference="actor").workers.values()))


def test_grpo_with_a_kl_takes_it_from_the_view(base):

    c = adapted(base, reference="actor", max_steps=2, mini_batch_size=4)
    run = GRPOLearner(c, GRPOConfig(num_generations=4, beta=0.1), length_reward, data=DataConfig(batch_size=4)).train(
        rows(8)
    )
    first, last = [r for r in run.rows if r["mode"] == "train"]
    assert first["kl"] == 0.0 < last["kl"]
    assert torch.equal(
        c.worker(Role.REFERENCE).logprobs(BATCH).logprobs, ModelWorker(load_model(base)).logprobs(BATCH).logprobs
    )
    with pytest.raises(ConfigError, match="a view of the actor"):
        GRPOLearner(c, GRPOConfig(num_generations=4, beta=0.1, sync_ref_model=True), length_reward)


# ---- roles -----------------------------------------------------------------------------------------------------------


def test_a_critic_trains_its_adapter_and_its_head(base, tmp_path):
    c = adapted(base, critic=role(base, 4))
    worker = c.critic_worker
    names = {n for n, p in worker.module.named_parameters() if p.requires_grad}
    assert "score.weight" in names and all("lora_" in n for n in names - {"score.weight"})
    before = weights_of(worker.module)
    worker.forward_backward(WEIGHTED, lambda x: ((x.new_values - 1) ** 2, {}))
    worker.optim_step()
    after = weights_of(worker.module)
    assert {n for n in after if not torch.equal(after[n], before[n])} >= {"score.weight"}
    assert all(torch.equal(after[n], before[n]) for n in after if n not in names)
    worker.export(tmp_path / "critic")
    back = ModelWorker(load_model(str(tmp_path / "critic"), role="critic"))
    torch.testing.assert_close(back.values(BATCH), worker.values(BATCH))
    reward = ModelWorker(load_model(str(tmp_path / "critic"), role="reward"))  # read: merged
    assert reward.loaded.adapter is None
    torch.testing.assert_close(reward.scores(BATCH), worker.scores(BATCH), atol=1e-5, rtol=1e-5)


def test_a_head_on_the_actors_backbone_is_trained_and_saved_with_the_adapter(base, tmp_path):
    c = adapted(base, critic="actor")
    stir(c.actor.module)
    c.actor.save(folder := tmp_path / "saved") if folder_made(tmp_path / "saved") else None
    other = adapted(base, critic="actor")
    other.actor.load(folder)
    for read in ("values", "logprobs"):
        ours, theirs = (getattr(x.actor, read)(BATCH) for x in (c, other))
        assert torch.equal(*(y if torch.is_tensor(y) else y.logprobs for y in (ours, theirs)))
    assert "score.weight" not in dict(c.actor.named_weights())


def folder_made(path):
    path.mkdir()
    return True


def test_a_role_that_is_only_read_has_no_adapter_to_train(base):
    with pytest.raises(ConfigError, match="lora makes an adapter to train"):
        adapted(base, reference=role(base))
    with pytest.raises(ConfigError, match=r"must be 0\.0 in reinforcement learning"):
        cluster(RoleConfig(model=base, lora=LoraConfig(lora_dropout=0.1)))


def test_a_reward_model_is_trained_by_an_adapter(base):
    """Through the roles that supervised training has: no engine."""
    workers = RoleWorkers(RLTrainingConfig())
    loaded = workers.load(Role.CRITIC, role(base, lora_dropout=0.1))
    without = RoleConfig(model=base)  # as where `model` is an adapter's folder
    worker = workers.add(Role.REWARD, without, loaded, None, max_tokens=4096, trained=True)
    assert worker.optim.optimizer.param_groups[0]["lr"] == 1e-4
    before = worker.scores(BATCH)
    per_unit = BATCH.replace(weights=torch.ones(BATCH.num_tokens))
    worker.forward_backward(per_unit, lambda x: (x.new_values, {}))
    worker.optim_step()
    assert not torch.equal(worker.scores(BATCH), before) and worker.loaded.adapter.dropout == 0.1


def test_each_update_of_a_step_draws_its_own_dropout(base):
    loaded = load_model(base, lora=LoraConfig(r=2, lora_dropout=0.5))
    worker, found = ModelWorker(loaded, optim=OptimConfig(lr=0.0)), []
    for _ in range(2):
        worker.forward_backward(WEIGHTED, nll)
        found.append({name: master.grad.clone() for name, master in worker.optim.masters.items()})
        worker.optim_step()
    assert worker.version == 0 and not same(*found)


# ---- the learning rate -----------------------------------------------------------------------------------------------


def test_an_adapter_has_a_learning_rate_of_its_own(base, caplog):
    given = load_run(["model=m", "actor.lora.r=8", "actor.betas=[0.9,0.95]"]).actor
    assert (given.lora.r, given.optim.betas) == (8, (0.9, 0.95)) and config_from_dict(
        RoleConfig, dump_tree(given)
    ) == given
    rate = lambda made: made.workers[Role.ACTOR].optim.optimizer.param_groups[0]["lr"]
    assert rate(adapted(base, actor_optimizer=OptimConfig(betas=(0.9, 0.95)))) == 1e-4
    with caplog.at_level(logging.WARNING, "whet"):
        assert rate(adapted(base, actor_optimizer=OptimConfig(lr=1e-4))) == 1e-4
        assert "hardly learns" not in caplog.text
        adapted(base, actor_optimizer=OptimConfig(lr=2e-6))
    assert "actor.optim.lr=2e-06 is a rate for all weights of a model" in caplog.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"r": 0}, "must be a positive integer"),
        ({"lora_dropout": 1.0}, "must lie in"),
        ({"target_modules": []}, "names no layer"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ],
)
def test_settings_out_of_range_are_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        LoraConfig(**fields)


# ---- checkpoints and runs --------------------------------------------------------------------------------------------


@pytest.fixture
def words(tmp_path, base):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(8)))
    (tmp_path / "rewards.py").write_text(
        "def r(completions, **_): return [float(sum(map(ord, c)) % 7) for c in completions]"
    )
    return [
        f"model={base}",
        f"data={tmp_path / 'rows.jsonl'}",
        f"reward={tmp_path / 'rewards.py'}:r",
        "rollout.max_tokens_to_generate=6",
        "rollout.temperature=1.0",
        "data.batch_size=4",
        "actor.dtype=float32",
        "actor.lora.r=2",
        "actor.lr=1e-2",
        "algo.beta=0.05",
        "algo.num_generations=2",
        "data.apply_chat_template=false",
        "trainer.checkpointing_options.save_interval_steps=1",
        "trainer.checkpointing_options.max_to_keep=10",
    ]


def numbers(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [json.dumps({k: v for k, v in r.items() if not k.startswith(("time/", "perf/"))}) for r in found]


def test_a_run_that_is_resumed_equals_the_uninterrupted_and_holds_adapters_alone(words, tmp_path, base, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["grpo", *words, f"trainer.run_dir={whole}", "trainer.max_steps=4"]) == 0
    assert main(["grpo", *words, f"trainer.run_dir={parts}", "trainer.max_steps=2"]) == 0
    again = [*words, f"trainer.run_dir={parts}", "trainer.max_steps=4", "trainer.resume=latest"]
    assert main(["grpo", *again]) == 0
    assert numbers(parts) == numbers(whole)
    step = "checkpoints/step-000004/actor"
    for name in (
        f"{step}/adapter_model.safetensors",
        f"{step}/optimizer.safetensors",
        "final/adapter_model.safetensors",
    ):
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name
    saved = load_file(parts / step / "adapter_model.safetensors")
    assert len(saved) == 28 and all("lora_" in name for name in saved)
    assert not [p for p in parts.rglob("*.safetensors") if p.name == "model.safetensors"]
    state = load_file(parts / step / "optimizer.safetensors")
    assert len(state) and all("lora_" in name for name in state)
    # what is refused on the way: a base that has the adapter merged already, other settings, all weights
    capsys.readouterr()
    merged = tmp_path / "merged"
    save_model(load_model(str(parts / "final")), None, merged, merge=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (parts / "final" / file).is_file():
            shutil.copy(parts / "final" / file, merged / file)
    for change, said in (
        ([f"model={merged}", "trainer.allow_config_change=false"], "actor.model"),
        (["actor.lora=null"], "holds an adapter, and this run trains all weights"),
    ):
        changed = [w for w in again if not (w.startswith("actor.lora") and change == ["actor.lora=null"])]
        assert main(["grpo", *changed, *change]) == 2
        assert said in capsys.readouterr().err


def test_whet_generate_and_a_new_run_take_the_adapter(words, tmp_path, base, capsys):
    run = tmp_path / "run"
    assert main(["grpo", *words, f"trainer.run_dir={run}", "trainer.max_steps=1"]) == 0
    capsys.readouterr()
    assert main(["generate", f"model={run}", "prompt=1+1=", "max_tokens=8", "dtype=float32", "temperature=0"]) == 0
    said = capsys.readouterr().out
    plain = save_model(load_model(str(run / "final")), None, tmp_path / "plain", merge=True)
    with Sampler(str(plain), base, dtype="float32") as sampler:
        assert said.strip("\n") == sampler("1+1=", 8).text[0].strip("\n")
    more = [w for w in words if not w.startswith(("model=", "actor.lora"))]
    assert main(["grpo", *more, f"model={run}", f"trainer.run_dir={tmp_path / 'more'}", "trainer.max_steps=1"]) == 0
    first = json.loads((tmp_path / "more" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["kl"] == 0.0  # the reference is the policy as it began, not the base
    assert main(["grpo", *words, f"model={run}", f"trainer.run_dir={tmp_path / 'two'}"]) == 2
    assert "would add a second one" in capsys.readouterr().err


def test_final_is_written_merged_where_that_is_asked_for(words, tmp_path):
    run = tmp_path / "run"
    asked = ["trainer.max_steps=1", "trainer.merge_adapter=true", f"trainer.run_dir={run}"]
    assert main(["grpo", *words, *asked]) == 0
    assert {p.name for p in (run / "final").iterdir()} >= {"model.safetensors", "config.json"}
    assert load_model(str(run / "final")).adapter is None
    adapter = load_model(str(run / "checkpoints" / "step-000001"))
    ours, theirs = (ModelWorker(x).logprobs(BATCH).logprobs for x in (adapter, load_model(str(run))))
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


def test_a_checkpoint_of_another_rank_is_refused(base, tmp_path):
    c = adapted(base)
    (folder := tmp_path / "actor").mkdir()
    c.actor.save(folder)
    other = cluster(role(base, 4))
    with pytest.raises(CheckpointError, match="is \\[2, 32\\] there and \\[4, 32\\] here"):
        other.actor.load(folder)
    with pytest.raises(CheckpointError, match="holds an adapter"):
        cluster(base).actor.load(folder)


def test_a_base_that_has_the_adapter_merged_already_is_refused(words, tmp_path, capsys, base):
    """The folder of the base keeps its name and has other weights: the adapter would count twice."""
    moved = tmp_path / "base"
    shutil.copytree(base, moved)
    run = [w for w in words if not w.startswith("model=")] + [f"model={moved}", f"trainer.run_dir={tmp_path / 'run'}"]
    assert main(["grpo", *run, "trainer.max_steps=1"]) == 0
    plain = load_model(str(tmp_path / "run"))
    save_model(plain, None, moved, merge=True)
    capsys.readouterr()
    assert main(["grpo", *run, "trainer.max_steps=2", "trainer.resume=latest"]) == 2
    assert "actor: other weights" in capsys.readouterr().err


def test_ppo_gives_the_critic_an_adapter_like_the_actors(words, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["ppo", *words, f"trainer.run_dir={run}", "trainer.max_steps=1"]) == 0
    assert "an adapter of rank 2, lr 0.0001" in capsys.readouterr().err
    alone, whole = (push_to_hub(run, "me/it", dry_run=True, merged=merged).files for merged in (False, True))
    assert "adapter_model.safetensors" in alone and not {"model.safetensors", "config.json"} & alone.keys()
    assert {"model.safetensors", "config.json"} <= whole.keys() and "adapter_config.json" not in whole
    saved = load_file(run / "checkpoints" / "step-000001" / "critic" / "adapter_model.safetensors")
    assert "base_model.model.score.weight" in saved and len(saved) == 29

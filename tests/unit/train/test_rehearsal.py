"""A rehearsal changes nothing of a run, and says before the first step what does not fit."""

import importlib
import math
import weakref

import pytest
import torch
from helpers import cluster, length_reward, limit_passes, random_batch, rows, same, tiny_model, weights_of

from whet.config import DataConfig, GRPOConfig, OptimConfig, PPOConfig, Role, SupervisedTrainingConfig
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError
from whet.learners.grpo import GRPOLearner
from whet.learners.ppo import PPOLearner
from whet.learners.preference import RewardModelLearner
from whet.learners.sft import SFTLearner
from whet.models import attention, flex
from whet.models.config_sizes import kv_bytes_per_token
from whet.parallel.placement import Placement
from whet.train.rehearsal import rehearse
from whet.train.supervised_models import SupervisedModels

ROWS = [{"prompt": f"{i}+{i}=", "response": str(2 * i), "chosen": str(2 * i), "rejected": "no"} for i in range(8)]


def models(role="actor", **trainer):
    return SupervisedModels(
        **{role: tiny_model()},
        tokenizer=byte_tokenizer(),
        config=SupervisedTrainingConfig(**{"pbar_description": None, **trainer}),
        optimizer=OptimConfig(lr=1e-2),
    )


def test_a_run_is_the_same_with_a_rehearsal(caplog):
    weights = []
    for is_rehearsed in (True, False):
        caplog.clear()
        with caplog.at_level("INFO", "whet"):
            made = SFTLearner(models(rehearse=is_rehearsed, max_tokens_per_microbatch=256))
            run = made.train(ROWS)
        weights.append((weights_of(made.models.trained.module), [row["loss"] for row in run.rows]))
        assert ("rehearsal: an update with" in caplog.text) is is_rehearsed
    assert same(weights[0][0], weights[1][0]) and weights[0][1] == weights[1][1]


@pytest.mark.full
@pytest.mark.parametrize("kind", [GRPOLearner, PPOLearner, RewardModelLearner])
def test_every_learner_is_rehearsed_without_a_change(kind, caplog):
    results = []
    for is_rehearsed in (True, False):
        with caplog.at_level("INFO", "whet"):
            if kind is RewardModelLearner:
                made = kind(models("reward_model", rehearse=is_rehearsed))
                run = made.train(ROWS)
                trained = {Role.REWARD: made.models.trained}
            else:
                algo = PPOConfig(beta=0.0) if kind is PPOLearner else GRPOConfig(beta=0.0, num_generations=2)
                critic = {"critic": tiny_model(2)} if kind is PPOLearner else {}
                made = kind(
                    cluster(rehearse=is_rehearsed, **critic), algo, length_reward, data=DataConfig(batch_size=4)
                )
                run = made.train(rows(4))
                trained = made.cluster.workers
        losses = [v for row in run.rows for name, v in row.items() if name.endswith("loss")]
        results.append(({f"{r}.{n}": w for r, x in trained.items() for n, w in weights_of(x.module).items()}, losses))
    assert caplog.text.count("rehearsal: an update with") == 1
    assert same(results[0][0], results[1][0]) and results[0][1] == results[1][1]


@pytest.mark.full
def test_kernels_of_flex_are_compiled_in_the_rehearsal_and_by_no_length_after_it(monkeypatch):
    torch_flex = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)  # it refuses a backward pass on a CPU
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    compiled = torch.compile(flex._attention, dynamic=True, fullgraph=True, backend=lambda graph, _: graph.forward)
    monkeypatch.setattr(flex, "_attention", compiled)
    monkeypatch.setattr(attention, "flex_unsupported_reason", lambda case: None)
    made = models(max_tokens_per_microbatch=600)
    object.__setattr__(made.trained.loaded, "attention", "flex")  # which is for GPUs
    stats, worker = torch._dynamo.utils.counters["stats"], made.trained
    before = stats["unique_graphs"]
    rehearse(made, 10, 90)
    graphs = stats["unique_graphs"]
    assert graphs > before
    for lengths in ((40, [30, 9]), (300, [20, 70, 5]), (1, [128])):
        batch = random_batch(lengths, (12, [80, 40]))
        batch = batch.replace(weights=torch.full((batch.num_tokens,), 1.0 / batch.num_tokens))
        worker.logprobs(batch)
        worker.forward_backward(batch, lambda x: (-x.logprobs, {}))
        worker.optim_step()
    assert stats["unique_graphs"] == graphs


def test_an_update_that_does_not_fit_goes_on_with_less(monkeypatch, caplog):
    made, seen = models(max_tokens_per_microbatch=256), []
    worker = made.trained
    limit_passes(monkeypatch, worker, 100, seen)
    rehearse(made, 10, 20)
    assert seen[0] > 200 and seen[-1] <= 100 and "max_tokens_per_microbatch=" in caplog.text
    assert not worker.optim.has_gradient and worker.pop_flops() == 0.0 and not worker.optim.optimizer.state
    limit_passes(monkeypatch, worker, 20, seen)
    message = r"an update of the actor, with one sequence of 30 tokens.*actor\.gradient_checkpointing=full"
    with pytest.raises(ConfigError, match=message):
        rehearse(made, 10, 20)
    assert not worker.optim.has_gradient


def test_the_largest_batch_is_scored_and_trained_next_to_the_moments_and_leaves_no_trace(monkeypatch):
    made = models(max_tokens_per_microbatch=256, max_segments_per_packed_row=3)
    worker, empty, seen, moments = made.trained, torch.empty, [], []

    def noted(*shape, **options):
        tensor = empty(*shape, **options)
        if options.get("dtype") is torch.uint8:
            moments.append(weakref.ref(tensor))
        return tensor

    def note(name):
        method = getattr(worker, name)

        def noting(batch, *rest, **needs):
            held = sum(x().numel() for x in moments if x() is not None)
            seen.append((name, batch.num_sequences, batch.num_tokens, held))
            return method(batch, *rest, **needs)

        monkeypatch.setattr(worker, name, noting)

    note("logprobs"), note("forward_backward")
    monkeypatch.setattr(torch, "empty", noted)
    rehearse(made, 10, 20)
    state = 8 * sum(p.numel() for p in worker.module.parameters())
    assert seen == [("logprobs", 3, 60, state), ("forward_backward", 3, 60, state)]
    assert math.isnan(worker.pop_imbalance()) and not made._plan_cache.digest
    monkeypatch.setattr(Placement, "data_size", 2)  # each process has a pass as large
    monkeypatch.setattr(Placement, "offloads", True)  # moments are on the host during an update
    rehearse(made, 10, 20)
    assert seen[2:] == [("logprobs", 6, 120, 0), ("forward_backward", 6, 120, 0)]
    monkeypatch.setattr(Placement, "offloads", False)
    monkeypatch.setattr(worker.optim, "updates", 1)  # a resumed run has them already
    rehearse(made, 10, 20)
    assert seen[4:] == seen[2:4]


def test_a_cache_that_does_not_fit_is_named_with_one_that_does(monkeypatch):
    made = models()
    worker, empty = made.trained, torch.empty
    size = kv_bytes_per_token(worker.loaded.module.config, worker.dtype.itemsize)
    config = worker.loaded.module.config
    assert size == 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4

    def short(*shape, **options):
        if options.get("dtype") is torch.uint8 and shape[0] > limit:
            raise torch.OutOfMemoryError("planted")
        return empty(*shape, **options)

    limit = 10**9
    rehearse(made, 10, 20, kv_tokens=8000)
    state = sum(int(8 * p.numel()) for p in worker.module.parameters())
    monkeypatch.setattr(torch, "empty", short)
    limit = max(5500 * size // config.num_hidden_layers, state)
    assert limit < 8000 * size // config.num_hidden_layers, "the moments are the larger of both"
    with pytest.raises(ConfigError, match=r"a cache of 8000 tokens.*set rollout\.kv_cache_tokens=[4567]000"):
        rehearse(made, 10, 20, kv_tokens=8000)

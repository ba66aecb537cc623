import json
import math

import pytest
import torch
from helpers import END, exact_model, gap, limit_passes, one_by_one, random_batch, same, tiny_model, weights_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from whet.config import OptimConfig
from whet.errors import CheckpointError, DataError
from whet.models.load import load_model
from whet.ops import LogitsProcessors, clipped_surrogate, clipped_value, token_weights
from whet.parallel.placement import Placement
from whet.train.metric_reduction import reduce_metrics
from whet.train.out_of_memory import BUDGETS, read_budgets, write_budgets
from whet.train.worker import ModelWorker

REDUCTIONS = {
    "is_ratio": {"is_ratio/mean": "mean", "is_ratio/max": "max", "is_ratio/min": "min"},
    "pg_loss": {"pg_loss": "mean", "reduced_pg_loss": "weighted"},
}
SHAPES = ((5, [3, 9, 1, 14]), (12, [8, 4]), (2, [7]), (1, [6, 6, 6]))


def weighted(batch, mode="token-mean"):
    return batch.replace(weights=token_weights(batch.mask, batch.trajectory, mode))


def make(model=None, *, dtype=None, role="actor", **options):
    options = {"optim": OptimConfig(lr=1e-2), **options}
    return ModelWorker(load_model(tiny_model() if model is None else model, role=role), dtype=dtype, **options)


def gradients(worker):
    return {name: m.grad.clone() for name, m in worker.optim.masters.items()}


def values(metrics):
    return {name: m.value for name, m in metrics.items()}


class Shares(Placement):
    """The second of two groups of processes, whose three processes divide each pass."""

    data_size, pass_size = 2, 3

    def split_passes(self, passes):
        own = [(x, True) for x in passes[1::2]]
        return own if len(passes) % 2 == 0 else [*own, (passes[-1], False)]


def test_the_imbalance_is_the_longest_pass_of_each_round_over_the_mean_work():
    worker = make(placement=Shares(), max_tokens=20)
    batches = [weighted(random_batch(*SHAPES)), weighted(random_batch((4, (10,))))]
    work, own = [], 0
    for batch in batches:
        passes = worker.micro_batches(batch, None)
        work.append([worker.cost.token * m.num_tokens + worker.cost.target * len(m.targets) for m in passes])
        worker.forward_backward(batch, clipped_surrogate)
        worker.logprobs(batch)  # a pass without a gradient does not count
        own += sum(work[-1][1::2]) + len(passes) % 2 * work[-1][-1]
    rounds = [made[i : i + 2] for made in work for i in range(0, len(made), 2)]
    assert len(work[0]) > 2 and len(work[1]) == 1
    assert worker.pop_imbalance() == pytest.approx(sum(map(max, rounds)) / (sum(map(sum, work)) / 2))
    assert worker.pop_flops() == pytest.approx(6 * own / 3)
    assert math.isnan(worker.pop_imbalance()) and worker.pop_flops() == 0.0
    alone = make(max_tokens=20)
    alone.forward_backward(batches[0], clipped_surrogate)
    assert alone.pop_imbalance() == 1.0


# ---- forward_backward ----------------------------------------------------------------------------------------------


def test_an_update_out_of_memory_names_the_settings_that_help():
    def loss(x):
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        make(max_tokens=40).forward_backward(weighted(random_batch(*SHAPES)), loss)
    (note,) = caught.value.__notes__
    assert "with 40 tokens" in note and "trainer.max_tokens_per_microbatch" in note


def short_of_memory(most, seen, fitting=0):
    """A loss whose passes of more targets run out of memory, but for the first few."""

    def loss(x):
        seen.append(len(x.logprobs))
        if len(x.logprobs) > most and len(seen) > fitting:
            raise torch.OutOfMemoryError("planted")
        return clipped_surrogate(x)

    return loss


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_update_out_of_memory_starts_again_with_half_the_tokens_and_is_the_same_update(caplog, dtype):
    batch, longer = weighted(random_batch(*SHAPES)), weighted(random_batch((20, [30, 3]), seed=1))
    seen, models = [], [tiny_model(), tiny_model()]
    worker, other = (make(m, dtype=dtype, max_tokens=n) for m, n in zip(models, (60, 24)))
    metrics = worker.forward_backward(batch, short_of_memory(20, seen, fitting=1))
    assert min(seen[:2]) > 20 >= max(seen[2:])  # the second pass fails, and the gradient of the first is dropped
    (message,) = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    budget = int(message.rpartition("=")[2].split()[0])
    assert "starts again" in message and budget < 60
    other.max_tokens = budget
    assert values(metrics) == values(other.forward_backward(batch, clipped_surrogate))
    assert same(gradients(worker), gradients(other)) and worker.pop_flops() == other.pop_flops()
    worker.optim_step(), other.optim_step()
    assert same(weights_of(worker.module), weights_of(other.module))
    seen.clear()
    worker.forward_backward(batch, short_of_memory(20, seen))
    assert max(seen) <= 20  # later updates begin with the smaller budget
    worker.optim_step()
    worker.forward_backward(longer, clipped_surrogate)  # and a longer sequence has the configured one
    assert worker.max_tokens == 60


@pytest.mark.parametrize("call", ["logprobs", "evaluate"])
def test_scoring_out_of_memory_starts_again_with_half_the_tokens(caplog, monkeypatch, call):
    batch, worker = weighted(random_batch(*SHAPES)), make(max_tokens=60)
    score = {"logprobs": lambda: worker.logprobs(batch).logprobs,
             "evaluate": lambda: worker.evaluate(batch, clipped_surrogate)["loss"].value}[call]  # fmt: skip
    want, seen = score(), []
    limit_passes(monkeypatch, worker, 30, seen)
    assert score() == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert max(seen) > 30 >= seen[-1] and "scoring ran out of memory" in caplog.text
    seen.clear()
    score()
    assert max(seen) <= 30  # later passes begin with the smaller budget
    limit_passes(monkeypatch, worker, 0, seen)
    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        score()
    assert "one sequence alone does not fit" in caught.value.__notes__[0]
    assert max(micro.num_tokens for micro in worker.micro_batches(batch, None, trained=True)) > 30  # not an update's


def test_of_two_limits_of_an_update_the_smaller_one_holds():
    worker, batch = make(max_tokens=60), random_batch(*SHAPES)
    worker.limit_tokens(30)
    worker.limit_tokens(50)
    assert max(micro.num_tokens for micro in worker.micro_batches(batch, None, trained=True)) <= 30
    worker.max_tokens = 26  # the user's own
    assert max(micro.num_tokens for micro in worker.micro_batches(batch, None, trained=True)) <= 26


def test_a_sequence_that_does_not_fit_alone_ends_the_update_with_what_helps():
    seen, worker = [], make(max_tokens=60)
    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        worker.forward_backward(weighted(random_batch((5, [3, 9, 1, 14]))), short_of_memory(13, seen))
    (note,) = caught.value.__notes__
    assert "one sequence (or unit) alone does not fit, at a budget of 18" in note and "with 60 tokens" in note
    assert len(seen) > 1


class Several(Placement):
    """A process of several, which can't run passes again without the others."""

    repeats_passes = False

    def check_same_passes(self, facts):
        self.facts = facts


def test_an_update_of_several_processes_leaves_a_smaller_budget_for_the_next_start(monkeypatch):
    batch, worker = weighted(random_batch(*SHAPES)), make(max_tokens=60, placement=Several())
    worker.version = 3
    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        worker.forward_backward(batch, short_of_memory(20, []))
    budget, facts = worker.tokens_after_restart, worker.placement.facts
    assert budget < 60 and f"at most {budget} tokens" in caught.value.__notes__[0]
    assert (facts["sequences"], facts["tokens"], facts["weight version"]) == (batch.num_sequences, batch.num_tokens, 3)
    worker.optim.clear_gradients()
    limit_passes(monkeypatch, worker, 20, [])
    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        worker.logprobs(batch)  # its budget is not that of updates
    assert worker.tokens_after_restart is None and "Scoring ran out" in caught.value.__notes__[0]


def test_budgets_for_the_next_start_only_become_smaller_and_damaged_ones_are_none(tmp_path):
    write_budgets(tmp_path, {"actor": 40, "critic": 9})
    write_budgets(tmp_path, {"actor": 60})
    assert read_budgets(tmp_path) == {"actor": 40, "critic": 9}
    for content, budgets in (('{"actor": 0, "critic": "9", "teacher": 3}', {"teacher": 3}), ("[3]", {}), ("{", {})):
        (tmp_path / BUDGETS).write_text(content)
        assert read_budgets(tmp_path) == budgets


def test_gradients_of_an_earlier_call_are_not_dropped_for_another_try():
    batch, worker = weighted(random_batch(*SHAPES)), make(max_tokens=60)
    worker.forward_backward(batch, clipped_surrogate)
    before = gradients(worker)
    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        worker.forward_backward(batch, short_of_memory(0, []))
    assert "Set a smaller trainer.max_tokens_per_microbatch" in caught.value.__notes__[0]
    assert same(gradients(worker), before)


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean-token-mean"])
def test_the_gradient_and_the_metrics_are_those_of_the_whole_batch_however_it_is_cut(mode):
    batch = weighted(random_batch(*SHAPES, masked=True), mode)
    batch = batch.replace(old_logprobs=torch.linspace(-6, -5, batch.num_tokens).double())
    model = exact_model()
    oracle = one_by_one(model, batch)
    ratio = (oracle - batch.old_logprobs).exp()
    free, clipped = -batch.advantages * ratio, -batch.advantages * ratio.clamp(0.8, 1.2)
    total = (batch.weights * torch.where(batch.mask, torch.maximum(free, clipped), 0.0)).sum()
    total.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    seen = []
    # one pass, several, one sequence each, few sequences at a time
    for tokens, sequences in ((10_000, None), (40, None), (10_000, 1), (10_000, 3)):
        worker = make(model, optim=OptimConfig(name="sgd"), max_tokens=tokens, max_sequences=sequences)
        metrics = worker.forward_backward(batch, clipped_surrogate, reductions=REDUCTIONS, entropy=True)
        assert gap(gradients(worker), want) < 1e-12
        assert metrics["loss"].value == pytest.approx(total.item(), abs=1e-12)
        seen.append((len(worker.micro_batches(batch, sequences)), values(metrics)))
        model.zero_grad()
    counts = [count for count, _ in seen]
    assert counts[0] == 1 < counts[1] < counts[2] == batch.num_sequences
    for _, found in seen[1:]:
        assert found == pytest.approx(seen[0][1], rel=1e-12, abs=1e-12)
    inside = ratio[batch.mask]
    assert seen[0][1]["reduced_pg_loss"] == pytest.approx(seen[0][1]["loss"])
    assert seen[0][1]["is_ratio/mean"] == pytest.approx(inside.mean().item())
    assert seen[0][1]["is_ratio/max"] == pytest.approx(inside.max().item())
    assert seen[0][1]["is_ratio/min"] == pytest.approx(inside.min().item())


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: numbers that are read, shapes that depend on values."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def test_the_numbers_of_a_micro_batch_stay_on_the_device():
    x, mask, hows = (
        torch.tensor([1.0, -2.0, 5.0]),
        torch.tensor([True, True, False]),
        ["mean", "max", "min", "weighted"],
    )
    with Waits() as waits:
        labels, found = reduce_metrics(
            {"x": x}, mask, torch.ones(3), {"x": {how: how for how in hows}}, torch.arange(3), 3
        )
    assert waits.count == 0 and [how for _, how in labels] == hows
    assert [float(n) for n in found] == [2.0, -1.0, 1.0, -2.0, -1.0]  # the count first


@pytest.mark.parametrize(("dtype", "multiple"), [(torch.float32, 1), (torch.bfloat16, 32)])
def test_attention_in_bf16_on_a_cpu_is_called_with_few_shapes(dtype, multiple):
    batch = weighted(random_batch((3, [6, 4]), (5, [9, 2])))
    (micro,) = make(dtype=dtype).micro_batches(batch, None)
    assert all(b.own % multiple == b.above % multiple == 0 for b in micro.layout.bucket_row.buckets)
    assert (max(b.own for b in micro.layout.bucket_row.buckets) == 32) == (multiple == 32)


def test_no_micro_batch_waits_for_the_device():
    batch = weighted(random_batch(*SHAPES))
    worker = make(exact_model(), max_sequences=3)
    micros = worker.micro_batches(batch, 3)  # planned on the host, before the first pass
    worker.micro_batches = lambda *_: micros
    with Waits() as waits:  # transformers' making of masks included
        worker.forward_backward(batch, clipped_surrogate, reductions=REDUCTIONS, entropy=True)
    assert len(micros) > 1 and waits.count == 0


def test_a_batch_that_was_scored_in_inference_mode_can_be_trained_on():
    batch = weighted(random_batch(*SHAPES))
    worker, other = make(exact_model()), make(exact_model())
    with torch.inference_mode():
        worker.logprobs(batch)
    for w in (worker, other):
        w.forward_backward(batch, clipped_surrogate)
    assert gap(gradients(worker), gradients(other)) == 0


def test_a_micro_batch_without_trained_tokens_has_no_part_in_means_and_extremes():
    batch = weighted(random_batch((3, [4, 2])))
    batch = batch.replace(mask=batch.sequence == 0)
    run = lambda n: values(make(max_sequences=n).evaluate(batch, clipped_surrogate, reductions=REDUCTIONS))
    whole, cut = run(2), run(1)
    assert cut == pytest.approx(whole, abs=1e-6) and all(abs(x) < 100 for x in cut.values())
    units = batch.replace(weights=None, unit_of=torch.arange(2), unit_weights=torch.ones(2))
    total = lambda x, column: torch.zeros(x.num_units).index_add(0, x.unit, column)
    loss = lambda x: (total(x, x.logprobs), {"trained": total(x, x.mask.float())})
    assert values(make().evaluate(units, loss))["trained"] == 4.0  # of the first unit alone


def test_gradients_of_two_calls_add_up():
    batch = weighted(random_batch(*SHAPES))
    worker = make(exact_model())
    worker.forward_backward(batch, clipped_surrogate)
    whole = gradients(worker)
    worker.module.zero_grad()
    for part in (torch.arange(4), torch.arange(4, 10)):
        worker.forward_backward(batch.select(part), clipped_surrogate)
    assert gap(gradients(worker), whole) < 1e-12


def test_masked_tokens_give_no_gradient_even_where_the_loss_is_nan():
    batch = weighted(random_batch((3, [6, 4]), masked=True))
    worker, other = make(), make()

    def odd(x):
        loss, metrics = clipped_surrogate(x)
        return torch.where(x.mask, loss, torch.nan), metrics

    worker.forward_backward(batch, odd)
    other.forward_backward(batch, clipped_surrogate)
    assert same(gradients(worker), gradients(other))


def test_a_batch_without_weights_is_refused():
    with pytest.raises(DataError, match="no loss weights"):
        make().forward_backward(random_batch((3, [6])), clipped_surrogate)


def test_evaluate_reports_the_same_numbers_and_leaves_no_gradient():
    batch = weighted(random_batch(*SHAPES))
    worker = make()
    found = values(worker.evaluate(batch, clipped_surrogate))
    assert all(m.grad is None for m in worker.optim.masters.values())
    assert found == pytest.approx(values(worker.forward_backward(batch, clipped_surrogate)), abs=1e-7)


def test_a_step_of_no_sequences_is_a_step_of_zero_gradients():
    batch = weighted(random_batch(*SHAPES))
    worker, other = make(), make()
    for w in (worker, other):
        w.forward_backward(batch, clipped_surrogate)
        w.optim_step()
    before = weights_of(worker.module)
    worker.forward_backward(batch.select(torch.zeros(0, dtype=torch.long)), clipped_surrogate)
    other.forward_backward(batch.replace(weights=torch.zeros(batch.num_tokens)), clipped_surrogate)
    assert worker.optim_step()["grad_norm"].value == other.optim_step()["grad_norm"].value == 0.0
    assert same(weights_of(worker.module), weights_of(other.module))
    assert not same(weights_of(worker.module), before)  # the moments go on: "no step" would stay here


# ---- reading -------------------------------------------------------------------------------------------------------


def test_logprobs_and_entropy_are_those_of_a_plain_forward_at_the_temperature():
    batch = random_batch(*SHAPES)
    model = tiny_model(dtype=torch.float64)
    want = one_by_one(model, batch, temperature=0.7).detach()
    worker = make(model, processors=LogitsProcessors(temperature=0.7), max_tokens=30)
    stats = worker.logprobs(batch, entropy=True)
    torch.testing.assert_close(stats.logprobs, want, atol=1e-12, rtol=0)
    assert stats.entropy.shape == stats.logprobs.shape and (stats.entropy > 0).all()
    assert not stats.logprobs.requires_grad
    assert worker.logprobs(batch).entropy is None
    cold = worker.logprobs(batch, processors=LogitsProcessors(temperature=1.0)).logprobs
    torch.testing.assert_close(cold, one_by_one(model, batch).detach(), atol=1e-12, rtol=0)


def test_a_critic_values_the_state_before_each_token():
    batch = random_batch(*SHAPES)
    worker = make(tiny_model(dtype=torch.float64), role="critic")
    assert torch.equal(worker.values(batch), torch.zeros(batch.num_tokens))  # a new head says 0
    head = worker.loaded.score_head
    with torch.no_grad():
        head.weight.copy_(torch.randn(1, 32))
    worker.module.set_attn_implementation("sdpa")
    want = []
    with torch.no_grad():
        for i, (end, n) in enumerate(zip(batch.ends.tolist(), batch.lengths.tolist())):
            ids = torch.cat([batch.prefix(i), batch.tokens[end - n : end]])[None]
            states = worker.module.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
            want.append((states @ head.weight[0])[-n - 1 : -1])
    worker.module.set_attn_implementation("whet")
    torch.testing.assert_close(worker.values(batch), torch.cat(want), atol=1e-12, rtol=0)


def test_a_critic_learns_the_returns_as_far_as_the_clip_lets_it():
    batch = weighted(random_batch(*SHAPES))
    worker = make(role="critic", optim=OptimConfig(lr=3e-3))
    batch = batch.replace(returns=torch.full((batch.num_tokens,), 0.5), values=worker.values(batch))
    losses = []
    for _ in range(25):
        losses.append(worker.forward_backward(batch, clipped_value)["loss"].value)
        worker.optim_step()
    assert losses[0] == pytest.approx(0.125)  # half the square of 0 - 0.5
    assert losses[-1] == pytest.approx(0.045, abs=1e-6)  # and stops at the clip of 0.2: half the square of 0.2 - 0.5


def test_a_worker_without_an_optimizer_only_reads():
    worker = make(optim=None)
    assert not any(p.requires_grad for p in worker.module.parameters())
    assert worker.logprobs(random_batch((3, [2]))).logprobs.shape == (2,)


# ---- mixed precision -----------------------------------------------------------------------------------------------


def test_a_bf16_worker_adds_gradients_of_micro_batches_in_fp32():
    batch = weighted(random_batch(*SHAPES))
    worker = make(dtype=torch.bfloat16, max_tokens=20)
    assert worker.dtype == torch.bfloat16
    worker.forward_backward(batch, clipped_surrogate)
    model = tiny_model()
    plain = make(model, optim=None, max_tokens=20, dtype=torch.bfloat16)
    loop = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    rough = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    model.requires_grad_(True)
    micros = plain.micro_batches(batch, None)
    assert len(micros) > 3
    for micro in micros:
        plain.micro_batches = lambda *_, micro=micro: [micro]
        plain.forward_backward(batch, clipped_surrogate)
        for name, p in model.named_parameters():
            loop[name] += p.grad.float()
            rough[name] += p.grad
        model.zero_grad()
    assert same(gradients(worker), loop)
    assert gap({n: r.float() for n, r in rough.items()}, loop) > 1e-5  # what bf16 accumulation would have given


def test_a_bf16_worker_steps_its_masters_and_computes_with_their_roundings():
    batch = weighted(random_batch(*SHAPES))
    worker = make(dtype=torch.bfloat16, optim=OptimConfig(name="sgd", lr=1e-4))
    start = weights_of(worker.module)
    masters = {n: m.detach().clone() for n, m in worker.optim.masters.items()}
    for _ in range(3):
        worker.forward_backward(batch, clipped_surrogate)
        worker.optim_step()
    for name, p in worker.module.named_parameters():
        assert torch.equal(p, worker.optim.masters[name].bfloat16())
    moved = [n for n, m in worker.optim.masters.items() if not torch.equal(m, masters[n])]
    assert len(moved) == len(masters)
    # most updates are under the step of bf16: all but a few parameters look unmoved
    still = sum((p == start[n]).sum().item() for n, p in worker.module.named_parameters())
    assert still > 0.9 * sum(p.numel() for p in start.values())


def test_reading_may_take_more_sequences_at_once_than_training():
    worker = make()
    worker.set_max_sequences(training=2, reading=3)
    assert (worker.max_sequences, worker.max_read_sequences) == (2, 3)
    worker = make(max_sequences=4)
    worker.set_max_sequences(training=2, reading=None)  # follows training
    assert (worker.max_sequences, worker.max_read_sequences) == (2, 2)
    worker.set_max_sequences(training=8, reading=8)  # never over what was said before
    assert (worker.max_sequences, worker.max_read_sequences) == (2, 2)


# ---- state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_worker_goes_on_bit_for_bit_in_another_process_of_the_model(tmp_path, dtype, tied):
    batch = weighted(random_batch(*SHAPES))
    config = OptimConfig(lr=1e-2, schedule="linear", warmup_steps=2, total_steps=10)
    first, second = (make(tiny_model(seed, tie_word_embeddings=tied), dtype=dtype, optim=config) for seed in (0, 1))

    def step(worker):
        worker.forward_backward(batch, clipped_surrogate)
        return values(worker.optim_step())

    step(first)
    step(first)
    first.version = 7
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.version == 7
    assert same(weights_of(first.module), weights_of(second.module))
    assert same(dict(first.optim.masters), dict(second.optim.masters))
    assert [step(first) for _ in range(3)] == [step(second) for _ in range(3)]
    assert same(dict(first.optim.masters), dict(second.optim.masters))
    head, embedding = second.module.get_output_embeddings(), second.module.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied


def test_the_state_of_a_later_release_is_refused_and_nothing_is_changed(tmp_path):
    worker = make(tiny_model(), optim=OptimConfig(lr=1e-2))
    worker.save(tmp_path)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["format"] == 1
    torch.save({**state, "format": 2}, tmp_path / "state.pt")
    other = make(tiny_model(1), optim=OptimConfig(lr=1e-2))
    before = weights_of(other.module)
    with pytest.raises(CheckpointError, match=r"state\.pt has format 2, .*reads format 1; .*from its weights"):
        other.load(tmp_path)
    assert same(weights_of(other.module), before)
    del state["format"]
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"state\.pt has format None"):
        other.load(tmp_path)


def test_the_state_of_another_model_is_refused_and_nothing_is_changed(tmp_path):
    make(tiny_model(num_hidden_layers=1)).save(tmp_path)
    worker = make()
    before = weights_of(worker.module)
    with pytest.raises(CheckpointError, match="holds another model"):
        worker.load(tmp_path)
    make(tiny_model(intermediate_size=40)).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"there and .* here"):
        worker.load(tmp_path)
    assert same(weights_of(worker.module), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exported_model_loads_with_plain_transformers_and_is_the_masters(tmp_path, tokenizer, dtype):
    batch = weighted(random_batch(*SHAPES))
    worker = make(dtype=dtype)
    worker.forward_backward(batch, clipped_surrogate)
    worker.optim_step()
    compute = weights_of(worker.module)
    worker.export(tmp_path, tokenizer)
    assert same(weights_of(worker.module), compute)  # what the engine reads has not changed
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert same(weights_of(model), {n: m.detach() for n, m in worker.optim.masters.items()})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == END and "whet" not in json.dumps(config)


def test_weights_are_listed_under_each_of_their_names():
    names = dict(make().named_weights())
    assert names["lm_head.weight"].data_ptr() == names["model.embed_tokens.weight"].data_ptr()
    assert not any(w.requires_grad for w in names.values())


def test_a_tied_weight_moves_toward_another_once():
    read, other = make(tiny_model(1), optim=None), make()
    before = read.module.lm_head.weight.clone()
    read.load_weights(other.named_weights(), mixup_alpha=0.5)
    assert torch.allclose(read.module.lm_head.weight, before.lerp(other.module.lm_head.weight, 0.5))


def test_a_pair_over_the_budget_is_scored_in_two_passes_each_of_which_is_announced():
    batch, worker, seen = random_batch((5, [9]), (6, [14])), make(max_tokens=24), []
    pair = batch.replace(unit_of=torch.zeros(2, dtype=torch.long))
    worker.on_micro_batch = lambda done, total: seen.append((done, total))
    assert torch.equal(worker.logprobs(pair).logprobs, worker.logprobs(batch).logprobs)
    with pytest.raises(DataError):
        worker.forward_backward(pair.replace(unit_weights=torch.ones(1)), clipped_surrogate)
    worker.forward_backward(weighted(batch), clipped_surrogate)
    assert seen == [(0, 2), (1, 2)] * 3


def test_an_update_that_is_not_finite_is_counted_and_has_no_norm():
    worker = make()
    worker.forward_backward(weighted(random_batch((3, [2]))), lambda x: (x.logprobs * torch.inf, {}))
    found = worker.optim_step()
    assert found["optim/skipped"].value == 1.0 and "grad_norm" not in found
    assert "learning_rate" in found

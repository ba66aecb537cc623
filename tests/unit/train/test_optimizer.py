import math
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from whet.config import OptimConfig
from whet.errors import CheckpointError, ConfigError
from whet.train.optimizer import Optim


class Toy(nn.Module):
    """A matrix and a vector."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(3, 2, dtype=dtype))
        self.vector = nn.Parameter(torch.randn(2, dtype=dtype))

    def forward(self, x):
        return (x @ self.matrix + self.vector).square().sum()


def set_gradients(optim, seed=1, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    for m in optim.masters.values():
        m.grad = torch.randn(m.shape, generator=g) * scale


# ---- one step ------------------------------------------------------------------------------------------------------


def test_clipping_scales_the_whole_gradient_to_the_limit():
    module = Toy()
    optim = Optim(module, OptimConfig(name="sgd", lr=0.5, max_grad_norm=1.0))
    start = module.matrix.detach().clone()
    optim.masters["matrix"].grad = torch.full((3, 2), 3.0)
    optim.masters["vector"].grad = torch.full((2,), 4.0)
    norm, rate, skipped = optim.step()
    assert norm == pytest.approx(math.sqrt(6 * 9 + 2 * 16))  # over both tensors, before clipping
    assert (rate, skipped) == (0.5, False)
    torch.testing.assert_close(module.matrix.detach(), start - 0.5 * 3.0 / norm, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("limit", [0.0, 100.0])
def test_a_gradient_under_the_limit_or_without_one_is_taken_as_it_is(limit):
    module = Toy()
    optim = Optim(module, OptimConfig(name="sgd", lr=1.0, max_grad_norm=limit))
    start = module.vector.detach().clone()
    optim.masters["vector"].grad = torch.tensor([3.0, 4.0])
    optim.step()
    assert torch.equal(module.vector.detach(), start - torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_neither_weights_nor_moments_nor_schedule(bad):
    module = Toy()
    optim = Optim(module, OptimConfig(lr=0.1, schedule="linear", warmup_steps=2, total_steps=8))
    set_gradients(optim)
    optim.step()
    weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    moments = {i: {k: v.clone() for k, v in s.items()} for i, s in optim.optimizer.state_dict()["state"].items()}
    rate = optim.optimizer.param_groups[0]["lr"]
    set_gradients(optim)
    optim.masters["vector"].grad[0] = bad
    norm, _, skipped = optim.step()
    assert skipped and not math.isfinite(norm)
    assert all(torch.equal(p, weights[n]) for n, p in module.named_parameters())
    for i, s in optim.optimizer.state_dict()["state"].items():
        assert all(torch.equal(s[k], v) for k, v in moments[i].items())
    assert optim.optimizer.param_groups[0]["lr"] == rate and optim.updates == 1
    assert all(m.grad is None for m in optim.masters.values())  # cleared: the next step starts clean
    set_gradients(optim)
    assert optim.step()[2] is False


@pytest.mark.parametrize("size", [1e20, 3e38])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_finite_gradient_whose_norm_overflows_float32_is_clipped_and_not_skipped(name, size):
    module, other = Toy(), Toy()
    huge, small = (Optim(m, OptimConfig(name=name, lr=0.5, max_grad_norm=1.0)) for m in (module, other))
    norm = math.sqrt(8) * size
    for optim, value in ((huge, size), (small, size / norm)):
        for m in optim.masters.values():
            m.grad = torch.full(m.shape, value)
    found, _, skipped = huge.step()
    assert not skipped and found == pytest.approx(norm, rel=1e-6)
    small.step()
    for p, q in zip(module.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)


def test_without_clipping_a_gradient_whose_norm_overflows_is_skipped_since_moments_would_be_infinite():
    optim = Optim(Toy(), OptimConfig(lr=0.5, max_grad_norm=0.0))
    set_gradients(optim, scale=1e25)
    norm, _, skipped = optim.step()
    assert skipped and 1e25 < norm < 1e26


def test_matrices_decay_and_vectors_do_not():
    module = Toy()
    optim = Optim(module, OptimConfig(lr=0.1, weight_decay=0.5))
    start = {n: p.detach().clone() for n, p in module.named_parameters()}
    optim.step()  # no gradient: only the decay moves anything
    torch.testing.assert_close(module.matrix.detach(), start["matrix"] * (1 - 0.1 * 0.5))
    assert torch.equal(module.vector.detach(), start["vector"])


def test_adamw_is_torchs():
    module, other = Toy(), Toy()
    optim = Optim(module, OptimConfig(lr=0.1, betas=(0.8, 0.9), eps=1e-6, max_grad_norm=0.0))
    oracle = torch.optim.AdamW(other.parameters(), lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0)
    for seed in range(3):
        set_gradients(optim, seed)
        for m, p in zip(optim.masters.values(), other.parameters()):
            p.grad = m.grad.clone()
        optim.step()
        oracle.step()
    for p, q in zip(module.parameters(), other.parameters()):
        torch.testing.assert_close(p, q)


def test_a_step_without_a_gradient_is_the_step_of_zero_gradients():
    module, other = Toy(), Toy()
    one, two = (Optim(m, OptimConfig(lr=0.1)) for m in (module, other))
    for optim in (one, two):
        set_gradients(optim)
        optim.step()
    before = module.matrix.detach().clone()
    assert one.step()[0] == 0.0
    set_gradients(two, scale=0.0)
    two.step()
    assert torch.equal(module.matrix, other.matrix)
    assert not torch.equal(module.matrix, before)  # momentum moves: "no step" would leave it


# ---- masters -------------------------------------------------------------------------------------------------------


def test_fp32_masters_gather_updates_that_are_smaller_than_a_bf16_step():
    module = Toy()
    with torch.no_grad():
        module.matrix.fill_(1.0)
    optim = Optim(module, OptimConfig(name="sgd", lr=1e-4, max_grad_norm=0.0), dtype=torch.bfloat16)
    assert module.matrix.dtype == torch.bfloat16 and optim.masters["matrix"].dtype == torch.float32
    for step in range(1, 60):
        optim.masters["matrix"].grad = torch.full((3, 2), -1.0)
        optim.step()
        assert torch.equal(module.matrix, optim.masters["matrix"].bfloat16())
        if step == 10:
            assert (module.matrix == 1.0).all()  # 1.001 is still 1 in bf16 (its next number is 1.0078)
            assert (optim.masters["matrix"] > 1.0009).all()
    assert (module.matrix > 1.0).all()  # bf16 weights alone would stand at 1 for ever


def test_bf16_gradients_add_up_in_fp32():
    module = Toy()
    optim = Optim(module, OptimConfig(lr=0.1), dtype=torch.bfloat16)
    loop, rough = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.bfloat16)
    for seed in range(20):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).bfloat16()
        module(x).backward()
        assert module.matrix.grad is None  # handed over as soon as it is made
        copy = Toy().to(torch.bfloat16)
        copy(x).backward()
        loop += copy.matrix.grad.float()
        rough += copy.matrix.grad
    assert torch.equal(optim.masters["matrix"].grad, loop)
    assert not torch.equal(loop, rough.float())


def test_parameters_of_a_model_that_computes_in_fp32_are_the_masters():
    module = Toy()
    optim = Optim(module, OptimConfig())
    assert all(optim.masters[n] is p for n, p in module.named_parameters())


def test_frozen_parameters_are_left_out_and_a_wholly_frozen_model_is_refused():
    module = Toy()
    module.vector.requires_grad_(False)
    assert list(Optim(module, OptimConfig()).masters) == ["matrix"]
    module.matrix.requires_grad_(False)
    with pytest.raises(ConfigError, match="unfreeze"):
        Optim(module, OptimConfig())


# ---- schedules -----------------------------------------------------------------------------------------------------


def rates(config, steps, total=None):
    optim = Optim(Toy(), config)
    optim.plan(total)
    return [optim.step()[1] for _ in range(steps)]


def test_the_rate_of_each_update_follows_the_schedule_and_its_warm_up():
    assert rates(OptimConfig(lr=1.0), 3) == [1.0, 1.0, 1.0]
    assert rates(OptimConfig(lr=1.0, warmup_steps=2), 4) == [0.0, 0.5, 1.0, 1.0]  # constant, but not at once
    assert rates(OptimConfig(lr=1.0, warmup_ratio=0.5), 4, total=4) == [0.0, 0.5, 1.0, 1.0]
    assert rates(OptimConfig(lr=1.0, schedule="linear", warmup_steps=2), 6, total=6) == [0, 0.5, 1.0, 0.75, 0.5, 0.25]
    cosine = rates(OptimConfig(lr=1.0, schedule="cosine", total_steps=4), 4, total=100)  # its own total comes first
    assert cosine == pytest.approx([(1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)])
    lowest = rates(
        OptimConfig(lr=1.0, schedule="cosine_with_min_lr", schedule_kwargs={"min_lr": 0.1}, total_steps=3), 4
    )
    assert lowest[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(("name", "value"), [("schedule", "linear"), ("warmup_ratio", 0.5)])
def test_a_schedule_that_needs_the_end_of_the_run_asks_for_it(name, value):
    with pytest.raises(ConfigError, match=rf"optim\.{name}=.*optim\.total_steps or trainer\.max_steps"):
        rates(OptimConfig(lr=1.0, **{name: value}), 1)


def test_an_unknown_schedule_is_refused_at_once_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean cosine"):
        Optim(Toy(), OptimConfig(schedule="cosin"))


@pytest.mark.parametrize(
    ("schedule", "arguments", "said"),
    [
        ("reduce_lr_on_plateau", {}, "TypeError.*metrics"),
        ("cosine_with_min_lr", {}, "ValueError.*min_lr"),
        ("warmup_stable_decay", {}, "TypeError.*num_decay_steps"),
        ("cosine", {"min_lr": 0.1}, "TypeError.*min_lr"),
        ("cosine", {"num_cycles": "two"}, "ValueError.*two"),  # used after the warm-up alone
    ],
)
def test_arguments_that_a_schedule_can_not_be_stepped_with_are_refused_at_once(schedule, arguments, said):
    config = OptimConfig(lr=0.5, schedule=schedule, schedule_kwargs=arguments, warmup_steps=3)
    with pytest.raises(ConfigError, match=rf"optim\.schedule='{schedule}' with optim\.schedule_kwargs=.*{said}"):
        Optim(Toy(), config)


def test_a_schedule_that_has_no_end_needs_no_number_of_updates():
    later = rates(OptimConfig(lr=1.0, schedule="inverse_sqrt", schedule_kwargs={"timescale": 1}), 4)
    assert later == pytest.approx([1.0, 2**-0.5, 3**-0.5, 0.5])


def test_another_run_on_the_same_weights_has_its_own_schedule_and_the_moments_of_equal_settings():
    linear = {"lr": 1.0, "schedule": "linear"}
    optim = Optim(Toy(), OptimConfig(**linear, total_steps=4))
    for _ in range(3):
        optim.step()
    optim.restart(OptimConfig(**linear, total_steps=8))
    assert optim.updates == 0 and len(optim.optimizer.state) == 2
    assert [optim.step()[1] for _ in range(2)] == [1.0, 7 / 8] and optim.updates == 2
    optim.restart(OptimConfig(**linear, total_steps=8, weight_decay=0.5))
    assert not optim.optimizer.state and optim.step()[1] == 1.0
    with pytest.raises(ConfigError, match="came from a factory, so whet can't restart its schedule"):
        Optim(Toy(), torch.optim.SGD).restart(OptimConfig())


def test_a_usual_rate_stands_in_for_one_that_is_not_given_and_for_no_other():
    given, without = Optim(Toy(), OptimConfig(lr=0.5)), Optim(Toy(), OptimConfig())
    assert (given.set_default_lr(0.25), without.set_default_lr(0.25)) == (False, True)
    assert (given.step()[1], without.step()[1]) == (0.5, 0.25)


# ---- optimizers ----------------------------------------------------------------------------------------------------


def make_rmsprop(groups, lr=0.0):
    return torch.optim.RMSprop(groups, lr=lr or 0.25)


def test_an_optimizer_can_be_a_factory_or_a_reference_to_one():
    assert isinstance(Optim(Toy(), make_rmsprop).optimizer, torch.optim.RMSprop)
    assert Optim(Toy(), make_rmsprop).step()[1] == 0.25
    named = Optim(Toy(), OptimConfig(name=f"{__name__}:make_rmsprop", lr=0.5)).optimizer
    assert isinstance(named, torch.optim.RMSprop) and named.param_groups[0]["lr"] == 0.5


def test_an_unknown_optimizer_and_a_factory_of_something_else_are_refused():
    with pytest.raises(ConfigError, match=r"Known: adam, adamw, .*, sgd"):
        Optim(Toy(), OptimConfig(name="lion"))
    with pytest.raises(ConfigError, match=r"must return a torch\.optim\.Optimizer, got list"):
        Optim(Toy(), lambda parameters: parameters)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "json:dumps",
            r"optim\.name='json:dumps' raised TypeError: .*'lr'; it is called as factory\(groups, lr=\.\.\.\)",
        ),
        ("torch.optim:LBFGS", r"optim\.name='torch\.optim:LBFGS' raised ValueError: .*parameter groups"),
        ("math:pi", r"optim\.name 'math:pi' is 3\.14\d* \(float\), and must be a function or a class"),
    ],
)
def test_what_is_no_optimizer_factory_is_an_error_in_words(name, said):
    with pytest.raises(ConfigError, match=said):
        Optim(Toy(), OptimConfig(name=name))


def test_a_factory_that_raises_is_an_error_in_words():
    with pytest.raises(ConfigError, match=r"an optimizer factory raised TypeError: .*it is called as factory\(param"):
        Optim(Toy(), lambda: None)


# ---- state ---------------------------------------------------------------------------------------------------------


class Shard(torch.Tensor):
    """A shard, of which a process may have no more than one whole tensor at a time."""

    whole: ClassVar[list] = []
    device_mesh = SimpleNamespace(device_type="cpu")

    def full_tensor(self):
        assert not [ref for ref in self.whole if ref() is not None]
        made = torch.ones(4)
        self.whole.append(weakref.ref(made))
        return made


def test_a_process_that_only_gives_its_shards_keeps_no_whole_tensor():
    optim = Optim(Toy(), OptimConfig(lr=0.1))
    masters = list(optim.masters.values())
    for p in masters:
        optim.optimizer.state[p] = {"step": torch.ones(()), "exp_avg": Shard(2), "exp_avg_sq": Shard(2)}
    assert optim.save(None) == {} and len(Shard.whole) == 2 * len(masters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_optimizer_goes_on_as_if_nothing_had_happened(tmp_path, dtype):
    config = OptimConfig(lr=0.1, schedule="cosine", warmup_steps=1)
    one, two = Toy(), Toy()
    first = Optim(one, config, dtype=dtype)
    first.plan(6)
    for seed in range(3):
        set_gradients(first, seed)
        first.step()
    rest = first.save(tmp_path / "o.safetensors")
    torch.save(rest, tmp_path / "rest.pt")
    second = Optim(two, config, dtype=dtype)
    with torch.no_grad():
        for name, m in first.masters.items():
            second.masters[name].copy_(m)
    second.load(tmp_path / "o.safetensors", torch.load(tmp_path / "rest.pt", weights_only=True))
    seen = []
    for optim in (first, second):
        made = []
        for seed in (7, 8):
            set_gradients(optim, seed)
            made.append(optim.step())
        seen.append(made)
    assert seen[0] == seen[1] and first.updates == second.updates == 5
    assert all(torch.equal(first.masters[n], second.masters[n]) for n in first.masters)
    assert torch.equal(one.matrix, two.matrix)


def resumed(tmp_path, before, after):
    """An Optim of the configuration `after` that took up three steps of `before`."""
    made = []
    for config in (before, after):
        made.append(Optim(Toy(), config))
        made[-1].plan(6)
    for seed in range(3):
        set_gradients(made[0], seed)
        made[0].step()
    made[1].load(tmp_path / "o.safetensors", made[0].save(tmp_path / "o.safetensors"))
    return made[1]


def test_a_changed_setting_holds_after_a_resume_and_the_moments_stay(tmp_path):
    linear = {"schedule": "linear", "betas": (0.9, 0.99)}
    old, new = OptimConfig(lr=0.6, **linear), OptimConfig(lr=0.06, weight_decay=0.3, eps=1e-4, **linear)
    optim = resumed(tmp_path, old, new)
    assert [(g["weight_decay"], g["eps"]) for g in optim.optimizer.param_groups] == [(0.3, 1e-4), (0.0, 1e-4)]
    assert optim.optimizer.state_dict()["state"][0]["step"] == 3
    assert [optim.step()[1] for _ in range(3)] == pytest.approx([0.03, 0.02, 0.01])  # the old rate would be 0.3
    constant = resumed(tmp_path, OptimConfig(lr=0.5), OptimConfig(lr=0.25))
    assert [constant.step()[1] for _ in range(2)] == [0.25, 0.25]
    other = resumed(tmp_path, OptimConfig(lr=0.6), OptimConfig(lr=0.6, schedule="linear"))
    assert other.step()[1] == pytest.approx(0.3)  # the new schedule's rate at once, not from the second step on


@pytest.mark.parametrize(
    ("before", "after", "total", "rates"),
    [
        ({"schedule": "linear"}, {"schedule": "linear"}, 12, [9 / 12, 8 / 12]),  # of 12 updates 3 are taken
        ({"schedule": "linear"}, {"schedule": "linear"}, 4, [1 / 4, 0.0]),
        ({"schedule": "linear"}, {"schedule": "linear"}, 6, [3 / 6, 2 / 6]),
        ({"schedule": "linear"}, {"schedule": "linear"}, None, [3 / 6, 2 / 6]),
        ({"schedule": "linear", "total_steps": 6}, {"schedule": "linear", "total_steps": 6}, 12, [3 / 6, 2 / 6]),
        ({"schedule": "linear"}, {"schedule": "linear", "lr": 0.5}, 12, [4.5 / 12, 4 / 12]),
        ({"schedule": "constant"}, {"schedule": "constant"}, 12, [1.0, 1.0]),
        ({"warmup_steps": 4}, {"warmup_steps": 4}, 12, [3 / 4, 1.0]),
    ],
)
def test_a_schedule_taken_up_for_another_number_of_updates_runs_over_it(tmp_path, caplog, before, after, total, rates):
    optim = resumed(tmp_path, OptimConfig(**{"lr": 1.0, **before}), OptimConfig(**{"lr": 1.0, **after}))
    optim.plan(total)
    changed = rates not in ([3 / 6, 2 / 6], [1.0, 1.0], [3 / 4, 1.0])
    assert (f"now runs over {total} updates; it was saved with 6" in caplog.text) == changed
    optim.plan(100)  # a second run in the same process goes on with it
    assert [optim.step()[1] for _ in rates] == pytest.approx(rates)
    assert caplog.text.count("now runs over") == changed


def test_a_schedule_made_anew_is_saved_with_its_total(tmp_path):
    config = OptimConfig(lr=1.0, schedule="cosine")
    first = resumed(tmp_path, config, config)
    first.plan(10)
    second = Optim(Toy(), config)
    second.load(tmp_path / "o.safetensors", first.save(tmp_path / "o.safetensors"))
    second.plan(10)
    want = [(1 + math.cos(math.pi * t / 10)) / 2 for t in range(3, 6)]
    for optim in (first, second):
        assert [optim.step()[1] for _ in want] == pytest.approx(want)


def test_settings_of_a_factory_that_did_not_change_stay_as_training_left_them(tmp_path):
    first, second = Optim(Toy(), make_rmsprop), Optim(Toy(), make_rmsprop)
    first.optimizer.param_groups[0]["lr"] = 0.125  # as a hook would set it
    second.load(tmp_path / "o.safetensors", first.save(tmp_path / "o.safetensors"))
    assert second.step()[1] == 0.125


def test_the_state_of_another_optimizer_or_of_something_else_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"the state of AdamW, this run's optimizer is SGD.*optim\.name"):
        resumed(tmp_path, OptimConfig(), OptimConfig(name="sgd"))
    with pytest.raises(CheckpointError, match="RMSprop"):
        resumed(tmp_path, OptimConfig(), make_rmsprop)
    optim = Optim(Toy(), OptimConfig())
    rest = optim.save(tmp_path / "o.safetensors")
    for name in rest:
        with pytest.raises(CheckpointError, match="has an unexpected format"):
            optim.load(tmp_path / "o.safetensors", {n: v for n, v in rest.items() if n != name})


def test_the_state_of_another_model_is_refused(tmp_path):
    first = Optim(Toy(), OptimConfig())
    set_gradients(first)
    first.step()
    rest = first.save(tmp_path / "o.safetensors")
    assert load_file(tmp_path / "o.safetensors")
    module = Toy()
    module.more = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(CheckpointError, match="does not fit"):
        Optim(module, OptimConfig()).load(tmp_path / "o.safetensors", rest)


def test_optimizer_tensors_that_are_cut_short_name_the_file(tmp_path):
    first = Optim(Toy(), OptimConfig())
    set_gradients(first)
    first.step()
    path = tmp_path / "o.safetensors"
    rest = first.save(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"o\.safetensors.*earlier step"):
        Optim(Toy(), OptimConfig()).load(path, rest)


# ---- its format ----------------------------------------------------------------------------------------------------


class Swapped(Toy):
    """Toy, whose parameters are registered in the other order."""

    def __init__(self):
        super().__init__()
        matrix, vector = self.matrix, self.vector
        del self.matrix, self.vector
        self.vector, self.matrix = vector, matrix


def moments_of(optim):
    return {n: {k: v.clone() for k, v in optim.optimizer.state[m].items()} for n, m in optim.masters.items()}


def same_moments(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n][k], v) for n in b for k, v in b[n].items())


def test_moments_are_kept_by_the_name_of_their_parameter(tmp_path):
    optim = Optim(Toy(), OptimConfig(lr=0.1))
    set_gradients(optim)
    optim.step()
    rest = optim.save(tmp_path / "o.safetensors")
    found = load_file(tmp_path / "o.safetensors")
    assert set(found) == {f"{n}.{k}" for n in ("matrix", "vector") for k in ("step", "exp_avg", "exp_avg_sq")}
    assert [g["params"] for g in rest["groups"]] == [["matrix"], ["vector"]]


def test_names_and_not_places_say_whose_moments_they_are(tmp_path):
    factory = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)
    one, two = Optim(Toy(), factory), Optim(Swapped(), factory)
    assert list(one.masters) == list(two.masters)[::-1]
    set_gradients(one)
    one.step()
    two.load(tmp_path / "o.safetensors", one.save(tmp_path / "o.safetensors"))
    assert same_moments(moments_of(two), moments_of(one))


def test_another_set_of_trained_parameters_is_refused_by_name(tmp_path):
    one, frozen = Optim(Toy(), OptimConfig(lr=0.1)), Toy()
    frozen.vector.requires_grad_(False)
    rest = one.save(tmp_path / "o.safetensors")
    with pytest.raises(CheckpointError, match="holds 2 groups of parameters, the optimizer here has 1"):
        Optim(frozen, OptimConfig(lr=0.1)).load(tmp_path / "o.safetensors", rest)
    whole = Optim(Toy(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    partial = Optim(frozen, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(CheckpointError, match="'vector' is in a group on one side only"):
        partial.load(tmp_path / "o.safetensors", whole.save(tmp_path / "o.safetensors"))


@pytest.mark.parametrize("number", ["2", "new", "0"])
def test_a_format_of_a_later_release_is_refused_with_the_fix(tmp_path, number):
    optim = Optim(Toy(), OptimConfig(lr=0.1))
    rest = optim.save(tmp_path / "o.safetensors")
    save_file({}, tmp_path / "o.safetensors", metadata={"whet_format": number})
    with pytest.raises(CheckpointError, match=r"this release of whet reads format 1; resume with the"):
        optim.load(tmp_path / "o.safetensors", rest)


def test_an_optimizer_with_a_parameter_of_its_own_says_that_it_cannot_be_saved(tmp_path):
    extra = nn.Parameter(torch.zeros(2))
    optim = Optim(Toy(), lambda parameters: torch.optim.SGD([*parameters, extra], lr=0.1))
    with pytest.raises(CheckpointError, match="SGD holds a parameter that is not one of the model's parameters"):
        optim.save(tmp_path / "o.safetensors")


def test_a_changed_total_steps_holds_after_a_resume(tmp_path):
    def made(total):
        return Optim(torch.nn.Linear(2, 2), OptimConfig(lr=1.0, schedule="linear", total_steps=total))

    old, new = made(6), made(12)
    for _ in range(3):
        for p in old.params.values():
            p.grad = torch.ones_like(p)
        old.step()
    new.load(tmp_path / "o.safetensors", old.save(tmp_path / "o.safetensors"))
    new.plan(100)  # total_steps comes first
    assert [new.step()[1] for _ in range(2)] == pytest.approx([9 / 12, 8 / 12])  # of 12 updates 3 are taken

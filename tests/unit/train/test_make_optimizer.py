"""Optimizers by name, and their state in safetensors. The 8-bit ones of torchao are run where it is installed."""

import builtins
import sys

import pytest
import torch
from torch import nn

from whet.config import OptimConfig
from whet.errors import CheckpointError, ConfigError
from whet.train import make_optimizer, optimizer_state
from whet.train.optimizer import Optim
from whet.train.optimizer_state import flatten_state, unflatten_state


class Toy(nn.Module):
    """A matrix large enough to be quantised (64 x 64 = 16 blocks of 256), and a vector that is not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(64, 64))
        self.vector = nn.Parameter(torch.randn(8))


def steps(optim, count, first=0):
    for seed in range(first, first + count):
        g = torch.Generator().manual_seed(seed)
        for m in optim.masters.values():
            m.grad = torch.randn(m.shape, generator=g)
        optim.step()


def weights(optim):
    return {n: m.detach().clone() for n, m in optim.masters.items()}


# ---- names ---------------------------------------------------------------------------------------------------------


def test_adam_is_torchs_with_decay_in_the_gradient():
    one, two = Toy(), Toy()
    optim = Optim(one, OptimConfig(name="adam", lr=0.1, betas=(0.8, 0.9), weight_decay=0.5, max_grad_norm=0.0))
    oracle = torch.optim.Adam(
        [{"params": [two.matrix], "weight_decay": 0.5}, {"params": [two.vector]}], lr=0.1, betas=(0.8, 0.9)
    )
    decoupled = Optim(Toy(), OptimConfig(name="adamw", lr=0.1, betas=(0.8, 0.9), weight_decay=0.5, max_grad_norm=0.0))
    steps(decoupled, 2)
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        for p, q in zip(one.parameters(), two.parameters()):
            p.grad = torch.randn(p.shape, generator=g)
            q.grad = p.grad.clone()
        optim.step()
        oracle.step()
    torch.testing.assert_close(one.matrix, two.matrix)
    torch.testing.assert_close(one.vector, two.vector)
    assert (one.matrix - decoupled.masters["matrix"]).abs().max() > 0.01


def test_momentum_adds_up_in_sgd():
    module = Toy()
    optim = Optim(module, OptimConfig(name="sgd", lr=1.0, momentum=0.5, max_grad_norm=0.0))
    start = module.vector.detach().clone()
    for _ in range(2):
        for m in optim.masters.values():
            m.grad = torch.ones_like(m)
        optim.step()
    torch.testing.assert_close(module.vector.detach(), start - 2.5)  # 1, then 1 + 0.5 * 1


class Model(Toy):
    """With an embedding and a head, which are matrices too."""

    def __init__(self):
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(6, 8), nn.Linear(8, 6)


def test_muon_steps_matrices_of_layers_as_torchs_and_leaves_the_rest_to_adamw():
    one, two = Model(), Model()
    two.load_state_dict(one.state_dict())
    optim = Optim(one, OptimConfig(name="muon", lr=0.1, weight_decay=0.2, max_grad_norm=0.0))
    matrix = torch.optim.Muon([two.matrix], lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    decayed, others = [two.embed_tokens.weight, two.lm_head.weight], [two.vector, two.lm_head.bias]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    rest = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.999))
    for seed in range(3):
        torch.manual_seed(seed)
        for p, q in zip(one.parameters(), two.parameters()):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        optim.step(), matrix.step(), rest.step()
    for p, q in zip(one.parameters(), two.parameters()):
        torch.testing.assert_close(p, q)


def test_muon_goes_on_after_a_resume_as_if_nothing_had_happened(tmp_path):
    config = OptimConfig(name="muon", lr=0.1, schedule="linear")
    one, two = Optim(Model(), config), Optim(Model(), config)
    for optim in (one, two):
        optim.plan(8)
    steps(one, 3)
    with torch.no_grad():
        for name, m in one.masters.items():
            two.masters[name].copy_(m)
    two.load(tmp_path / "o.safetensors", one.save(tmp_path / "o.safetensors"))
    steps(one, 2, first=3), steps(two, 2, first=3)
    assert all(torch.equal(one.masters[n], two.masters[n]) for n in one.masters)
    assert [g["lr"] for g in one.optimizer.param_groups] == [g["lr"] for g in two.optimizer.param_groups]


def test_muon_without_a_matrix_of_a_layer_is_refused():
    with pytest.raises(ConfigError, match=r"none is trained here; set optim\.name=adamw"):
        make_optimizer.make_optimizer({"embed_tokens.weight": nn.Parameter(torch.ones(2, 2))}, OptimConfig(name="muon"))


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_is_fused_on_a_device_that_has_the_kernel(name):
    assert Optim(Toy(), OptimConfig(name=name)).optimizer.defaults["fused"] is True
    elsewhere = make_optimizer.make_optimizer({"w": nn.Parameter(torch.ones(2, device="meta"))}, OptimConfig(name=name))
    assert elsewhere.defaults["fused"] is False


def test_an_unknown_name_names_the_nearest_and_all_known():
    known = r"Known: adam, adamw, adamw8bit, muon, sgd, package\.module:name, file\.py:name"
    with pytest.raises(ConfigError, match=rf"unknown optim\.name 'adamw8'; did you mean adamw or adamw8bit.*{known}"):
        Optim(Toy(), OptimConfig(name="adamw8"))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"name": "adamw", "momentum": 0.9}, "momentum=0.9 is for sgd and muon; adamw has betas"),
        ({"name": "sgd", "momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
    ],
)
def test_a_momentum_that_would_do_nothing_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        OptimConfig(**fields)


def test_without_torchao_the_8_bit_optimizer_names_the_extra(monkeypatch):
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("torchao"):
            raise ImportError("No module named 'torchao'")
        return plain(name, *args, **kwargs)

    for module in [m for m in sys.modules if m.startswith("torchao")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"needs torchao .*pip install .*\[quant\]'"):
        Optim(Toy(), OptimConfig(name="adamw8bit"))


# ---- state ---------------------------------------------------------------------------------------------------------


class Pair(torch.Tensor):
    """A tensor subclass in two parts, as quantised moments are: codes times a scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes, scale, dtype):
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, parts, context, outer_size=None, outer_stride=None):
        return cls(parts["codes"], parts["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


def pair():
    return Pair(torch.arange(6, dtype=torch.uint8).view(2, 3), torch.tensor([0.5]), torch.float32)


def test_a_state_of_plain_values_and_tensors_comes_back_as_it_was():
    state = {0: {"step": torch.tensor(3.0), "m": torch.randn(2, 2).t()}, 11: {"n": 4, "m": None}}
    tensors, plain, wrapped = flatten_state(state)
    assert wrapped == {} and plain == {"11.n": 4, "11.m": None} and tensors["0.m"].is_contiguous()
    back = unflatten_state(tensors, plain, wrapped, ["0", "11"])
    assert back["11"] == state[11] and all(torch.equal(back["0"][k], v) for k, v in state[0].items())


def test_a_tensor_subclass_is_saved_by_its_parts_and_made_again(monkeypatch, tmp_path):
    monkeypatch.setitem(optimizer_state.WRAPPED, "Pair", __name__)
    value = pair()
    tensors, plain, wrapped = flatten_state({2: {"m": value}})
    assert set(tensors) == {"2.m.codes", "2.m.scale"} and plain == {}
    torch.save(wrapped, tmp_path / "state.pt")
    back = unflatten_state(tensors, plain, torch.load(tmp_path / "state.pt", weights_only=True), ["2"])["2"]["m"]
    assert type(back) is Pair and back.dtype is torch.float32
    assert torch.equal(back.codes, value.codes) and torch.equal(back.scale, value.scale)


def test_an_unknown_tensor_subclass_is_refused_when_saving_and_a_planted_class_when_loading():
    with pytest.raises(CheckpointError, match=r"2.m of the optimizer's state is a .*Pair, which can't be saved"):
        flatten_state({2: {"m": pair()}})
    with pytest.raises(CheckpointError, match="the optimizer's state holds a 'system'; known: OptimState8bit"):
        unflatten_state({}, {}, {"0.m": {"kind": "system", "parts": [], "context": []}}, ["0"])


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_resumed_optimizer_goes_on_bit_for_bit(name, tmp_path):
    config = OptimConfig(name=name, lr=0.1, momentum=0.9 if name == "sgd" else 0.0, schedule="linear", total_steps=9)
    goes_on_bit_for_bit(config, tmp_path)


def goes_on_bit_for_bit(config, tmp_path):
    whole = Optim(Toy(), config)
    steps(whole, 5)
    first, module = Optim(Toy(), config), Toy()
    steps(first, 3)
    rest = first.save(tmp_path / "optimizer.safetensors")
    torch.save(rest, tmp_path / "state.pt")
    with torch.no_grad():
        for p, m in zip(module.parameters(), first.masters.values()):
            p.copy_(m)
    second = Optim(module, config)
    second.load(tmp_path / "optimizer.safetensors", torch.load(tmp_path / "state.pt", weights_only=True))
    steps(second, 2, first=3)
    for n, w in weights(whole).items():
        assert torch.equal(w, weights(second)[n]), n
    a, b = whole.optimizer.param_groups, second.optimizer.param_groups
    assert [float(g["lr"]) for g in a] == [float(g["lr"]) for g in b]


# ---- torchao -------------------------------------------------------------------------------------------------------


@pytest.fixture
def torchao():
    """The package, its steps uncompiled: compiling takes half a minute and decides nothing that is tested here."""
    pytest.importorskip("torchao", reason="needs the extra quant")
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def test_8_bit_moments_take_a_quarter_and_steps_stay_near_those_of_fp32(torchao):
    eight, full = (Optim(Toy(), OptimConfig(name=n, lr=1e-2)) for n in ("adamw8bit", "adamw"))
    start = weights(full)
    for optim in (eight, full):
        steps(optim, 20)
    moved = (full.masters["matrix"] - start["matrix"]).norm()
    apart = (eight.masters["matrix"] - full.masters["matrix"]).norm()
    assert 0 < apart < 0.1 * moved
    torch.testing.assert_close(eight.masters["vector"], full.masters["vector"], atol=1e-5, rtol=1e-5)  # not quantised
    tensors, _, _ = flatten_state(eight.optimizer.state_dict()["state"])
    held = sum(t.numel() * t.element_size() for n, t in tensors.items() if n.startswith("0.exp"))
    assert held < 0.4 * 2 * 4 * 64 * 64


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_8_bit_state_resumes_bit_for_bit(torchao, schedule, tmp_path):
    goes_on_bit_for_bit(OptimConfig(name="adamw8bit", lr=0.03, schedule=schedule, total_steps=9), tmp_path)


def test_8_bit_moments_step_fp32_masters_of_a_bf16_module(torchao):
    module = Toy()
    optim = Optim(module, OptimConfig(name="adamw8bit", lr=1e-5), dtype=torch.bfloat16)
    start = optim.masters["matrix"].detach().clone()
    steps(optim, 3)
    moved = optim.masters["matrix"] - start
    assert optim.masters["matrix"].dtype is torch.float32 and 0 < moved.abs().max() < 1e-4
    assert torch.equal(module.matrix, optim.masters["matrix"].bfloat16())


def test_a_changed_rate_holds_after_an_8_bit_resume(torchao, tmp_path):
    first = Optim(Toy(), OptimConfig(name="adamw8bit", lr=0.1))
    steps(first, 2)
    rest = first.save(tmp_path / "o.safetensors")
    second = Optim(Toy(), OptimConfig(name="adamw8bit", lr=0.02))
    second.load(tmp_path / "o.safetensors", rest)
    steps(second, 1)
    assert float(second.optimizer.param_groups[0]["lr"]) == pytest.approx(0.02)

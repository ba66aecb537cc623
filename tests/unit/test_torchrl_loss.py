"""whet.torchrl's losses without TorchRL: modules that yield logprobs, keys, options, errors, the formulas of 2025."""

import ast
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical

import whet.torchrl
from whet.errors import ConfigError, DataError
from whet.torchrl import DAPO, CISPOLoss, GRPOLoss

B, T, V = 3, 5, 6
LOSSES = ("loss_objective", "loss_entropy", "loss_kl_to_ref", "loss_kl_to_inference")


class Policy(torch.nn.Module):
    """A table of logits, which yields logprobs in the form asked for."""

    def __init__(self, form="pair"):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.logits = torch.nn.Parameter(torch.randn(B, T, V, generator=g, dtype=torch.float64))
        self.form = form

    def forward(self, data):
        logp = self.logits.log_softmax(-1)
        chosen = logp.gather(-1, data["tokens", "full"].clamp(min=0)[..., None]).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        if self.form == "tensordict":
            return TensorDict({"log_probs": {"full": chosen}, "entropy": entropy}, [B])
        return {"pair": (chosen, entropy), "alone": chosen, "nothing": data, "text": "?"}[self.form]


class Distributions(Policy):
    """The same, by get_dist: a Categorical, which has no mask."""

    def get_dist(self, data):
        return Categorical(logits=self.logits)


def batch(**more):
    g = torch.Generator().manual_seed(1)
    number = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    tokens = torch.randint(0, V, (B, T), generator=g)
    tokens[0, :2] = -100
    near = lambda: -1.7 + 0.4 * number(B, T)
    return TensorDict(
        {
            "tokens": {"full": tokens},
            "log_probs": {"full": near()},
            "advantage": number(B, 1, 1),
            "next": {"ref_log_probs": {"full": near()}},
            **more,
        },
        [B],
    )


def loss_and_gradient(out, policy):
    (grad,) = torch.autograd.grad(out.loss.sum(), policy.logits)
    return {k: v.detach() for k, v in out.items() if v is not None}, grad


@pytest.mark.parametrize("policy", [Policy("pair"), Policy("tensordict"), Distributions()], ids=["pair", "td", "dist"])
def test_any_module_that_yields_logprobs(policy):
    reference = Policy()
    want, slope = loss_and_gradient(GRPOLoss(reference, kl_to_ref_coeff=0.1)(batch()), reference)
    found, grad = loss_and_gradient(GRPOLoss(policy, kl_to_ref_coeff=0.1)(batch()), policy)
    assert set(found) == set(want) and len(found) == 8
    for name in want:
        torch.testing.assert_close(found[name], want[name], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grad, slope)
    assert (grad[0, :2] == 0).all() and (grad[0, 2:] != 0).any(-1).all()  # padding is not trained


def test_modules_of_tensordict_s_with_and_without_a_distribution():
    policy, tokens = Policy(), ("tokens", "full")
    pair = TensorDictModule(
        lambda ids: policy({tokens: ids}), in_keys=[tokens], out_keys=[("log_probs", "full"), "entropy"]
    )
    logits = TensorDictModule(lambda ids: policy.logits, in_keys=[tokens], out_keys=["logits"])
    draw = ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["drawn"], distribution_class=Categorical)
    want = GRPOLoss(policy)(batch()).loss.item()
    for actor in (pair, ProbabilisticTensorDictSequential(logits, draw)):
        assert GRPOLoss(actor)(batch()).loss.item() == pytest.approx(want, rel=1e-9)


class Drawn(Policy):
    """Its distribution can be drawn from and has no formula for its entropy."""

    def get_dist(self, data):
        known = Categorical(logits=self.logits)
        return SimpleNamespace(log_prob=known.log_prob, sample=known.sample, entropy=self.entropy)

    def entropy(self):
        raise NotImplementedError


def test_an_entropy_without_a_formula_is_estimated_by_draws():
    torch.manual_seed(0)
    found, true = GRPOLoss(Drawn(), samples_mc_entropy=500)(batch()), GRPOLoss(Policy())(batch())
    assert found.entropy.item() == pytest.approx(true.entropy.item(), rel=0.05)
    assert found.entropy != true.entropy and found.loss_entropy.requires_grad


def test_the_fields_that_begin_with_loss_are_the_loss():
    out = GRPOLoss(Policy(), kl_to_ref_coeff=0.2, kl_to_inference_coeff=0.1)(batch())
    total = sum(getattr(out, name) for name in LOSSES)
    assert [x.item() for x in (out.loss, out.mean(reduce=True), out.sum(reduce=True))] == pytest.approx(
        [total.item()] * 3
    )
    assert len(list(out.keys())) == 10
    logged = [out.clip_fraction, out.kl_approx, out.ESS, out.entropy, out.kl_to_ref, out.kl_to_inference]
    assert not any(v.requires_grad for v in logged)
    assert set(GRPOLoss(Policy(), kl_to_ref_coeff=0.2, kl_to_inference_coeff=0.1).out_keys) == set(out.keys())


@pytest.mark.parametrize(
    ("more", "strategy", "trained"),
    [
        ({}, "sft", [[2, 3, 4], [0, 1, 2, 3, 4]]),
        ({("tokens", "prompt"): torch.zeros(B, 3).long()}, "sft", [[3, 4], [3, 4]]),
        ({("masks", "all_attention_mask"): torch.tensor([[1, 1, 1, 1, 0]] * B)}, "sft", [[2, 3], [0, 1, 2, 3]]),
        ({("masks", "all_attention_mask"): torch.tensor([[0, 1, 1, 1, 0]] * B)}, "generic", [[1, 2, 3], [1, 2, 3]]),
        ({("masks", "all_assistant_mask"): torch.tensor([[0, 0, 1, 0, 1]] * B)}, "rlhf", [[2, 4], [2, 4]]),
    ],
)
def test_what_is_trained_where_no_distribution_says_it(more, strategy, trained):
    data = batch()
    for key, value in more.items():
        data[key] = value
    policy = Policy()
    _, grad = loss_and_gradient(GRPOLoss(policy, masking_strategy=strategy, aggregation="none")(data), policy)
    rows = [(grad[b] != 0).any(-1).nonzero().flatten().tolist() for b in (0, 1)]
    assert rows == trained


def test_a_batch_of_which_nothing_is_trained_is_told_of(caplog):
    data = batch()
    data["log_probs", "full"].fill_(float("nan"))
    data["advantage"].fill_(float("nan"))  # which nothing reads
    assert GRPOLoss(Policy())(data).loss == 0
    assert "no token of the batch is trained, so the loss is 0" in caplog.text


def test_keys_are_named_as_the_user_likes():
    data, policy = batch(), Policy()
    want = GRPOLoss(policy, kl_to_ref_coeff=0.1)(data)
    own = {"tokens": data["tokens"], "adv": data["advantage"], "old": data["log_probs", "full"]}
    ref = data["next", "ref_log_probs", "full"][..., None]
    own = TensorDict({**own, "ref": ref, "m": data["tokens", "full"] >= 0}, [B])
    loss = GRPOLoss(policy, kl_to_ref_coeff=0.1)
    loss.set_keys(advantage="adv", sample_log_prob="old", ref_log_probs="ref", mask="m")
    found = loss(own)
    assert found.loss == want.loss and found.ESS == want.ESS
    assert loss.in_keys == ["adv", ("tokens", "full"), "old", "ref", "m"] and loss.tensor_keys.advantage == "adv"
    loss.set_keys(advantage=None)
    assert loss.tensor_keys.advantage == "advantage"
    with pytest.raises(ConfigError, match="unknown key 'advantages'; did you mean advantage"):
        loss.set_keys(advantages="x")


@pytest.mark.parametrize("shape", [(B,), (B, 1), (B, T), (B, 1, 1), (B, T, 1)])
def test_advantages_of_rows_and_of_tokens(shape):
    data, policy = batch(), Policy()
    of_rows = data["advantage"].reshape(B)
    wide = of_rows[:, None].expand(B, T) if T in shape else of_rows
    want = GRPOLoss(policy)(data).loss_objective
    data["advantage"] = wide.reshape(shape)
    assert GRPOLoss(policy)(data).loss_objective == want
    data["advantage"] = torch.zeros(B, 2, 1)
    with pytest.raises(DataError, match=r"shape \[3, 2, 1\] for tokens \[3, 5\]"):
        GRPOLoss(policy)(data)


def test_the_clip_range_can_be_moved_by_a_schedule():
    loss, wide = GRPOLoss(Policy(), clip_epsilon=0.01), GRPOLoss(Policy(), clip_epsilon=(0.5, 9.0))
    before = loss(batch())
    loss.clip_epsilon_low, loss.clip_epsilon_high = 0.5, 9.0
    after = loss(batch())
    assert before.clip_fraction > after.clip_fraction and after.loss == wide(batch()).loss
    assert {"clip_epsilon_low", "clip_epsilon_high", "actor_network.logits"} == set(loss.state_dict())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"entropy_bonuz": True}, "unknown option of the loss 'entropy_bonuz'; did you mean entropy_bonus"),
        ({"gamma": 0.99}, "gamma=0.99: the loss has no critic"),
        ({"clip_value": True}, "clip_value=True: the loss has no critic"),
        ({"aggregation": "token-mean"}, "unknown aggregation 'token-mean'; did you mean token_mean"),
        ({"reduction": "avg"}, "unknown reduction 'avg'"),
        ({"masking_strategy": "sfl"}, "unknown masking_strategy 'sfl'; did you mean sft"),
        ({"clip_epsilon": (0.1, 0.2, 0.3)}, "clip_epsilon"),
        ({"clip_epsilon": 1.0}, "clip_epsilon 1.0 must be .* less than 1"),
        ({"clip_epsilon": (1.5, 0.2)}, "low at least 0 and less than 1"),
        ({"entropy_coeff": {"head": 0.1}}, "entropy_coeff .* must be a number"),
        ({"kl_to_ref_coeff": -1.0}, "kl_to_ref_coeff -1.0"),
        ({"kl_mask_threshold": 0}, "must be positive; None keeps all tokens"),
        ({"compat": "0.10"}, "compat= '0.10'"),
        ({"compat": "0.9", "aggregation": "none"}, "aggregation is not an option of compat='0.9'"),
    ],
)
def test_options_that_can_not_be_followed_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        GRPOLoss(None, **options)


def test_gamma_and_clip_value_may_be_left_at_none():
    assert GRPOLoss(None, gamma=None, clip_value=None).entropy_bonus


@pytest.mark.parametrize(
    ("spoil", "kind", "says"),
    [
        (lambda d: d.pop("advantage"), KeyError, "the loss reads 'advantage', which is not in the data"),
        (lambda d: d.pop("log_probs"), KeyError, "return_log_probs=True"),
        (lambda d: d.pop("next"), KeyError, "ref_log_probs"),
        (lambda d: d["log_probs", "full"].requires_grad_(), RuntimeError, "has a gradient"),
        (
            lambda d: d.set(("log_probs", "full"), torch.zeros(B, 3)),
            ValueError,
            r"\[3, 5\], those recorded .* \[3, 3\]",
        ),
        (lambda d: d.set(("next", "ref_log_probs", "full"), torch.zeros(B, 3)), ValueError, "of the same tokens"),
        (
            lambda d: d["advantage"][0].fill_(float("nan")),
            ValueError,
            "trained tokens have an advantage .* every weight",
        ),
    ],
)
def test_data_that_do_not_fit_are_named(spoil, kind, says):
    data = batch()
    spoil(data)
    with pytest.raises(kind, match=says) as found:
        GRPOLoss(Policy(), kl_to_ref_coeff=0.1)(data)
    assert isinstance(found.value, DataError)


@pytest.mark.parametrize(
    ("actor", "says"),
    [
        (None, "actor_network is NoneType"),
        (Policy("alone"), "entropy_bonus=False"),
        (Policy("nothing"), "actor_network wrote no"),
        (Policy("text"), "returned a str"),
    ],
)
def test_an_actor_that_yields_no_logprobs_or_entropies(actor, says):
    with pytest.raises((ConfigError, DataError), match=says):
        GRPOLoss(actor)(batch())


def test_logprobs_alone_do_without_the_entropy_bonus():
    out = GRPOLoss(Policy("alone"), entropy_bonus=False)(batch())
    assert out.entropy is None and out.loss == out.loss_objective


def test_dapo_and_cispo_name_their_outputs():
    for kind, name in ((GRPOLoss, "GRPOLossOutput"), (DAPO, "DAPOLossOutput"), (CISPOLoss, "CISPOLossOutput")):
        out = kind(Policy())(batch())
        assert type(out).__name__ == name and out.loss.requires_grad
    assert float(DAPO(None).clip_epsilon_high) == pytest.approx(0.28)


# ---- the version of 2025 -------------------------------------------------------------------------------------------


def of_2025(policy, data, reduction):
    """Its fields, as written down in words: loops over all places."""
    new = policy(data)[0]
    old, ref, entropy = data["log_probs"], data["next", "ref_log_prob"], policy(data)[1]
    lw = torch.zeros_like(new)
    objective, clipped = torch.zeros_like(new), torch.zeros_like(new)
    kl_ref, kl_old = [], []
    for b in range(B):
        for t in range(T):
            objective[b, t] = -data["advantage"][b, 0, 0]  # a ratio of 1
            if old[b, t] == 0:
                continue
            lw[b, t] = d = new[b, t] - old[b, t]
            a, r = data["advantage"][b, 0, 0], d.exp()
            objective[b, t] = -torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
            clipped[b, t] = float(not 0.8 <= r <= 1.2)
            for kept, other in ((kl_ref, ref), (kl_old, old)):
                gap = other[b, t] - new[b, t]
                kept.append(gap.expm1() - gap)
    reduce = {"mean": torch.mean, "sum": torch.sum, "none": lambda x: x}[reduction]
    ess = (2 * lw.logsumexp(0) - (2 * lw).logsumexp(0)).exp() / B
    return {
        "loss_objective": reduce(objective),
        "clip_fraction": clipped.mean(),
        "kl_approx": -lw.mean(),
        "ESS": reduce(ess),
        "entropy": entropy.mean(),
        "loss_entropy": reduce(-0.01 * entropy),
        "loss_kl_to_ref": 0.3 * torch.stack(kl_ref).mean(),
        "kl_to_ref": torch.stack(kl_ref).mean(),
        "loss_kl_to_inference": 0.1 * torch.stack(kl_old).mean(),
        "kl_to_inference": torch.stack(kl_old).mean(),
    }


def test_the_data_of_2025_may_have_flat_tensors_beside_those_that_are_read():
    old = batch()
    tokens = old["tokens", "full"]
    data = TensorDict({"tokens": tokens, "tokens_response": tokens, "masks": torch.ones(B),
                       "log_probs": old["log_probs", "full"], "advantage": old["advantage"]}, [B])  # fmt: skip
    policy = Policy()
    policy.forward = lambda data: Policy.forward(policy, old)
    nested = data.exclude("tokens", "masks").set("tokens", old["tokens"])
    found, want = (GRPOLoss(policy, compat="0.9")(d) for d in (data, nested))
    assert found.loss == want.loss and found.ESS == want.ESS


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_formulas_of_2025(reduction):
    old = batch()
    sampled = old["log_probs", "full"].clone()
    sampled[1, 3:], sampled[2, 0] = 0.0, 0.0
    data = TensorDict({"tokens": old["tokens"], "tokens_response": old["tokens", "full"], "log_probs": sampled,
                       "advantage": old["advantage"],
                       "next": {"ref_log_prob": old["next", "ref_log_probs", "full"]}}, [B])  # fmt: skip
    policy = Policy()
    loss = GRPOLoss(policy, compat="0.9", reduction=reduction, kl_to_ref_coeff=0.3, kl_to_inference_coeff=0.1)
    assert loss.in_keys == ["advantage", "tokens_response", "log_probs", ("next", "ref_log_prob")]
    found, grad = loss_and_gradient(loss(data), policy)
    want = of_2025(policy, data, reduction)
    (slope,) = torch.autograd.grad(sum(want[n].sum() for n in LOSSES[:2]), policy.logits, retain_graph=True)
    kls = sum(want[n] for n in LOSSES[2:]) * (B * T if reduction == "none" else 1)  # out.loss has them at every place
    slope = slope + torch.autograd.grad(kls, policy.logits)[0]
    assert set(found) == set(want)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-6, atol=1e-12, msg=name)
    torch.testing.assert_close(grad, slope, rtol=1e-6, atol=1e-12)


# ---- the package ---------------------------------------------------------------------------------------------------


def test_nothing_is_imported_from_torchrl():
    files = list((Path(whet.torchrl.__file__).parent).glob("*.py"))
    found = {
        name
        for f in files
        for node in ast.walk(ast.parse(f.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    assert len(files) > 5 and "tensordict" in found
    assert [name for name in found if name.split(".")[0] == "torchrl"] == []


def test_without_tensordict_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[torchrl\]'"):
        importlib.reload(whet.torchrl)

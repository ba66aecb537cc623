"""whet.torchrl against the installed TorchRL: equal where that is right, both numbers where it is not."""

import inspect
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_model

llm = pytest.importorskip("torchrl.objectives.llm")

from tensordict import LazyStackedTensorDict, TensorDict  # noqa: E402
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement  # noqa: E402
from torchrl.envs.transforms import Transform  # noqa: E402
from torchrl.modules.distributions import LLMMaskedCategorical  # noqa: E402
from torchrl.modules.llm import TransformersWrapper  # noqa: E402
from torchrl.modules.llm.policies import Tokens  # noqa: E402

import whet.torchrl  # noqa: E402
from tools.docs.from_torchrl import OWN, REQUIRED, TORCHRL  # noqa: E402
from whet.data.tokenizer import byte_tokenizer  # noqa: E402
from whet.torchrl import DAPO, CISPOLoss, GRPOLoss, MCAdvantage, MCAdvantageSelector  # noqa: E402

ROWS, WIDTH, VOCAB = 4, 7, 5
PEERS = {GRPOLoss: llm.GRPOLoss, DAPO: llm.DAPO, CISPOLoss: llm.CISPOLoss}


class Actor(torch.nn.Module):
    """A table of logits with the methods that TorchRL's wrappers have."""

    def __init__(self, seed, mask):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.logits = torch.nn.Parameter(torch.randn(ROWS, WIDTH, VOCAB, generator=g, dtype=torch.float64))
        self.mask = mask

    def get_dist(self, data, **_):
        return LLMMaskedCategorical(logits=self.logits, mask=self.mask)

    _get_sft_dist = _get_rlhf_dist = _get_generic_dist = get_dist


def case(seed, *, whole=False):
    """An actor and its data; `whole`: every place is trained, so that TorchRL's means over all places are right."""
    g = torch.Generator().manual_seed(100 + seed)
    start = torch.zeros(ROWS, 1) if whole else torch.randint(1, WIDTH - 1, (ROWS, 1), generator=g)
    actor = Actor(seed, torch.arange(WIDTH) >= start)
    action = torch.randint(0, VOCAB, (ROWS, WIDTH), generator=g)
    true = actor.logits.detach().log_softmax(-1).gather(-1, action[..., None]).squeeze(-1)
    near = lambda: true + 0.3 * torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)
    data = TensorDict(
        {
            "advantage": torch.randn(ROWS, 1, 1, generator=g, dtype=torch.float64),
            ("tokens", "full"): action,
            ("log_probs", "full"): near(),
            ("next", "ref_log_probs", "full"): near(),
        },
        [ROWS],
    )
    return SimpleNamespace(actor=actor, data=data, mask=actor.mask, share=actor.mask.double().mean().item())


def both(cls, p, **options):
    """(fields, gradient of the sum of the loss fields) of whet and of TorchRL, floats in float64."""
    found = []
    for kind in (cls, PEERS[cls]):
        out = kind(p.actor, **options).double()(p.data)
        fields = {k: v for k, v in out.items() if v is not None}
        loss = sum(v.sum() for k, v in fields.items() if k.startswith("loss_"))
        (grad,) = torch.autograd.grad(loss, p.actor.logits)
        found.append(({k: v.detach() for k, v in fields.items()}, grad))
    return found


def equal(a, b, names):
    for name in names:
        torch.testing.assert_close(a[name].reshape(-1), b[name].reshape(-1), rtol=1e-6, atol=1e-12, msg=name)


OPTIONS = [
    {},
    {"clip_epsilon": (0.1, 0.3), "aggregation": "prompt_mean"},
    {"aggregation": "none", "entropy_coeff": 0.3},
    {"reduction": "none", "masking_strategy": "rlhf"},
    {"masking_strategy": "generic"},  # the first token of a row was recorded
    {"kl_mask_threshold": 0.05, "entropy_coeff": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_objective_entropy_bonus_ess_and_gradient_are_torchrl_s(options):
    p = case(1)
    (ours, grad), (theirs, there) = both(GRPOLoss, p, **options)
    equal(ours, theirs, ["loss_objective", "loss_entropy", "ESS"])
    torch.testing.assert_close(grad, there, rtol=1e-6, atol=1e-12)
    assert 0 < ours["clip_fraction"] < 1 and set(ours) == set(theirs)


def test_a_loss_of_one_s_own_is_written_as_for_torchrl():
    def of(base):
        class Weighted(base):
            def _compute_policy_objective(self, log_weight, advantage):
                low, high = self._clip_bounds
                return -log_weight.clamp(low, high).exp() * advantage, (log_weight > high).double().mean()

        return Weighted

    p = case(1)
    found = [of(base)(p.actor, entropy_bonus=False).double()(p.data) for base in (GRPOLoss, llm.GRPOLoss)]
    grads = [torch.autograd.grad(out.loss_objective, p.actor.logits)[0] for out in found]
    assert found[0].loss_objective.item() == pytest.approx(found[1].loss_objective.item(), rel=1e-6)
    assert found[0].clip_fraction == found[1].clip_fraction
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-12)


def test_a_row_without_a_trained_token_counts_in_the_mean_over_rows():
    p = case(2)
    p.actor.mask[1] = False
    p.data["log_probs", "full"][2, -1] = torch.nan  # not recorded: not trained
    (ours, grad), (theirs, there) = both(GRPOLoss, p, aggregation="prompt_mean")
    equal(ours, theirs, ["loss_objective", "loss_entropy", "ESS"])
    torch.testing.assert_close(grad, there, rtol=1e-6, atol=1e-12)
    assert (grad[1] == 0).all() and (grad[2, -1] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_where_every_token_is_trained_all_fields_are_equal(seed):
    (ours, grad), (theirs, there) = both(
        GRPOLoss, case(seed, whole=True), kl_to_ref_coeff=0.3, kl_to_inference_coeff=0.1
    )
    assert list(ours) == list(theirs) or set(ours) == set(theirs)
    assert len(ours) == 10
    equal(ours, theirs, ours)
    torch.testing.assert_close(grad, there, rtol=1e-6, atol=1e-12)


def test_prompt_and_padding_dilute_the_other_fields_there_and_not_here():
    p = case(2)
    (ours, _), (theirs, _) = both(GRPOLoss, p, kl_to_ref_coeff=0.3, kl_to_inference_coeff=0.1)
    assert p.share < 0.7
    for name in (
        "clip_fraction",
        "kl_approx",
        "kl_to_ref",
        "loss_kl_to_ref",
        "kl_to_inference",
        "loss_kl_to_inference",
    ):
        assert theirs[name].item() == pytest.approx(p.share * ours[name].item(), rel=1e-6), name
    h = p.actor.get_dist(None).logits.detach().log_softmax(-1)
    mine = -(h.exp() * h).sum(-1)[p.mask].mean().item()
    assert ours["entropy"].item() == pytest.approx(mine, rel=1e-6)
    assert theirs["entropy"].item() == pytest.approx(p.share * mine, rel=1e-6)


def test_the_recipe_s_mean_is_the_loss_here_and_a_tenth_of_it_there():
    p = case(3, whole=True)
    for options, leaves in (
        ({"entropy_bonus": False}, 4),
        ({}, 6),
        ({"kl_to_ref_coeff": 1.0, "kl_to_inference_coeff": 1.0}, 10),
    ):
        here, there = (kind(p.actor, **options).double()(p.data) for kind in (GRPOLoss, llm.GRPOLoss))
        of = lambda x: torch.autograd.grad(x, p.actor.logits)[0]
        torch.testing.assert_close(
            of(here.mean(reduce=True)), of(there.mean(reduce=True)) * leaves, rtol=1e-6, atol=1e-12
        )


def test_sum_is_a_sum_here_and_the_mean_there():
    p = case(1)
    (ours, _), (theirs, _) = both(GRPOLoss, p, reduction="sum")
    assert ours["loss_objective"].item() == pytest.approx(
        theirs["loss_objective"].item() * p.mask.sum().item(), rel=1e-6
    )


def test_nothing_trained_gives_zeros_here_and_nan_there():
    p = case(0)
    p.actor.mask = torch.zeros_like(p.mask)
    (ours, grad), (theirs, _) = both(GRPOLoss, p, kl_to_ref_coeff=0.1)
    assert theirs["ESS"].isnan() and ours["ESS"] == 1 and all(v.isfinite().all() for v in ours.values())
    assert (grad == 0).all()


def test_dapo_has_its_own_range_here():
    p = case(5, whole=True)
    logp = p.actor.logits.detach().log_softmax(-1).gather(-1, p.data["tokens", "full"][..., None]).squeeze(-1)
    p.data["log_probs", "full"] = logp - torch.tensor(1.25).log()  # a ratio of 1.25 throughout
    (ours, _), (theirs, _) = both(DAPO, p)
    assert ours["clip_fraction"] == 0 and theirs["clip_fraction"] == 1
    (ours, grad), (theirs, there) = both(DAPO, case(5), clip_epsilon=(0.2, 0.28))
    equal(ours, theirs, ["loss_objective"])
    torch.testing.assert_close(grad, there, rtol=1e-6, atol=1e-12)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    p = case(4, whole=True)
    p.data["advantage"] = torch.ones(ROWS, 1, 1, dtype=torch.float64)
    p.data["log_probs", "full"] = p.data["log_probs", "full"] - 3.0  # every ratio is far above the range
    (_, grad), (_, there) = both(CISPOLoss, p, entropy_bonus=False, clip_epsilon=0.2)
    assert (there == 0).all()
    p2 = case(4, whole=True)
    logp = torch.log_softmax(p2.actor.logits, -1).gather(-1, p.data["tokens", "full"][..., None])
    (plain,) = torch.autograd.grad(-1.2 * logp.mean(), p2.actor.logits)
    torch.testing.assert_close(grad, plain, rtol=1e-6, atol=1e-12)


def test_ragged_advantages_lie_at_the_response_here_and_at_the_left_there():
    p = case(6)
    for b in range(ROWS):
        p.actor.mask[b] = torch.arange(WIDTH) >= b  # rows of 7, 6, 5 and 4 tokens
    rows = []
    for b in range(ROWS):
        row = p.data[b].clone().exclude("advantage")
        row = row.apply(lambda x, b=b: x[b:], batch_size=[])
        rows.append(row.set("advantage", torch.arange(1.0, WIDTH - b + 1, dtype=torch.float64)[:, None]))
    ragged = LazyStackedTensorDict(*rows)
    here, there = (kind(p.actor, entropy_bonus=False).double()(ragged) for kind in (GRPOLoss, llm.GRPOLoss))
    whole = p.data.clone()
    whole["advantage"] = torch.stack(
        [torch.nn.functional.pad(r["advantage"], (0, 0, b, 0)) for b, r in enumerate(rows)]
    )
    right = llm.GRPOLoss(p.actor, entropy_bonus=False).double()(whole)
    assert here.loss_objective.item() == pytest.approx(right.loss_objective.item(), rel=1e-6)
    assert abs(there.loss_objective.item() - right.loss_objective.item()) > 0.1


# ---- MCAdvantage --------------------------------------------------------------------------------------------------


def trajectory(group, rewards):
    steps = len(rewards)
    done = torch.arange(steps) == steps - 1
    return TensorDict(
        {
            "query": [group] * steps if isinstance(group, str) else torch.full((steps,), group),
            "step": torch.arange(steps),
            "next": {"reward": torch.tensor(rewards, dtype=torch.float64)[:, None], "done": done[:, None]},
        },
        [steps],
    )


def stream(seed, groups=3, count=18, most=4):
    g = torch.Generator().manual_seed(seed)
    number = lambda most: int(torch.randint(0, most, (), generator=g))
    return [trajectory(number(groups), [float(number(3)) for _ in range(1 + number(most))]) for _ in range(count)]


GATHER = [
    {"trajectory_return": None},
    {"trajectory_return": "sum"},
    {"trajectory_return": "max"},
    {"trajectory_return": "mean", "keep_return_bounds": (0.4, 1.4)},
    {"trajectory_return": "sum", "keep_return_bounds": (1.5, 2.5), "candidate_group_size": 5},
    {"trajectory_return": "sum", "candidate_group_size": 5, "candidate_selection_min_size": 4},
]


@pytest.mark.parametrize("options", GATHER, ids=str)
def test_groups_advantages_and_counters_are_torchrl_s(options):
    here, there = MCAdvantage(3, **options), llm.MCAdvantage(3, prompt_key="query", **options)
    written = 0
    for t in stream(7, count=40):
        ours, theirs = here.inv(t.clone()), there.inv(t.clone())
        assert (ours is None) == (theirs is None)
        if ours is not None:
            written += 1
            assert (
                ours["query"].tolist() == theirs["query"].tolist() and ours["step"].tolist() == theirs["step"].tolist()
            )
            torch.testing.assert_close(ours["advantage"], theirs["advantage"], rtol=1e-6, atol=1e-7)
    assert written > 2
    stats, known = here.get_stats(), there.get_stats()
    assert {k: stats[k] for k in known} == known


@pytest.mark.parametrize("strategy", ["first", "uniform", "balanced"])
@pytest.mark.parametrize("most", [100_000, 1])
def test_the_selector_chooses_what_torchrl_s_does(strategy, most):
    g = torch.Generator().manual_seed(0)
    ours, theirs = (k(strategy, max_combinations=most) for k in (MCAdvantageSelector, llm.MCAdvantageSelector))
    for _ in range(40):
        returns = TensorDict({"return": torch.randint(0, 4, (6,), generator=g).float()}, [6])
        for bounds in (None, (0.5, 1.2), (2.0, 2.6)):
            asked = {"group_size": 3, "keep_return_bounds": bounds}
            assert ours.select(returns, **asked) == theirs.select(returns, **asked)


def test_a_single_value_has_no_advantage_here_and_nan_there():
    one = trajectory("a", [1.0])
    assert MCAdvantage(1, trajectory_return=None).inv(one.clone())["advantage"].item() == 0
    assert llm.MCAdvantage(1, prompt_key="query").inv(one.clone())["advantage"].isnan()


# ---- inside TorchRL -----------------------------------------------------------------------------------------------

PROMPTS = ["ab", "cd", "ab", "cd"]


@pytest.fixture(scope="module")
def rollout():
    """A tiny model, the actor that trains it, and what TorchRL's wrapper generated with it, rewarded."""
    model = tiny_model().eval()
    wrapper = lambda **options: TransformersWrapper(
        model, tokenizer=byte_tokenizer(), input_mode="tokens", return_log_probs=True, pad_output=True, **options
    )
    prompts = torch.tensor([list(p.encode()) for p in PROMPTS])
    data = TensorDict({"tokens": Tokens(prompt=prompts, batch_size=(4,)), "query": PROMPTS}, [4])
    torch.manual_seed(0)
    data = wrapper(generate=True, generate_kwargs={"max_new_tokens": 3, "do_sample": True, "top_k": 264})(data)
    rewards = torch.tensor([0.0, 1.0, 1.0, 3.0]).reshape(4, 1, 1)
    data["next"] = TensorDict({"reward": rewards, "done": torch.ones(4, 1, dtype=torch.bool)}, [4])
    return SimpleNamespace(model=model, actor=wrapper(generate=False), data=data)


@pytest.mark.parametrize("storage", [LazyStackStorage, LazyTensorStorage])
def test_loss_and_advantage_in_a_replay_buffer_of_torchrl_s(storage, rollout):
    transform = MCAdvantage(2)
    assert isinstance(transform, Transform)
    buffer = ReplayBuffer(storage=storage(8), sampler=SamplerWithoutReplacement(), transform=transform, batch_size=4)
    buffer.extend(rollout.data[:1].clone())
    assert len(buffer) == 0 and transform.queued_groups == 1
    buffer.extend(rollout.data[1:].clone())
    assert len(buffer) == 4 and transform.queued_groups == 0
    sample = buffer.sample()
    signs = dict(zip(sample["next", "reward"].flatten().tolist(), sample["advantage"].flatten().tolist(), strict=False))
    assert signs[0.0] == pytest.approx(-(0.5**0.5)) and signs[3.0] == pytest.approx(0.5**0.5)
    out = GRPOLoss(rollout.actor)(sample)
    assert out.ESS.item() == pytest.approx(1.0, abs=1e-6) and out.clip_fraction == 0
    out.mean(reduce=True).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in rollout.model.parameters())
    rollout.model.zero_grad()


def test_made_before_torchrl_is_imported_a_buffer_refuses_it(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torchrl.envs.transforms")
        early = MCAdvantage(2)
    assert not isinstance(early, Transform)
    with pytest.raises(RuntimeError, match="must be either a Transform instance"):
        ReplayBuffer(storage=LazyStackStorage(8), transform=early, batch_size=4).extend(trajectory("a", [1.0]))


def test_the_wrapper_s_first_logprob_and_missing_row_are_made_good_here(rollout):
    data = MCAdvantage(2).inv(rollout.data.clone())
    assert (data["log_probs"].response[:, 0] == 0).all() and data["log_probs"].full is None
    with pytest.raises(KeyError, match="log_probs"):
        llm.GRPOLoss(rollout.actor)(data)
    ours = GRPOLoss(rollout.actor)(data)
    rows = torch.nn.functional.pad(data["log_probs"].response, (2, 0), value=torch.nan)
    data["log_probs"].full = rows
    theirs = llm.GRPOLoss(rollout.actor)(data)
    assert theirs.ESS < 0.9 and theirs.clip_fraction > 0.1  # the model has not moved
    again = GRPOLoss(rollout.actor)(data)
    assert ours.ESS.item() == pytest.approx(1) and again.loss_objective == ours.loss_objective


def test_prompts_of_different_lengths_without_padding(rollout):
    wrapper = lambda **options: TransformersWrapper(
        rollout.model, tokenizer=byte_tokenizer(), input_mode="tokens", return_log_probs=True, **options
    )
    asked = [
        TensorDict({"tokens": Tokens(prompt=torch.tensor(list(p.encode())), batch_size=()), "query": p}, [])
        for p in ("ab", "cde", "ab", "cde")
    ]
    sampling = {"max_new_tokens": 3, "do_sample": True, "top_k": 264}
    data = wrapper(generate=True, pad_output=False, generate_kwargs=sampling)(LazyStackedTensorDict(*asked))
    rewards = torch.tensor([0.0, 1.0, 1.0, 3.0]).reshape(4, 1, 1)
    data["next"] = TensorDict({"reward": rewards, "done": torch.ones(4, 1, dtype=torch.bool)}, [4])
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(2), batch_size=4)
    buffer.extend(data)
    out = GRPOLoss(wrapper(generate=False, pad_output=False))(buffer.sample())
    assert out.ESS.item() == pytest.approx(1.0) and out.clip_fraction == 0 and out.loss.requires_grad


def test_the_first_token_of_a_row_has_no_distribution(rollout):
    data = rollout.data.clone()
    data["advantage"] = torch.ones(4, 1, 1)
    with torch.no_grad():
        data = rollout.actor(data)  # records the logprobs of whole rows, 0.0 for the first token
    ours, theirs = (kind(rollout.actor, masking_strategy="generic")(data) for kind in (GRPOLoss, llm.GRPOLoss))
    assert theirs.ESS < 0.95 and theirs.clip_fraction > 0.1
    assert ours.ESS.item() == pytest.approx(1) and ours.clip_fraction == 0


def test_a_transform_is_pickled_with_what_it_holds():
    transform = MCAdvantage(2)
    transform.inv(trajectory("a", [1.0]))
    again = pickle.loads(pickle.dumps(transform))
    assert isinstance(again, Transform) and again.queued_groups == 1
    assert again.inv(trajectory("a", [0.0]))["advantage"].flatten().tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


# ---- the table ----------------------------------------------------------------------------------------------------


def options_of(cls):
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return {p.name: REQUIRED if p.default is p.empty else p.default for p in parameters}


@pytest.mark.parametrize("name", ["GRPOLoss", "MCAdvantage", "MCAdvantageSelector"])
def test_the_table_has_every_option_of_torchrl_s_and_its_default(name):
    assert options_of(getattr(llm, name)) == {n: f.default for n, f in TORCHRL[name].items()}


def test_the_table_has_every_key_field_and_name():
    keys = {f.name: f.default for f in llm.GRPOLoss._AcceptedKeys.__dataclass_fields__.values()}
    known = {n: f.default for n, f in TORCHRL["GRPOLoss.set_keys"].items()}
    assert known == {n: keys[n] for n in known} and not {n for n in keys if "log_prob" in n} - known.keys()
    assert set(TORCHRL["GRPOLossOutput"]) == set(llm.GRPOLossOutput.__expected_keys__)
    assert set(TORCHRL["torchrl.objectives.llm"]) == set(llm.__all__)


def test_what_the_table_calls_the_same_is_here():
    taken = {"GRPOLoss": {*options_of(GRPOLoss)}, "GRPOLossOutput": {*whet.torchrl.GRPOLossOutput.__expected_keys__}}
    taken |= {
        "GRPOLoss.set_keys": {*vars(GRPOLoss(None).tensor_keys)},
        "torchrl.objectives.llm": {*whet.torchrl.__all__},
    }
    taken |= {"MCAdvantageSelector": {*options_of(MCAdvantageSelector)}}
    taken |= {"MCAdvantage": {*options_of(MCAdvantage), *whet.torchrl.transform._OPTIONS}}
    for title, fields in TORCHRL.items():
        here = {n for n, f in fields.items() if f.state in ("works", "differs")}
        assert here <= taken[title]
        extra = taken[title] - here - {"loss", "options", "unknown"}
        assert extra == set(OWN.get(title, ())) - {"loss"}

"""Given by hand: padded arrays of numpy, meshes, configurations, models. Right ones work, others are told."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import END, PAD, cluster, tiny_model

import whet
from whet import ClusterConfig, GRPOConfig, GRPOLearner, OptimConfig, PPOConfig, Role, RoleConfig, TrainExample
from whet.errors import ConfigError, DataError, WhetError
from whet.train.supervised_models import SupervisedModels
from whet.types import TokenBatch

PADDED = {
    "prompt_ids": np.array([[PAD, 5], [6, 7]]),
    "prompt_mask": np.array([[0, 1], [1, 1]]),
    "completion_ids": np.array([[11, END, PAD], [13, 14, 15]]),
    "completion_mask": np.array([[1, 1, 0], [1, 0, 1]]),
    "advantages": np.array([1.0, -0.5]),
}


def example(**changes):
    return TrainExample(**{**PADDED, **changes})


def told(error, make, *words, **keys):
    with pytest.raises(error) as found:
        make(*words, **keys)
    return str(found.value)


@pytest.mark.parametrize(
    "kind",
    [
        lambda x: torch.as_tensor(x),
        lambda x: x.tolist(),
        lambda x: x.astype(np.float16 if x.dtype.kind == "f" else np.int32),
        lambda x: x[:, ::-1][:, ::-1] if x.ndim == 2 else x,  # a view with negative strides
    ],
    ids=["torch", "lists", "small", "views"],
)
def test_arrays_of_any_kind_make_the_same_batch(kind):
    want = TokenBatch.from_padded(example(old_per_token_logps=-np.ones((2, 3))))
    found = TokenBatch.from_padded(
        TrainExample(**{name: kind(x) for name, x in {**PADDED, "old_per_token_logps": -np.ones((2, 3))}.items()})
    )
    for name in ("tokens", "mask", "advantages", "old_logprobs", "versions"):
        assert torch.equal(getattr(found, name).double(), getattr(want, name).double()), name
    assert torch.equal(found.prefixes, want.prefixes) and torch.equal(found.ends, want.ends)
    assert want.advantages.tolist() == [1.0, 1.0, -0.5, -0.5, -0.5]


@pytest.mark.parametrize("mask", [PADDED["completion_mask"] == 1, PADDED["completion_mask"] * 1.0])
def test_a_mask_is_of_bools_integers_or_floats(mask):
    assert TokenBatch.from_padded(example(completion_mask=mask)).mask.tolist() == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"advantages": np.ones(3)}, r"advantages has shape \[3\]; give \[B\] or \[B, C\], here \[2\] or \[2, 3\]"),
        ({"advantages": np.ones((2, 1))}, r"advantages has shape \[2, 1\]; give"),
        ({"advantages": None}, "advantages is None; give an array"),
        ({"advantages": np.array([1.0, np.nan])}, "advantages is not finite in row 1"),
        ({"returns": np.ones(2)}, r"returns has shape \[2\]; give \[B, C\], here \[2, 3\]"),
        ({"prompt_ids": np.array([5, 6])}, r"prompt_ids has shape \[2\]; give \[B, P\]"),
        ({"prompt_ids": np.array([[0.0, 5.0], [6.0, 7.0]])}, "prompt_ids is float64; token ids are integers"),
        ({"prompt_ids": [[5], [6, 7]]}, r"is no array of numbers: \[\[5\], \[6, 7\]\]; .* padded to one length"),
        ({"prompt_ids": ["ab", "cd"]}, "prompt_ids is no array of numbers"),
        ({"prompt_mask": np.ones((2, 1))}, r"\[2, 1\]; it must be that of prompt_ids, \[2, 2\]"),
        ({"completion_ids": np.array([[1, 2, 3]])}, r"prompt_ids \[2, 2\] and completion_ids \[1, 3\] differ in rows"),
        (
            {"completion_mask": np.array([[2, 1, 0], [1, 0, 1]])},
            "completion_mask holds 2; it is 1 at tokens that count",
        ),
        ({"completion_ids": np.array([[1, 2, 0], [3, -100, 5]])}, r"completion_ids\[1, 1\] is -100; ids are 0 or more"),
    ],
)
def test_arrays_that_do_not_fit_are_told(changes, said):
    with pytest.raises(DataError, match=said):
        TokenBatch.from_padded(example(**changes))


def test_padding_may_hold_anything():
    made = example(
        completion_ids=np.array([[11, END, -100], [13, 14, 15]]),
        old_per_token_logps=np.array([[-1.0, -1.0, -np.inf], [-1.0, np.nan, -1.0]]),
    )
    assert TokenBatch.from_padded(made).tokens.tolist() == [11, END, 13, 14, 15]


@pytest.fixture(scope="module")
def made():
    return cluster(actor_optimizer=OptimConfig(name="sgd", lr=0.1, max_grad_norm=0.0), rollout={"temperature": 0.9})


def test_an_update_by_hand_is_the_gradient_step_of_the_loss(made):
    """The oracle: transformers' forward of each row, -A log π meaned over the trained tokens, a step against it."""
    oracle = copy.deepcopy(tiny_model()).train()
    loss, count = torch.zeros(()), PADDED["completion_mask"].sum()
    for row in range(2):
        prompt = torch.tensor(PADDED["prompt_ids"][row][PADDED["prompt_mask"][row] == 1])
        ids = torch.tensor(PADDED["completion_ids"][row])
        logp = oracle(input_ids=torch.cat([prompt, ids])[None]).logits[0].div(0.9).log_softmax(-1)
        for place in np.flatnonzero(PADDED["completion_mask"][row]):
            loss = loss - PADDED["advantages"][row] * logp[len(prompt) + place - 1, ids[place]] / count
    loss.backward()
    want = {name: p.detach() - 0.1 * p.grad for name, p in oracle.named_parameters()}
    assert made.rollout_for().temperature == 0.9
    metrics = made.update_actor([example()])
    weights = dict(made.actor.module.named_parameters())
    norm = torch.stack([p.grad.norm() for p in oracle.parameters()]).norm()
    assert metrics["grad_norm"].value == pytest.approx(float(norm), rel=1e-4)
    for name, value in want.items():
        torch.testing.assert_close(weights[name].detach(), value, rtol=1e-4, atol=1e-6)


def test_what_is_no_list_of_batches_is_told(made):
    assert "give a list, e.g. [TrainExample(...)]" in told(DataError, made.update_actor, example())
    assert "got dict; give a list" in told(DataError, made.update_actor, PADDED)
    assert "got dict; give TrainExample(**it)" in told(DataError, made.update_actor, [PADDED])
    assert "got NoneType" in told(DataError, made.update_actor, None)
    wrong = example(completion_ids=np.array([[11, 9999, 0], [13, 14, 15]]))
    assert "token id 9999 is outside the 264 ids" in told(DataError, made.update_actor, [wrong])
    scored = np.array([[11, 9999, 0]])
    assert "token id 9999" in told(DataError, made.get_actor_per_token_logps, [[5]], scored, PAD, END)


@pytest.mark.parametrize(
    ("meshes", "said"),
    [
        ("cuda", "the meshes are 'cuda' (str), and must be a dict of Role to mesh"),
        ({Role.ACTOR: "cuda"}, "the mesh of actor is 'cuda' (str); a mesh is torch's DeviceMesh of one device"),
        ({"rollout": {"fsdp": 2}}, "the mesh of rollout is {'fsdp': 2} (dict); a mesh is torch's DeviceMesh"),
        ({Role.ACTOR: ((1, 1), ("fsdp", "tp"))}, "the mesh of actor is ((1, 1), ('fsdp', 'tp')) (tuple)"),
        ({"actr": None}, "unknown role of a mesh 'actr'; did you mean actor?"),
    ],
)
def test_what_is_no_mesh_is_told(meshes, said):
    assert said in told(ConfigError, ClusterConfig, role_to_mesh=meshes)
    assert said in told(ConfigError, SupervisedModels, actor=tiny_model(), tokenizer="byte", role_to_mesh=meshes)


def test_a_mesh_of_one_device_says_where_a_role_lies_and_one_of_two_is_refused():
    class Mesh(SimpleNamespace):
        def size(self):
            return self.devices

    meshes = {"actor": Mesh(device_type="cpu", devices=1), "critic": None}
    assert ClusterConfig(role_to_mesh=meshes).role_to_mesh.keys() == {Role.ACTOR}
    with pytest.raises(ConfigError, match="the mesh of actor has 2 devices, and one process trains on one"):
        ClusterConfig(role_to_mesh={"actor": Mesh(device_type="cpu", devices=2)})


def test_a_list_or_a_dict_in_place_of_an_object_is_told(made):
    given = {"actor": tiny_model(), "tokenizer": "byte", "cluster_config": ClusterConfig()}
    for changes, said in (
        (
            {"cluster_config": [ClusterConfig()]},
            "cluster_config is of class list, and must be of ClusterConfig; give",
        ),
        ({"cluster_config": {"rollout_engine": "hf"}}, "must be of ClusterConfig; write ClusterConfig(**it)"),
        ({"actor": ["m"]}, "a model is a list, ['m']; give a module, a folder or a hub name"),
        ({"reference": {"model": "m"}}, "a model is a dict"),
    ):
        assert said in told(WhetError, whet.RLCluster, **{**given, **changes})
    for algo, said in (
        ([GRPOConfig()], "algo_config is of class list, and must be of GRPOConfig; give the object"),
        ({"beta": 0.0}, "write GRPOConfig(**it)"),
        (PPOConfig(), "algo_config is of class PPOConfig, and must be of GRPOConfig"),
    ):
        assert said in told(ConfigError, GRPOLearner, made, algo, ["exact_match"])
    assert "must be of SFTConfig" in told(
        ConfigError, whet.SFTLearner, SupervisedModels(actor=tiny_model(), tokenizer="byte"), [RoleConfig()]
    )

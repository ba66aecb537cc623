"""Given by hand: padded arrays of numpy, meshes, configurations, models. Right ones work, others are told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers import cluster, tiny_model

import whet
from whet import ClusterConfig, GRPOConfig, GRPOLearner, OptimConfig, PPOConfig, Role, RoleConfig
from whet.errors import ConfigError, WhetError
from whet.train.supervised_models import SupervisedModels


def told(error, make, *words, **keys):
    with pytest.raises(error) as found:
        make(*words, **keys)
    return str(found.value)


@pytest.fixture(scope="module")
def made():
    return cluster(actor_optimizer=OptimConfig(name="sgd", lr=0.1, max_grad_norm=0.0), rollout={"temperature": 0.9})


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

"""Given by hand: padded arrays of numpy, configurations, models. Right ones work, others are told."""

from __future__ import annotations

import pytest
from helpers import cluster, error_message, tiny_model

import whet
from whet import ClusterConfig, GRPOConfig, GRPOLearner, OptimConfig, PPOConfig, Role, RoleConfig
from whet.errors import ConfigError, WhetError
from whet.train.supervised_models import SupervisedModels


@pytest.fixture(scope="module")
def made():
    return cluster(actor_optimizer=OptimConfig(name="sgd", lr=0.1, max_grad_norm=0.0), rollout={"temperature": 0.9})


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
        assert said in error_message(WhetError, whet.RLCluster, **{**given, **changes})
    for algo, said in (
        ([GRPOConfig()], "algo_config is of class list, and must be of GRPOConfig; give the object"),
        ({"beta": 0.0}, "write GRPOConfig(**it)"),
        (PPOConfig(), "algo_config is of class PPOConfig, and must be of GRPOConfig"),
    ):
        assert said in error_message(ConfigError, GRPOLearner, made, algo, ["exact_match"])
    assert "must be of SFTConfig" in error_message(
        ConfigError, whet.SFTLearner, SupervisedModels(actor=tiny_model(), tokenizer="byte"), [RoleConfig()]
    )


def test_models_are_loaded_on_the_device_of_the_configuration_and_an_unknown_one_is_refused():
    given = {"actor": tiny_model(), "tokenizer": "byte"}
    made = whet.RLCluster(**given, cluster_config=ClusterConfig(device="meta"))
    assert made.device(Role.ACTOR).type == "meta" and made.actor.device.type == "cpu"  # a module stays where it is
    assert SupervisedModels(**given, device="meta").device(Role.ACTOR).type == "meta"
    for make in (
        lambda: whet.RLCluster(**given, cluster_config=ClusterConfig(device="gpu")),
        lambda: SupervisedModels(**given, device="gpu"),
    ):
        with pytest.raises(ConfigError, match=r"device 'gpu' can't be used here: .*; give cpu, cuda, cuda:1"):
            make()

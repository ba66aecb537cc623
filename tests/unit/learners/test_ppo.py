from helpers import cluster, length_reward, rows, same, tiny_model, weights_of

from whet.config import DataConfig, OptimConfig, PPOConfig
from whet.learners.ppo import PPOLearner


def ppo(c=None, reward=length_reward, *, batch=4, **algo):
    """A learner of tiny models with a critic of its own; `algo` are fields of PPOConfig."""
    config = PPOConfig(**{"beta": 0.0, **algo})
    c = cluster(critic=tiny_model(2), critic_optimizer=OptimConfig(lr=3e-3)) if c is None else c
    return PPOLearner(c, config, reward, data=DataConfig(batch_size=batch, shuffle=False))


def test_it_trains_actor_and_critic():
    made = ppo()
    before = [weights_of(made.cluster.worker(role).module) for role in ("actor", "critic")]
    run = made.train(rows(8))
    after = [weights_of(made.cluster.worker(role).module) for role in ("actor", "critic")]
    assert all(not same(a, b) for a, b in zip(before, after))
    assert run.step == 2

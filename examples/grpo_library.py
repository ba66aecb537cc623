"""The task of grpo_from_scratch.py with whet's learner in place of a training loop; seconds on a laptop's CPU."""

from grpo_from_scratch import END, LEARNING_RATE, MAX_COMPLETION, PROMPTS, VOCABULARY, build_model, reward
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import whet

tokens = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(VOCABULARY)}, merges=[]))  # one per character
tokens.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=VOCABULARY[END])


def main(seed: int = 0, steps: int = 60) -> float:
    """Trains, and returns the mean reward of the last five steps; chance is about 1/10."""
    cluster = whet.RLCluster(
        actor=build_model(seed),
        tokenizer=tokenizer,
        cluster_config=whet.ClusterConfig(
            rollout_config=whet.RolloutConfig(max_tokens_to_generate=MAX_COMPLETION, temperature=1.0),
            training_config=whet.RLTrainingConfig(
                actor_optimizer=whet.OptimConfig(lr=LEARNING_RATE),
                max_steps=steps,
                seed=seed,
                pbar_description="letters",
            ),
        ),
    )
    algo = whet.GRPOConfig(num_generations=8, num_iterations=2, beta=0.0, loss_agg_mode="token-mean")
    run = whet.GRPOLearner(cluster, algo, reward_fns=reward).train([{"prompts": PROMPTS}])  # one batch, repeated
    print(
        whet.Sampler(cluster.actor.loaded, cluster.tokenizer)(PROMPTS, MAX_COMPLETION, temperature=1.0, seed=seed).text
    )
    return sum(row["reward"] for row in run.rows[-5:]) / 5


if __name__ == "__main__":
    print(f"mean reward of the last five steps: {main():.3f}")

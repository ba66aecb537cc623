"""A reward model as a reward function: what it reads, and that its scores are those of transformers' own classifier."""

import numpy as np
import pytest
import torch
from helpers import cluster, completion, prompt, rows, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from whet.config import DataConfig, GRPOConfig, Role, RoleConfig
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, RewardError
from whet.learners.grpo import GRPOLearner
from whet.models.load import load_model, save_model
from whet.rewards.manager import RewardManager
from whet.rewards.model import RewardModel
from whet.rewards.resolve import resolve_reward
from whet.types import Group


def word_tokenizer(template="{% for m in messages %} {{ m['role'] }} : {{ m['content'] }}{% endfor %}"):
    """Another vocabulary than that of bytes: a token for each character, counted from 100."""
    characters = "".join(map(chr, range(32, 127))) + "\n"
    inner = Tokenizer(models.WordLevel({c: 100 + i for i, c in enumerate(characters)} | {"?": 99}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reward model as transformers saves one, without a tokenizer."""
    where = tmp_path_factory.mktemp("models") / "my-rm"
    loaded = load_model(tiny_model(3), role="critic")
    with torch.no_grad():
        loaded.score_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    save_model(loaded, None, where)
    return where


def theirs(folder, ids):
    """The score of transformers' own classifier for a sequence of ids."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)])).logits.item()


def learner(folder, reward=None, *, tokenizer=None, data=None, **algo):
    c = cluster(reward=RoleConfig(model=str(folder), dtype="float32"), reward_tokenizer=tokenizer)
    config = GRPOConfig(num_generations=2, beta=0.0, **algo)
    return GRPOLearner(c, config, reward, data=data or DataConfig(batch_size=2, shuffle=False))


def judged(made, source, tokens):
    """What the learner's manager gives one completion of a prompt."""
    given = made.cluster.encoder(data=made.data)({"prompt": source})
    group = Group(prompt=given, completions=(completion(tokens),))
    out = made.reward_manager([group], [[made.cluster.decode(tokens)]])
    return out.table["my-rm"].item(), given.tokens.tolist()


def test_with_the_policys_vocabulary_it_reads_the_policys_ids(folder):
    made = learner(folder)
    score, before = judged(made, "2+2=", [52, 256])
    assert score == pytest.approx(theirs(folder, [*before, 52, 256]), abs=1e-4)
    score, before = judged(made, [{"role": "user", "content": "2+2="}], [52, 256])  # its template is the policy's
    assert score == pytest.approx(theirs(folder, [*before, 52, 256]), abs=1e-4)


def test_with_another_vocabulary_it_reads_the_same_words_by_its_own(folder):
    own = word_tokenizer()
    made = learner(folder, tokenizer=own)
    score, _ = judged(made, "2+2=", [52, 256])
    assert score == pytest.approx(theirs(folder, own("2+2=4").input_ids), abs=1e-4)
    score, _ = judged(made, [{"role": "user", "content": "2+2="}], [52, 256])
    assert score == pytest.approx(theirs(folder, own(" user : 2+2= assistant : 4").input_ids), abs=1e-4)


def test_texts_that_became_turns_are_turns_for_the_reward_model_too(folder):
    own = word_tokenizer()
    data = DataConfig(batch_size=2, apply_chat_template=True, system_prompt="Be brief.")
    score, _ = judged(learner(folder, tokenizer=own, data=data), "2+2=", [52, 256])
    wanted = " system : Be brief. user : 2+2= assistant : 4"
    assert score == pytest.approx(theirs(folder, own(wanted).input_ids), abs=1e-4)


def test_a_template_of_its_own_counts_for_messages_alone(folder):
    own = byte_tokenizer()
    own.chat_template = word_tokenizer().chat_template
    made = learner(folder, tokenizer=own)
    score, before = judged(made, "2+2=", [52, 256])
    assert score == pytest.approx(theirs(folder, [*before, 52, 256]), abs=1e-4)
    score, _ = judged(made, [{"role": "user", "content": "2+2="}], [52, 256])
    assert score == pytest.approx(theirs(folder, own(" user : 2+2= assistant : 4").input_ids), abs=1e-4)


def test_a_turn_that_the_policy_continued_is_one_turn(folder):
    own = word_tokenizer()
    turns = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "It is "}]
    made = learner(folder, tokenizer=own, data=DataConfig(batch_size=2, on_answered="continue"))
    score, _ = judged(made, turns, [52, 256])
    assert score == pytest.approx(theirs(folder, own(" user : 2+2= assistant : It is 4").input_ids), abs=1e-4)
    model, parts = made.cluster.reward_model(), [{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}]
    assert model._encode_chat([{"role": "user", "content": parts}], "4") == model._encode_chat(
        "2+2=", "4"
    )  # no list as Python has it


def test_messages_without_a_template_for_them_are_refused(folder):
    made = learner(folder, tokenizer=word_tokenizer(template=None))
    assert np.isfinite(judged(made, "2+2=", [52, 256])[0])
    with pytest.raises(RewardError, match="my-rm has no chat template"):
        judged(made, [{"role": "user", "content": "2+2="}], [52, 256])


def test_it_is_called_once_for_all_and_shares_the_prompts(folder, monkeypatch):
    made = learner(folder)
    worker, seen = made.cluster.worker(Role.REWARD), []
    scores = worker.scores
    monkeypatch.setattr(worker, "scores", lambda batch: (seen.append(batch), scores(batch))[1])
    groups = [
        Group(prompt=prompt("1+1="), completions=(completion([50, 256]), completion([51, 256], 1))),
        Group(prompt=prompt("2+2=", 1), completions=(completion([52, 256]), completion([53, 54, 256], 1))),
    ]
    out = made.reward_manager(groups, [["2", "3"], ["4", "56"]])
    (batch,) = seen
    assert batch.prefix_of.tolist() == [0, 0, 1, 1] and batch.num_sequences == 4
    apart = [made.reward_manager([g], [t]).total.tolist() for g, t in zip(groups, [["2", "3"], ["4", "56"]])]
    assert out.total.tolist() == pytest.approx([x for pair in apart for x in pair], abs=1e-4)


def test_a_fork_is_judged_after_its_own_prefix(folder):
    made = learner(folder)
    done = completion([52, 256], prefix=[60, 61, 62])
    out = made.reward_manager([Group(prompt=prompt("1+1="), completions=(done,))], [["4"]])
    assert out.total.item() == pytest.approx(theirs(folder, [60, 61, 62, 52, 256]), abs=1e-4)


def test_what_has_no_second_token_is_not_judged(folder):
    own = word_tokenizer()
    made = learner(folder, tokenizer=own)
    assert np.isnan(judged(made, "2", [256])[0])  # "2" and nothing: one token of its own


def test_it_is_a_column_of_the_table_and_has_no_deadline(folder):
    made = learner(folder, ["reward_model", lambda completions: [1.0] * len(completions)], reward_weights=(2.0, 0.5))
    made.reward_manager.timeout_s = 1e-9  # the function runs into it, a model would too
    model = RewardManager([made.reward_manager.fns["my-rm"]], timeout_s=1e-9)
    group = Group(prompt=prompt("1+1="), completions=(completion([50, 256]),))
    assert list(model([group], [["2"]]).table) == ["my-rm"]
    made.reward_manager.timeout_s = None
    row = made.train(rows(2)).rows[0]
    assert row["reward"] == pytest.approx(2 * row["rewards/my-rm"] + 0.5)


def test_the_reward_model_is_only_read_and_needs_a_score_head(folder):
    made = learner(folder)
    module = made.cluster.worker(Role.REWARD).module
    before = {n: p.clone() for n, p in module.named_parameters()}
    made.train(rows(2))
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in module.named_parameters())
    assert Role.REWARD not in made.cluster.trainers
    with pytest.raises(ConfigError, match="can't be the reward model: it has no score head"):
        cluster(reward=tiny_model())
    with pytest.raises(ConfigError, match=r"unknown reward function 'my/rm'; .*reward_model.model=my/rm"):
        resolve_reward("my/rm")
    assert RewardModel(made.cluster.worker(Role.REWARD), name="x", policy_tokenizer=byte_tokenizer()).same_ids

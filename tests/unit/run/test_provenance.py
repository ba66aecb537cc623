"""What a run reads, as it is noted and compared."""

import copy
import functools
import logging
from types import SimpleNamespace

import pytest
import torch
from helpers import cluster, length_reward, prompt, tiny_model
from tokenizers import normalizers
from torch import nn

from whet.config import DataConfig, GRPOConfig, Role, RoleConfig
from whet.data.tokenizer import byte_tokenizer
from whet.errors import CheckpointError
from whet.learners.grpo import GRPOLearner
from whet.learners.rl_task import RLTask
from whet.run import provenance
from whet.run.provenance import check_same_inputs, weights_digest
from whet.run.random_state import random_state, set_derived_random_state, set_random_state
from whet.util.tensor_sums import BLOCK


def reads(learner, prompts):
    """What a run of the learner notes, evaluating on prompts."""
    task = RLTask(learner)
    task._evaluated = prompts
    return task.inputs()


def module(tensor, **more):
    made = nn.Module()
    for name, t in {"a": tensor, **more}.items():
        made.register_parameter(name, nn.Parameter(t, requires_grad=False))
    return made


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 8, 8 * BLOCK + 19])  # bytes: of a word, of a second block
def test_any_byte_of_a_tensor_counts_and_so_does_its_place(size):
    data = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    digest = weights_digest(module(data))
    assert weights_digest(module(data.clone())) == digest
    seen = {digest}
    for place in {0, size // 2, size - 1}:
        other = data.clone()
        other[place] ^= 1
        seen.add(weights_digest(module(other)))
    assert len(seen) == 1 + len({0, size // 2, size - 1})
    assert weights_digest(module(data.roll(8))) not in seen or size <= 8


@pytest.mark.parametrize("size", [1, BLOCK])
def test_words_and_blocks_that_change_places_are_seen(size):
    words = torch.randint(2**60, (3 * BLOCK,))
    first, second, rest = words.split([size, size, len(words) - 2 * size])
    assert len({weights_digest(module(torch.cat(p))) for p in ((first, second, rest), (second, first, rest))}) == 2


def test_the_digest_is_of_the_numbers_not_of_how_they_lie(monkeypatch):
    data = torch.randn(5, 6)
    digest = weights_digest(module(data))
    assert weights_digest(module(data.t().contiguous().t())) == digest
    held = torch.empty(31)
    held[1:] = data.reshape(-1)
    assert weights_digest(module(held[1:].view(5, 6))) == digest  # words that begin beside their places
    long = torch.randn(5 * BLOCK)
    whole = weights_digest(module(long))
    monkeypatch.setattr(torch.Tensor, "split", lambda self, size: [self])  # as on a device that takes many at once
    assert weights_digest(module(long)) == whole


def test_names_dtypes_and_shapes_count_and_tied_weights_count_once():
    data = torch.zeros(2, 3)
    others = [data.view(3, 2), data.view(6), data.to(torch.int32), data[:, :2].contiguous()]
    assert len({weights_digest(module(t)) for t in (data, *others)}) == 5
    assert weights_digest(module(data, b=data)) == weights_digest(module(data))
    assert weights_digest(module(data, b=data.clone())) != weights_digest(module(data))
    empty = torch.zeros(0)
    assert weights_digest(module(empty, b=empty)) != weights_digest(module(empty))


def test_buffers_count_where_they_are_saved():
    digests = []
    for persistent in (True, False):
        for value in (0.0, 1.0):
            made = module(torch.zeros(2))
            made.register_buffer("b", torch.tensor(value), persistent=persistent)
            digests.append(weights_digest(made))
    assert digests[0] != digests[1] and digests[2] == digests[3]


def test_weights_that_take_long_to_read_are_said(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "whet")
    model = tiny_model()
    provenance._model("reference", model, True)
    assert not caplog.messages
    monkeypatch.setattr(provenance, "MIN_LOGGED_BYTES", 1)
    provenance._model("actor", model, False)
    assert not caplog.messages  # which is trained, so it is not read
    provenance._model("reference", model, True)
    assert "reference: hashing 0 GB of weights" in caplog.text


# ---- what is noted ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learner():
    c = cluster(tiny_model(num_hidden_layers=1), reference=tiny_model(1, num_hidden_layers=1), engine="mock")
    estimator = functools.partial(lambda rewards, groups, scale: rewards * scale, scale=2.0)
    algo = GRPOConfig(num_generations=2, advantage_estimator=estimator)
    return GRPOLearner(c, algo, [length_reward, "exact_match"], metric_fns=[_metrics], data=DataConfig(batch_size=2))


def _metrics(**_):
    return {}


def test_the_sections_of_a_run_have_the_names_of_the_configuration(learner, monkeypatch):
    judge = SimpleNamespace(config=RoleConfig(model="rm"))
    monkeypatch.setitem(learner.cluster._workers, Role.REWARD, judge)
    sections = RLTask(learner).sections()
    assert sections["reward_model"] is judge.config and "reward" not in sections


class Judge:
    """A reward that is an object."""

    def __call__(self, completions):
        return [0.0] * len(completions)


def test_only_models_that_are_read_have_their_weights_noted_and_only_the_users_code_its_file(learner):
    found = reads(learner, [prompt("a", answer=1), prompt("b")])
    assert found["models"]["actor"]["weights"] is None
    assert found["models"]["reference"]["weights"] == weights_digest(learner.cluster.workers["reference"].module)
    assert found["models"]["actor"]["config"]["num_hidden_layers"] == 1
    assert found["evaluation"][0] == 2 and reads(learner, None)["evaluation"] is None
    files = {what: file and file.rpartition("/")[2] for what, (file, _) in found["code"].items()}
    assert files == {
        "the learner GRPOLearner": None,
        "reward function length_reward": "helpers.py",
        "reward function exact_match": None,
        "metric function 0": "test_provenance.py",
        "the loss of the actor": None,
        "algo.advantage_estimator": "test_provenance.py",
    }


def test_the_source_of_objects_references_and_builtins():
    assert [provenance.function_source(fn)[0] for fn in (len, "no_such_module:name", "math:sqrt")] == [None] * 3
    wrapped = functools.wraps(_metrics)(lambda **_: {})
    wrapped.__code__ = length_reward.__code__  # written elsewhere than what it wraps
    for fn in (wrapped, Judge(), Judge, Judge().__call__, functools.partial(_metrics)):
        assert provenance.function_source(fn)[0] == __file__, fn
    made = {}
    exec("def f(): pass", made)
    assert provenance.function_source(made["f"]) == [None, None]


# ---- what is compared ------------------------------------------------------------------------------------------------


def test_the_same_is_taken_in_silence(learner, caplog):
    now = reads(learner, [prompt("a")])
    check_same_inputs(copy.deepcopy(now), now, allow=False)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r["models"]["reference"].update(weights="ab"), "reference: other weights: ab -> "),
        (lambda r: r["models"]["actor"]["config"].update(rms_norm_eps=1), r"actor: config\.rms_norm_eps: 1 -> 1e-06"),
        (lambda r: r.update(stop_ids=[7]), r"end a completion.*\[7\] -> \[256\]"),
        (lambda r: r["tokenizer"].update(vocabulary="x"), "tokenizer: other vocabulary"),
        (lambda r: r["tokenizer"].update(chat_template="x"), "tokenizer: other chat_template"),
        (lambda r: r["tokenizer"].update(rules="x"), "tokenizer: other rules"),
        (lambda r: r.update(evaluation=None), "evaluation data: none -> 1 prompts"),
        (lambda r: r["evaluation"].__setitem__(1, 0), "some were changed or reordered"),
        (lambda r: r["evaluation"].__setitem__(2, 0), "another column"),
        (lambda r: r.pop("models"), "the entry 'models' of the checkpoint's run.pt has an unexpected format"),
        (
            lambda r: r["models"].update(actor=3),
            "the entry 'actor' of the checkpoint's run.pt has an unexpected format",
        ),
    ],
)
def test_a_difference_is_refused_by_name_and_can_be_allowed(learner, change, said, caplog):
    now = reads(learner, [prompt("a")])
    old = copy.deepcopy(now)
    change(old)
    with pytest.raises(CheckpointError, match=said):
        check_same_inputs(old, now, allow=False)
    if "unexpected format" not in said:
        check_same_inputs(old, now, allow=True)
        assert "models, tokenizer or evaluation data differ from the checkpoint's; continuing" in caplog.text


def test_what_cannot_be_compared_is_no_difference(learner, caplog):
    now = reads(learner, None)
    old = copy.deepcopy(now)
    old["tokenizer"] |= {"rules": "x", "versions": ["4", "0"]}  # which spelled them otherwise
    old["models"]["actor"]["config"] |= {"gone": 1}
    del old["models"]["actor"]["config"]["rms_norm_eps"]  # which that version did not know
    old["models"]["critic"] = {}
    check_same_inputs(old, now, allow=False)
    assert not caplog.messages
    old["models"]["reference"] |= {"weights": "ab", "dtype": "torch.bfloat16"}
    check_same_inputs(old, now, allow=False)
    assert "reference: weights are not compared: they are torch.float32, not torch.bfloat16" in caplog.text
    del old["models"]["reference"]
    check_same_inputs(old, now, allow=False)


def test_code_that_changed_is_said_once_for_each_file(learner, caplog):
    now = reads(learner, None)
    old = copy.deepcopy(now)
    for what in ("metric function 0", "algo.advantage_estimator"):
        old["code"][what][1] = "other"
    old["code"]["reward function gone"] = old["code"].pop("reward function length_reward")
    check_same_inputs(old, now, allow=False)
    said = [m.partition(";")[0] for m in caplog.messages]
    assert said[1:] == [
        f"{__file__} has changed since the checkpoint: metric function 0, algo.advantage_estimator",
        "reward function gone of the checkpoint is gone",
    ]
    assert said[0].startswith("reward function length_reward (") and said[0].endswith("is new since the checkpoint")


# ---- generators ------------------------------------------------------------------------------------------------------


def test_generators_go_on_where_they_were_and_refuse_what_is_no_state():
    import random

    import numpy as np

    draw = lambda: (random.random(), float(np.random.random()), float(torch.rand(())))
    state = random_state()
    drawn = draw()
    set_random_state(state)
    assert draw() == drawn
    kind, keys, _, *rest = state["numpy"]
    wrong = [(kind, keys, 625), (kind, keys, -1), (kind, keys[:9], 3), ("PCG64", keys, 3)]
    for numpy in ((*w, *rest) for w in wrong):
        with pytest.raises(CheckpointError, match="no valid state of the random generators"):
            set_random_state({**state, "numpy": numpy})


def test_other_ranks_get_generators_of_their_own_from_the_state_of_rank_0():
    import random

    import numpy as np

    draw = lambda: (random.random(), float(np.random.random()), float(torch.rand(())))
    state, drawn = random_state(), []
    try:
        for rank in (1, 2, 1):
            set_derived_random_state(state, rank)
            drawn.append(draw())
    finally:
        set_random_state(state)
    first, second, again = drawn
    assert first == again
    assert len({*first, *second, *draw()}) == 9


def changed(how):
    tokenizer = byte_tokenizer()
    how(tokenizer)
    now, other = provenance._tokenizer(byte_tokenizer()), provenance._tokenizer(tokenizer)
    return {name for name in now if now[name] != other[name]}


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        (lambda t: setattr(t, "eos_token", t.convert_ids_to_tokens(97)), {"vocabulary"}),  # which id ends a text
        (lambda t: setattr(t, "chat_template", "{{ messages }}"), {"chat_template"}),
        (lambda t: setattr(t.backend_tokenizer, "normalizer", normalizers.Lowercase()), {"rules"}),
        (lambda t: t("long", truncation=True, max_length=2, padding="max_length"), set()),  # what an encoding did
        (lambda t: None, set()),
    ],
    ids=["special", "template", "rules", "encoded", "same"],
)
def test_each_part_of_a_tokenizer_that_changes_is_in_the_record(how, parts):
    assert changed(how) == parts


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("actor.gradient_checkpointing", False, True),
        ("critic.gradient_checkpointing", False, True),
        ("reference.gradient_checkpointing", False, True),
        ("offload_to_cpu", False, True),
        ("trainer.max_steps", 5, 9),
        ("trainer.num_epochs", 1, 2),
        ("trainer.resume", None, "latest"),
        ("trainer.run_dir", "a", "b"),
        ("trainer.loggers", [], ["wandb"]),
        ("trainer.checkpointing_options", None, {"max_to_keep": 2}),
        ("trainer.pbar_description", None, "x"),
    ],
)
def test_what_changes_no_step_may_change_in_a_resume(key, old, new):
    def tree(value):
        for part in reversed(key.split(".")):
            value = {part: value}
        return value

    assert provenance.changed_settings(tree(old), tree(new)) == []

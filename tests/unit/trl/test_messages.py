"""What the layers below say reaches a user of whet.trl in TRL's words."""

import logging
import re

import pytest
from helpers import length_reward, rows, tiny_model
from transformers import TrainerCallback

from whet.data.tokenizer import byte_tokenizer
from whet.errors import WhetError
from whet.learners.symptoms import symptoms
from whet.run.signals import Stopped
from whet.train.role_trainer import lower_lr_advice
from whet.trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from whet.trl.trainer.messages import VOCABULARY

SMALL = {"bf16": False, "disable_tqdm": True, "gradient_checkpointing": False, "logging_steps": 1, "max_steps": 2,
         "per_device_train_batch_size": 2, "save_strategy": "no"}  # fmt: skip
FOREIGN = re.compile(
    r"\b(rollout|trainer|data|optim|algo)\.\w+(?<!trainer\.train)|run_dir|on_long_prompt|max_tokens_to_generate|on_empty"
    r"|step-\*|resume=|checkpoint_root|\w+_column\b|training configuration"
)
"""Names of whet's own."""


ANSWERED = [{"prompt": "1", "answer": "2"}] * 4


class Sends(TrainerCallback):
    """Asks the run to stop, as a signal does."""

    def on_step_end(self, args, state, control, **_):
        self.trainer.run._signals.stop_requested = True


def grpo(folder, data=None, reward=length_reward, **kwargs):
    args = GRPOConfig(str(folder), **{**SMALL, "num_generations": 2, "max_completion_length": 4, **kwargs})
    return GRPOTrainer(tiny_model(), reward, args, rows(4) if data is None else data, processing_class=byte_tokenizer())


def sft(folder, data, callbacks=(), **kwargs):
    args = SFTConfig(str(folder), **{**SMALL, **kwargs})
    return SFTTrainer(tiny_model(), args, None, data, processing_class=byte_tokenizer(), callbacks=list(callbacks))


def stopped(folder, **kwargs):
    """A run that is asked to stop after its first step."""
    made = sft(folder, [{"text": "abc"}] * 4, [sends := Sends()], **kwargs)
    sends.trainer = made
    made.train()


def into_a_file(folder):
    (folder / "out").write_text("")
    sft(folder / "out", [{"text": "abc"}] * 4, save_strategy="steps").train()


def damaged(folder):
    sft(folder, [{"text": "abc"}] * 4, save_strategy="steps", save_steps=2).train()
    for path in folder.rglob("optimizer.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    sft(folder, [{"text": "abc"}] * 4, save_strategy="steps").train(resume_from_checkpoint=True)


CASES = {
    "long prompt": (lambda f: grpo(f, [{"prompt": "x" * 500}] * 4).train(), "lower max_completion.*max_prompt_length="),
    "long completion": (lambda f: grpo(f, max_completion_length=500), "max_completion_length=500 leaves no room"),
    "column of a reward": (lambda f: grpo(f, ANSWERED, lambda solution, **_: []).train(),
                           r"needs 'solution'.*your columns: answer\. Rename .*always offered: prompts.*trainer_state"),
    "columns of a row": (lambda f: sft(f, [{"words": "a"}]), "row 0 has the columns words.*dataset_text_field"),
    "texts as messages": (lambda f: sft(f, [{"messages": "a"}]), "expected a list of messages.*dataset_text_field"),
    "stopped": (lambda f: stopped(f, save_strategy="steps"), r"train\(resume_from_checkpoint=True\)"),
    "stopped, unsaved": (stopped, "save_strategy"),
    "output_dir is a file": (into_a_file, "output_dir"),
    "damaged": (damaged, r"train\(resume_from_checkpoint="),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_the_layers_below_say_is_said_in_the_words_of_trl(case, tmp_path):
    fails, said = CASES[case]
    with pytest.raises((WhetError, Stopped)) as caught:
        fails(tmp_path)
    assert re.search(said, str(caught.value), re.DOTALL | re.IGNORECASE), caught.value
    assert not FOREIGN.search(str(caught.value)), caught.value


def test_an_error_stays_what_it_is():
    error = WhetError("set trainer.max_steps; resume with trainer.resume=latest, or set another trainer.run_dir")
    with pytest.raises(WhetError) as caught, VOCABULARY.translating():
        raise error
    assert caught.value is error
    assert str(error) == "set max_steps; resume with train(resume_from_checkpoint=True), or set another output_dir"
    assert VOCABULARY.translate("mytrainer.max_steps and max_tokens_to_generate_x") == (
        "mytrainer.max_steps and max_tokens_to_generate_x"
    )


def test_what_is_warned_of_is_in_them_too(tmp_path, caplog):
    def nothing(completions, **_):
        return [0.0] * len(completions)

    grpo(tmp_path, reward=nothing, max_steps=3).train()
    assert "raise max_completion_length" in caplog.text and "raise num_generations or temperature" in caplog.text
    rows_of_metrics = [
        {"completions/clipped_ratio": 1.0, "sampling/sampling_logp_difference/mean": 1.0},
        {"kl": 9.0, "entropy/token_mean": 0.0},
        {"entropy/token_mean": 9.0},
    ]
    found = [told.message for row in rows_of_metrics for s in symptoms(None).values() if (told := s.find(row))]
    assert len(found) == 5
    for text in map(VOCABULARY.translate, [*found, lower_lr_advice()]):
        assert not FOREIGN.search(text) and not re.search(r"(actor|algo)\.|_when", text)
    fix = "trainer.stop_when.kl.above=5 ends a run there"
    row = logging.LogRecord("whet", logging.WARNING, "", 0, f"kl is 9; {fix}", (), None)
    row.fix, row.key = fix, "trainer.warn_when"
    assert VOCABULARY._translate_record(row) and row.getMessage() == "kl is 9"

"""Scripts for TRL, which run with either library on one process or on several."""

import importlib
import itertools
import json
import os

from helpers import tiny_model
from processes import as_torchrun

from whet.data.tokenizer import byte_tokenizer

COMMON = {"learning_rate": 0.1, "optim": "sgd", "logging_steps": 1, "bf16": False, "disable_tqdm": True,
          "save_strategy": "no", "use_cpu": True, "gradient_checkpointing": False, "report_to": "none",
          "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "lr_scheduler_type":
          "constant"}  # fmt: skip
TEXTS = ["a", "bcd", "ef", "ghijk", "lm", "n", "opqr", "st", "uvwxyz", "ab", "c", "defg", "hi", "jkl", "mn", "o"]


def completion(prompt, generation):
    """The completion of a prompt that a fixed rollout gives: 1 to 5 tokens."""
    seed = sum(map(ord, prompt)) + 7 * generation
    return [65 + (seed * (i + 3)) % 26 for i in range(1 + seed % 5)]


class FixedRollout:
    """A rollout_func that draws nothing, and remembers its prompts."""

    def __init__(self, tokenizer):
        self.tokenizer, self.prompts = tokenizer, []

    def __call__(self, prompts, trainer, *_):
        self.prompts.append(list(prompts))
        generations = [prompts[:i].count(prompt) for i, prompt in enumerate(prompts)]
        ids = [completion(*pair) for pair in zip(prompts, generations, strict=True)]
        return {"prompt_ids": [self.tokenizer(prompt)["input_ids"] for prompt in prompts], "completion_ids": ids,
                "logprobs": [[-1.0] * len(x) for x in ids]}  # fmt: skip


def score(completion_ids, **_):
    return [float(sum(ids) % 5) for ids in completion_ids]


def make_trainer(library, method, folder):
    """A trainer of TRL or whet.trl on a tiny model; SFT and DPO take the rows in their order."""
    lib, tokenizer = importlib.import_module(library), byte_tokenizer()
    config, trainer = getattr(lib, f"{method}Config"), getattr(lib, f"{method}Trainer")
    values, more = COMMON, {}
    if method == "GRPO":
        values = {"num_generations": 4, "max_completion_length": 6, "shuffle_dataset": False, "beta": 0.0, **values}
        data = [{"prompt": text} for text in TEXTS]
        more = {"reward_funcs": score, "rollout_func": FixedRollout(tokenizer)}
    else:
        values = {"train_sampling_strategy": "sequential", "max_length": 32, **values}
        names = {"SFT": ("prompt", "completion"), "DPO": ("prompt", "chosen", "rejected")}[method]
        data = [dict(zip(names, (text, TEXTS[-i], TEXTS[(5 * i + 3) % 16]), strict=False))
                for i, text in enumerate(TEXTS)]  # fmt: skip
    data = importlib.import_module("datasets").Dataset.from_list(data)
    if method == "DPO":
        more = {"ref_model": tiny_model()} if library == "trl" else {}  # TRL loads its own by the model's name
    return trainer(model=tiny_model(), args=config(output_dir=str(folder / "out"), **values), train_dataset=data,
                   processing_class=tokenizer, **more)  # fmt: skip


def run_scripts(rank, size, folder, port, libraries, methods):
    """Trains by several methods, and writes what each process has logged and seen, and the weights at the end."""
    as_torchrun(rank, size, port)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for library, method in itertools.product(libraries, methods):
        (folder / library).mkdir(exist_ok=True)
        made = make_trainer(library, method, folder)
        made.train()
        made.save_model(str(folder / library / method))
        seen = made.rollout_func.prompts if method == "GRPO" else []
        written = {"log": made.state.log_history, "prompts": seen}
        (folder / library / f"{method}-{rank}.json").write_text(json.dumps(written))

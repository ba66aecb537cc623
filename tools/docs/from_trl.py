"""docs/from-trl.md: every field of TRL's configurations, and how whet.trl differs."""

from __future__ import annotations

from tools.docs.table import legend, table
from whet.compat.field import Table
from whet.trl.config.dpo import DPO_FIELDS, OLD_DPO_FIELDS
from whet.trl.config.grpo import COMPAT, GRPO_FIELDS, OLD_GRPO_FIELDS
from whet.trl.config.kto import KTO_FIELDS
from whet.trl.config.reward import REWARD_FIELDS
from whet.trl.config.rl import OWN_RL_FIELDS
from whet.trl.config.rloo import RLOO_FIELDS
from whet.trl.config.sft import OLD_SFT_FIELDS, SFT_FIELDS
from whet.trl.config.supervised import SUPERVISED_FIELDS
from whet.trl.config.training import OLD_TRAINING_FIELDS, OWN_FIELDS, TRAINING_FIELDS

__all__ = ["PAGES", "page"]

PAGES: dict[str, Table] = {
    "GRPOConfig": GRPO_FIELDS,
    "RLOOConfig": RLOO_FIELDS,
    "SFTConfig": SFT_FIELDS,
    "DPOConfig": DPO_FIELDS,
    "KTOConfig": KTO_FIELDS,
    "RewardConfig": REWARD_FIELDS,
    "From transformers.TrainingArguments": TRAINING_FIELDS,
    "Of these, otherwise in SFTConfig, DPOConfig and RewardConfig": SUPERVISED_FIELDS,
    "Of whet's own, in all of them": OWN_FIELDS,
    "Of whet's own, in GRPOConfig and RLOOConfig": OWN_RL_FIELDS,
    "Fields of earlier releases": {**OLD_GRPO_FIELDS, **OLD_TRAINING_FIELDS},
    "Of SFT and DPO": {**OLD_SFT_FIELDS, **OLD_DPO_FIELDS},
}
"""Heading -> fields."""

_INTRO = """# From TRL

A script for TRL's GRPOTrainer, RLOOTrainer, SFTTrainer, DPOTrainer, KTOTrainer or RewardTrainer runs with its
import changed ([start in three minutes](trl-start.md)):

```python skip
from whet.trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=accuracy, args=GRPOConfig("out"), train_dataset=rows)
trainer.train()
```

Neither TRL nor accelerate is needed. whet's learners train; GRPOTrainer samples with an engine that
reads the trainer's own weights. Reward functions, callbacks, checkpoints in `output_dir/checkpoint-*`, `log_history`
and metric names are those of TRL.

[examples/trl](../examples/trl) has scripts to start from: GSM8K, an adapter, several rewards, conversations, vLLM, a
callback, a resumed run. The test suite runs each with both imports.

## Several processes

`torchrun --nproc_per_node=2 script.py` and `accelerate launch --num_processes 2 script.py` run the script on two
processes. whet shards the models by FSDP2 itself ([Several processes](scaling.md)) and reads accelerate's settings for
the CPU and bf16; DeepSpeed and FSDP plugins have no effect, axes for tensor or context parallelism are refused.
(`accelerate launch --cpu` starts one process, whatever its number of processes; torchrun starts several on a CPU.)

- Batches count as in TRL: an update has per_device_train_batch_size x processes x gradient_accumulation_steps rows,
  and a loss is one mean over all of them, also with `average_tokens_across_devices=False`. A test trains with TRL and
  with whet on two processes each (SFT, DPO, GRPO with a `rollout_func` that draws nothing): prompts of each process,
  losses, gradient norms and weights agree.
- The last update of an epoch has the rows that are left; accelerate fills it with the epoch's first rows. It is the
  same where the processes' batches divide the rows.
- Each process calls reward functions and `rollout_func` for its own prompts, as in TRL. Every process calls callbacks;
  the first alone logs, saves and pushes, and `state.is_world_process_zero` tells it. If a callback of any process sets
  `should_save`, `should_evaluate` or `should_training_stop`, all do.
- All processes must call `train`, `evaluate`, `save_model`, `push_to_hub`, and the `save_pretrained` of an adapter.
  `trainer.model` has this process's shards: save a whole model by `trainer.save_model`, and for generation in a script
  enter `with trainer.worker.rollout_weights():`.
- One process alone runs `tools` and `environment_factory`, beam search, a custom `generate`, and `optimizers=` with an
  optimizer; with several they are refused.

## The model, its checkpoints, memory

- `trainer.model` is the module in training. With `peft_config` it is PEFT's `PeftModel` around that module, as in TRL:
  `save_pretrained` and `push_to_hub` write the adapter, `merge_and_unload`, `print_trainable_parameters` and
  `disable_adapter` are PEFT's own. The parameters that it shows are in the dtype that the model computes in.
- The optimizer updates *masters*: copies of the parameters in fp32, also where the model computes in bf16.
  `save_model()`, checkpoints and the `save_pretrained` of an adapter write the masters; `trainer.model.save_pretrained`
  of a whole model in bf16 writes its rounded parameters.
- `output_dir/checkpoint-N` is a complete folder without links: it can be copied and moved. transformers, PEFT and TRL
  load it as the model. `run.pt` and `whet/` (optimizer and schedule) are for a resume only. `output_dir` is locked
  while a run writes there.
- A run that resumes from an earlier checkpoint leaves the later ones until it writes them again, as in TRL:
  `resume_from_checkpoint=True` takes the one with the highest number.
- The model runs on packed rows of many sequences, a *pass* at a time, whatever the batch. Memory depends on the tokens
  of a pass. Where memory is short, lower `max_tokens_per_microbatch`, a field of whet's own in every configuration; it
  changes results by rounding only. per_device_train_batch_size has no influence on memory.
- A second `train()` continues with the same weights and begins the schedule again, as in TRL. `train()` reads what was
  set on the trainer since it was made: `train_dataset`, `eval_dataset`, `reward_funcs`, and in `args` the learning
  rate, the schedule, the length, and when to log, evaluate and save. A changed rate resets the optimizer's moments to
  0. A change of another field of `args` raises, since it was read when the trainer was made.

## Tools, environments, rollouts of your own

`tools`, `environment_factory` and `rollout_func` are as in TRL, `max_tool_calling_iterations` and
`max_completion_length` (of the whole completion) too. Episodes run on the engine; each continues as soon as its own
tools have answered. Token ids are appended and never encoded again, and only the model's own tokens are trained.

- Calls are read by the tokenizer's `response_template`. Where it has none, one is found by asking the chat template, if
  this writes a call as a mark, JSON with `name` and `arguments`, and a mark, as those of Qwen2.5 and Qwen3 do. For
  others set `processing_class.response_template`; TRL has a table of known models.
- A template that writes its last turn as no other (Qwen3's adds empty thinking) is taken as it is; TRL puts another in
  its place.
- The model gets the error of a tool that fails as its answer. Tools run in this process, those of a turn at once. A
  tool has 60 s; for other limits give `tools=Tools([multiply], limits=ToolLimits(timeout_s=300.0))` (both are in
  `whet.envs.tools`), which also holds for the methods of an environment. Images in an answer are not supported.
- Reward functions are given the environments themselves, and the other columns as copies.
- Lengths of completions count the model's own tokens, as in TRL; `num_tokens` counts the tools' tokens too.
- `rollout_func` is called with every prompt once for each of its completions. Old log-probabilities are the trainer's;
  the ones that it returns are what `off_policy_mask_threshold` measures the distance to, as in TRL (None = not known),
  and are not used otherwise, since a ratio to them would be another policy's.

## What is different on purpose: GRPO and RLOO

- A step is one rollout and its updates. Logging, evaluation and checkpoints that are due between two updates of a
  rollout wait for its end; so does the end of the run. `global_step` counts optimizer steps, as in TRL.
- The order of callbacks is transformers'. An optimizer step is one call, so `on_pre_optimizer_step` and
  `on_optimizer_step` come after it, and `on_substep_end` never comes. An evaluation is one call too, so
  `on_prediction_step` never comes. `control.should_epoch_stop` raises: a run can't leave an epoch early.
- A rollout with several updates splits its completions in their order, and keeps groups together where they fit; TRL
  shuffles them first.
- A loss is divided by counts of the whole update, TRL's by those of a micro-batch (bnpo) or by a mean over the updates
  of a rollout (dapo, cispo, vespo). Without accumulation, and with one update a rollout, they are the same.
- `top_entropy_quantile` and the entropy bonus go by the tokens of the whole update, TRL's by those of a micro-batch.
- `vllm_importance_sampling_mode` has two values besides TRL's: `geometric_mask` and `geometric_truncate` take the mean
  of a sequence's log-ratios. TRL's default, `sequence_mask`, takes their sum, which masks long completions for being
  long. `sampling/importance_sampling_ratio/mean` leaves out completions without a trained token (those that
  `mask_truncated_completions` takes out); TRL counts them with a ratio of 1.
- An update takes whole parts of one rollout: where gradient_accumulation_steps would mix two of them, the nearest
  number that doesn't is taken, with a warning.
- Every end token of the model and the tokenizer ends a completion, and counts as ended.
- A run that ends saves its last step, unless save_strategy is "no"; what a callback asks for then holds the weights
  alone.
- A data set with fewer rows than a rollout takes is an error; TRL trains for 0 steps.
- A resumed run continues at the same row and draw: its result equals that of an uninterrupted run, and with
  `answers_dir` also where tools or environments don't repeat themselves.
- Master weights are always fp32. The reference is the given model, not its file read again.
- Random draws depend on (seed, step, place); they differ from TRL's with the same seed.
- The update leaves out completions with advantage 0; the mean `entropy` is over the tokens of the others.
- A subclass that overrides a method which whet never calls (`compute_loss`, `training_step` ...) is refused by name.
  Its own `save_model` is called for every checkpoint too, as in TRL.
- The auxiliary loss of a mixture of experts is not added, with a warning where the model's configuration has a
  `router_aux_loss_coef`; TRL adds it.
- Attributes of TRL's trainers that are arguments (`trainer.num_generations`, `trainer.beta`) can be read and not set.
  Others (`data_collator`, `compute_metrics`) raise with the alternative. `get_train_dataloader()` and
  `get_eval_dataloader()` are for inspection: a run reads its rows itself.
- Missing, since only TRL's own tests read it: `training_step`, `get_high_entropy_mask`,
  `get_off_policy_mask`, `_generate`, `_env_tools`, `_entropy_bonus_enabled`, an adapter `ref` in `peft_config` (the
  reference of an adapter that was trained before is a copy of it, held apart). `_logs` and `_metrics` are there, to
  read completions and to add numbers.
- Callbacks are given `lr_scheduler` with `get_last_lr()` and `state_dict()`; `train_dataloader` and `eval_dataloader`
  are None, since rows are packed as they are trained on.
- A prompt that with `max_completion_length` goes beyond the model's context is an error at the start; TRL samples on,
  at positions that the model has never seen.
- With several evaluation sets every metric has its set's name, in TRL the loss alone. A `metric_for_best_model` without
  one is the last set's, as there; `eval_loss` is refused at the start, as is a name that no evaluation could have.
- A data set may also be a list of dicts. `save_model` writes no training_args.bin, which would be a pickle.
- `train_samples_per_second` counts what updates are made of; TRL's counts rows of the data where epochs end the run.

- A `peft_config` that is more than one product W + s·B·A in every layer (DoRA, rank patterns ...: see
  [SFT](#what-is-different-on-purpose-sft-dpo-and-reward-models)) runs in PEFT's own layers, in sampling too. That is
  slower, and a line of the log says so. vLLM can't read such an adapter.
- `lora_dropout` of a `peft_config` is taken as 0.0, since the sampler draws without it. The reference of an adapter is
  the base read with the adapter off: no second copy.

- RLOO: `frac_reward_zero_std` is of the rewards as they were given; TRL's is of clipped ones less the KL, which hardly
  ever agree.
- The least and largest clip ratios of a rollout are over all its updates, TRL's are means over them.

CISPO's cap at `epsilon_high` itself, the KL times the ratio, and masked rows in the mean over rows are followed, with a
warning.
"""

_SUPERVISED = """## What is different on purpose: SFT, DPO and reward models

The points above about callbacks, the last step, resuming, masters and overridden methods apply here too.

- An update is weighed as a whole: per_device_train_batch_size times gradient_accumulation_steps rows, however many
  passes they take. SFT's loss is TRL's; where losses are means over pairs TRL takes a mean over micro-batches, which
  is the same where all are full. Metrics are means over the update, TRL's means over its micro-batches.
- Evaluation is weighed over the whole set, TRL's loss is a mean over batches.
- Rows are read as described in [docs/data.md](data.md). Prompt and answer are encoded apart, so that no token spans
  both; TRL encodes them together, and drops the prompt's end where they differ. Of an answer with several turns the
  assistant's are trained, in TRL the user's and the tools' too.
- KTO's mismatched rows are those of the whole update, and in an evaluation of the whole set; TRL turns them within each
  micro-batch. Without accumulation they are the same in training.
- What a chat template changes or leaves out is trained as it shows it, and counted in a line of the log.
- Rows with nothing to train (empty answers, pairs that say the same) are left out and counted.
- `packing` keeps every row whole and by itself, and decides how many rows make up a step: those of so many packs. In
  those of `packing_strategy="wrapped"` rows see each other, as there.
- A new score head begins at 0, TRL's at random: the first scores are 0, and the first step is the same for every seed.
  One that an adapter does not train (`modules_to_save=["score"]` and `task_type="SEQ_CLS"` do) is drawn at random and
  stays as it is, as there, with a warning.
- A `peft_config` that is more than one product W + s·B·A in every layer (DoRA, rank patterns, `layers_to_transform`,
  `target_parameters`, the experts of a mixture, `bias`, `trainable_token_indices`, PiSSA and PEFT's other
  initialisations) runs in PEFT's own layers, slower than whet's, and a line of the log says so.
- Prompt tuning, prefix tuning and p-tuning run in PEFT's own module, on padded rows, for SFT, DPO, GRPO and RLOO; a
  line of the log says so. GRPO and RLOO sample by transformers' forward (the `hf` engine), not by vLLM, and take
  `encoder_dropout` as 0.0. SFT does not train the first token of a row, which TRL trains from the last virtual token.
  Prefix tuning needs `gradient_checkpointing=False`, as there. The reference is the model without the prompt, or the
  prompt of a given PEFT model as it was. In TRL, GRPO's padding before a short prompt lies between the virtual tokens
  and the prompt and moves its logits; rows here have no padding before them.
- Reward models refuse all three. With prompt tuning and p-tuning, PEFT's classifier reads a padded row's score at the
  padding, so TRL's scores depend on the longest row of the batch.
- PEFT's other kinds of adapters (IA3, LoHa, OFT ...) are refused everywhere, though TRL trains them: whet saves,
  resumes, merges and switches off only LoRA's layers and learned prompts.
- `lora_dropout` is kept. The reference of an adapter is what the model was at the beginning, without a second copy.
- `optimizer_cls_and_kwargs`: as with `optimizers`, the learning rate is the class's, and the schedule the arguments'.
- `trainer.train_dataset` and `eval_dataset` are the rows as token ids under TRL's names, without those that are left
  out.
- `compute_metrics` takes a second pass over the evaluation set, since whet's learners hold no logits.
- `model_tags` are whet and the method. TRL's collators and fused losses are not there: whet packs rows, and reads them
  with kernels of its own.
- Dropout of the model's own is off in training too, with `disable_dropout=False` as well: nothing draws it in packed
  rows. What was above 0 is told when the model is loaded.
- `compute_loss_func` and `data_collator` are refused, each with what to do instead. TRL has deprecated
  `compute_loss_func` itself.
"""


def page() -> str:
    """The text of docs/from-trl.md."""
    parts = [
        _INTRO,
        _SUPERVISED,
        f"## The fields\n\n{legend(row for fields in PAGES.values() for row in fields.values())}\n",
    ]
    for heading, fields in PAGES.items():
        rows = [(f"`{name}`", f"`{row.default!r}`", row.state, row.note) for name, row in fields.items()]
        parts.append(f"## {heading}\n\n{table(['field', 'default in TRL', 'here', 'note'], rows)}\n")
    for release, defaults in COMPAT.items():
        words = ", ".join(f"`{name}={value!r}`" for name, value in defaults.items())
        parts.append(
            f'`compat="{release}"`: {words}; `completion_length` and `reward/{{function}}` are logged besides, and '
            "`reward_std` is the mean over groups.\n"
        )
    return "\n".join(parts)

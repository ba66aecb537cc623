"""Data loaders like those of TRL's trainers, for inspection. A run reads its rows itself, in the same order."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from whet.data.prompt_stream import epoch_order
from whet.errors import ConfigError

__all__ = ["eval_loader", "train_loader"]


def train_loader(trainer: Any) -> DataLoader[Any]:
    """Returns a loader of the first epoch. A batch repeats each row for each completion and comes once for each
    micro-step.

    Raises: ConfigError: train_dataset is a stream.
    """
    args, rows = trainer.args, trainer.train_rows()
    if not isinstance(rows, list):
        raise ConfigError("train_dataset is a stream, which has no loader; iterate over train_dataset itself")
    seed = args.seed if args.data_seed is None else args.data_seed
    order = epoch_order(len(rows), seed, 0).tolist() if args.shuffle_dataset else range(len(rows))
    prompts, times = args.generation_batch_size // args.num_generations, args.steps_per_generation * args.num_iterations
    batches = [order[i : i + prompts] for i in range(0, len(rows) - prompts + 1, prompts)]
    indices = [i for batch in batches for _ in range(times) for i in batch for _ in range(args.num_generations)]
    return _loader(rows, indices, args.generation_batch_size, args.dataloader_num_workers)


def eval_loader(trainer: Any, eval_dataset: Any = None) -> DataLoader[Any]:
    """Returns a loader of evaluation rows, each repeated for each completion.

    Args: eval_dataset: data, or the name of one of the trainer's sets; None = the trainer's single set.
    Raises: ConfigError: no evaluation set, or several.
    """
    trainer.read_eval_data()
    sets = trainer.eval_rows
    if isinstance(eval_dataset, str):
        sets, data = {"": sets.get(eval_dataset)}, trainer.eval_dataset[eval_dataset]
    else:
        data = trainer.eval_dataset if eval_dataset is None else eval_dataset
        sets = sets if eval_dataset is None else trainer.eval_sets(eval_dataset)
    if list(sets) != [""]:
        raise ConfigError(f"get_eval_dataloader: give one evaluation set of {', '.join(sets) or 'none'}")
    args, rows = trainer.args, sets[""]
    count = args.num_generations_eval or args.num_generations
    indices = [i for i in range(len(rows)) for _ in range(count)]
    workers = args.dataloader_num_workers if hasattr(data, "__len__") else 0
    return _loader(rows, indices, args.per_device_eval_batch_size, workers)


def _loader(rows: list[Any], indices: list[int], size: int, workers: int) -> DataLoader[Any]:
    return DataLoader(rows, batch_size=size, sampler=indices, collate_fn=list, num_workers=workers)  # pyright: ignore

"""One GRPO update by the real learner, and moments of 8 bits: in this process alone, or as one of several over parts of
the model.
"""

import datetime
from unittest import mock

import torch
import torch.distributed as dist
from helpers import cluster, length_reward, rows, tiny_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from whet.config import DataConfig, GRPOConfig, OptimConfig
from whet.learners.grpo import GRPOLearner
from whet.models import fast_layers
from whet.rollout.base import EngineCaps
from whet.rollout.mock import MockEngine
from whet.rollout.policy_rollouts import PolicyRollouts
from whet.train.optimizer import Optim
from whet.util.tensor_subclasses import gather_full_tensor, is_wrapper_subclass, shard_like

VARIES = ("time/", "perf/", "rollout/mean_batch_size")
"""Metrics of a clock, or of one rank's engine."""
PATIENCE = datetime.timedelta(seconds=60)


def whole(tensor):
    """A copy of all of a tensor, of which this rank may have a part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def sent(policy, adapters):
    """What an engine with weights of its own gets."""

    class Engine(MockEngine):
        caps = EngineCaps(shared_weights=False, adapters=adapters)

        def update_weights(self, version, weights=None):
            self.got = dict(weights)

    rollouts = PolicyRollouts(Engine, policy)
    rollouts.engine.update_weights(0, ())
    rollouts.sync()
    return rollouts.engine.got


def one_update(prompts, folder):
    """A step of one update: gradients before clipping, weights after, numbers, passes, what was rewarded here, and what
    this process reads of the model that all of them have exported.
    """
    rewarded, plain, is_plain = [], set(), fast_layers._is_plain

    def noted(layer):
        plain.add(found := is_plain(layer))
        return found

    def reward(completions, completion_ids, **_):
        rewarded.extend(map(tuple, completion_ids))
        return length_reward(completions)

    optimizer = OptimConfig(name="sgd", lr=0.1, max_grad_norm=0.5)
    c = cluster(
        tiny_model(),
        reference=tiny_model(1),
        max_steps=1,
        seed=5,
        actor_optimizer=optimizer,
        max_segments_per_packed_row=4,
    )
    worker = c.actor
    gradients, passes, step, share = {}, [], worker.optim.step, worker.placement.split_passes

    def kept():
        gradients.update({name: whole(m.grad) for name, m in worker.optim.masters.items()})
        return step()

    def counted(made):
        own = share(made)
        passes.append((len(made), [counts for _, counts in own]))
        return own

    worker.optim.step, worker.placement.split_passes = kept, counted
    algo = GRPOConfig(num_generations=3, beta=0.04)
    with mock.patch.object(fast_layers, "_is_plain", noted):
        run = GRPOLearner(c, algo, reward, data=DataConfig(batch_size=prompts)).train(rows(prompts))
    c.actor.export(folder / "trained", c.tokenizer, dtype="bfloat16")
    return {
        "exported": load_file(folder / "trained/model.safetensors"),
        "gradients": gradients,
        "weights": {name: whole(p) for name, p in worker.module.named_parameters()},
        "row": {n: x for n, x in run.rows[0].items() if isinstance(x, float) and not n.startswith(VARIES)},
        "sent": [sent(worker, adapters) for adapters in (False, True)],
        "imbalance": run.rows[0].get("perf/rank_imbalance"),
        "passes": passes,
        "layers": len(worker.fast_layers),
        "plain": plain,
        "rewarded": rewarded,
    }


def one_of(rank, size, folder, prompts):
    """The same as one process of several, over FSDP; what came of it lies in the folder."""
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=PATIENCE)
    torch.save(one_update(prompts, folder), folder / f"{rank}.pt")
    dist.destroy_process_group()


class Matrices(nn.Module):
    """Matrices by whose rows or columns processes divide them; of `uneven` one process has a shard of whole blocks."""

    def __init__(self, mesh):
        super().__init__()
        for name, (rows_of, dim) in {"rows": (128, 0), "columns": (128, 1), "uneven": (129, 0)}.items():
            whole = torch.randn(rows_of, 64, generator=torch.Generator().manual_seed(rows_of))
            self.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)]) if mesh else whole))


def eight_bit(mesh, steps):
    """The optimizer of Matrices with moments of 8 bits, after some steps."""
    optim = Optim(Matrices(mesh), OptimConfig(name="adamw8bit", lr=1e-2, max_grad_norm=0.0))
    for seed in range(steps):
        for m in optim.masters.values():
            whole = torch.randn(m.shape, generator=torch.Generator().manual_seed(seed))
            m.grad = shard_like(m, whole)
        optim.step()
    return optim


def moments(optim):
    """The moments in fp32, whole; and which of this process's parts are quantised."""
    of = {f"{n}.{k}": optim.optimizer.state[m][k] for n, m in optim.masters.items() for k in ("exp_avg", "exp_avg_sq")}
    local = {n: x.to_local() if isinstance(x, DTensor) else x for n, x in of.items()}
    wholes = {n: gather_full_tensor(x) for n, x in of.items()}
    wholes = {n: x.dequantize() if is_wrapper_subclass(x) else x for n, x in wholes.items()}
    return wholes, {n: is_wrapper_subclass(x) for n, x in local.items()}


def resume_eight_bit(rank, size, folder):
    """Resumes what two processes have saved, and what one has."""
    torch.compiler.set_stance("force_eager")
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=PATIENCE)
    mesh = init_device_mesh("cpu", (size,))
    first = eight_bit(mesh, 3)
    rest = first.save(folder / "two.safetensors" if rank == 0 else None)
    found = {"before": moments(first)}
    for name in ("two", "one"):
        if rank == 0 and name == "two":
            torch.save(rest, folder / "two.pt")
        dist.barrier()
        again = eight_bit(mesh, 0)
        again.load(folder / f"{name}.safetensors", torch.load(folder / f"{name}.pt"))
        found[name] = moments(again)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()

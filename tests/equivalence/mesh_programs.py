"""Gradients, metrics and scores of fixed batches: in this process alone, or on a mesh of several."""

import datetime
import itertools

import torch
import torch.distributed as dist
from helpers import completion, forest, prompt, random_batch, tiny_model
from storages import StoragePeak
from torch.distributed.tensor import DTensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from whet.config import OptimConfig
from whet.metrics import flat
from whet.models.load import load_model
from whet.ops import LOSS_AGG_MODES
from whet.ops.logits_processors import LogitsProcessors
from whet.parallel.mesh import make_mesh
from whet.train.optimizer import total_norm
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import Divergence, ModelWorker
from whet.types import Group, TokenBatch
from whet.types.loss import CONSTANTS

TIMEOUT = datetime.timedelta(seconds=60)


def sinks_model():
    """Layers with windows, with sinks, and with experts."""
    torch.manual_seed(2)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 16, "head_dim": 8, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    return GptOssForCausalLM(GptOssConfig(**sizes, **heads, sliding_window=8, attention_dropout=0.0))


def biased_model():
    """Layers whose projections all have a bias, one KV head, a head of its own, and an odd number of tokens."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 263, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    biases = {"attention_bias": True, "mlp_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=1, **biases))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


MODELS = {
    "trees": lambda: tiny_model(),
    "one KV head": lambda: tiny_model(1, num_key_value_heads=1),
    "windows and sinks": sinks_model,
}


def capped_model():
    """Soft-capped logits, and a scaled embedding, which is the head too and whose padding has no gradient."""
    torch.manual_seed(5)
    sizes = {"vocab_size": 261, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "final_logit_softcapping": 3.0}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, pad_token_id=6, eos_token_id=2, initializer_range=0.3))


def models_of(mesh, every):
    """The models that run on a mesh: the matrices of some can't be divided."""
    if mesh[2] == 1:
        return MODELS
    return {"trees": MODELS["trees"], "biases": biased_model, "capped": capped_model}


def batches():
    """Forks and later turns; lengths that differ; and one sequence, whose first half predicts no target, so that other
    ranks run a pass that does not count."""
    long = Group(prompt=prompt([*range(50, 90)]), completions=(completion([5, 6, 2]),))
    yield forest(3, 7, piece=12)
    yield random_batch((5, (1, 17, 4)), (23, (9, 2)), (3, (6,)), masked=True)
    yield TokenBatch.from_groups([long])


def loss(x):
    """It reads other tokens of a sequence, and its entropy."""
    sums = torch.zeros(x.num_sequences, dtype=x.logprobs.dtype).index_add(0, x.sequence, x.logprobs)
    own = x.logprobs * (1 + x.need("weights").abs()) + 0.1 * x.entropy - 0.01 * sums[x.sequence] ** 2 / 10
    return own, {"sum": sums[x.sequence]}


def against_teacher(x):
    """It reads the teacher's divergence, and all constants."""
    read = {name: x.need(name) for name in CONSTANTS}
    return x.need("divergence") + 0.1 * x.entropy, {name: value.float() for name, value in read.items()}


def whole(tensor):
    """A copy of all of a tensor, of which this rank may have a part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def results(placement, every=True, models=MODELS):
    """Gradients, metrics, logprobs and scores of the models and batches.

    Args: placement: makes one. every: with each aggregation; else each aggregation has one or two batches.
    """
    found, turns = {}, itertools.cycle(LOSS_AGG_MODES)
    teacher = ModelWorker(load_model(tiny_model(9)), max_tokens=80, placement=placement())
    for name, model in models.items():
        worker = ModelWorker(load_model(model()), optim=OptimConfig(), max_tokens=80, placement=placement())
        trainer = RoleTrainer(worker, loss=loss)
        for i, batch in enumerate(batches()):
            found[f"{name}, {i}, logprobs"] = worker.logprobs(batch).logprobs
            for mode in LOSS_AGG_MODES if every else [next(turns)]:
                trainer.set_loss(loss, loss_agg_mode=mode, loss_agg_norm=20.0)
                weighted = trainer.add_loss_weights(batch)
                metrics = worker.forward_backward(weighted, loss, entropy=True)
                found[f"{name}, {i}, {mode}"] = torch.tensor([v for _, v in sorted(flat(metrics).items())])
                with worker.placement.during("step"):
                    for key, master in worker.optim.masters.items():
                        found[f"{name}, {i}, {mode}, {key}"] = whole(master.grad)
                    norm = worker.placement.grad_norm([m.grad for m in worker.optim.masters.values()], total_norm)
                found[f"{name}, {i}, {mode}, norm"] = torch.tensor(norm)
                for p in worker.module.parameters():
                    p.grad = None
        needs = {"entropy": True, "constants": CONSTANTS, "divergence": Divergence(teacher, 0.4)}
        more = (
            ("teacher", LogitsProcessors(temperature=0.7), against_teacher, needs),
            ("top 20", LogitsProcessors(top_k=20), loss, {"entropy": True}),
        )
        divided = "capped" in models and name in models_of((1, 1, 2), every)
        for what, processors, used, asked in more if every or divided else ():
            worker.processors = processors
            metrics = worker.forward_backward(weighted, used, **asked)
            found[f"{name}, {what}"] = torch.tensor([v for _, v in sorted(flat(metrics).items())])
            with worker.placement.during("step"):
                for key, master in worker.optim.masters.items():
                    found[f"{name}, {what}, {key}"] = whole(master.grad)
            for p in worker.module.parameters():
                p.grad = None
    critic = load_model(tiny_model(4), role="critic")
    with torch.no_grad():
        critic.score_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    worker = ModelWorker(critic, placement=placement(), max_tokens=80)
    for i, batch in enumerate(batches()):
        found[f"scores {i}"], found[f"values {i}"] = worker.scores(batch), worker.values(batch)
    return found


def peak(placement):
    """The most bytes of tensors that a pass of one long sequence has at a time."""
    worker = ModelWorker(load_model(tiny_model()), optim=OptimConfig(), max_tokens=2048, placement=placement())
    batch = RoleTrainer(worker, loss=loss).add_loss_weights(random_batch((40, (1700,))))
    with StoragePeak() as counted:
        worker.forward_backward(batch, loss, entropy=True)
    return counted.peak


def join(rank, size, folder):
    """The processes, which meet at a file of the folder."""
    from whet.parallel.ranks import ProcessRanks

    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=TIMEOUT)
    return ProcessRanks(dist.group.WORLD, TIMEOUT)


def on_meshes(rank, size, folder, meshes, every):
    """The results on each mesh and its peak.

    Args: meshes: each is (context_parallel_size, data_parallel_replicate_size, tensor_parallel_size).
    """
    from whet.parallel.fsdp import FSDPPlacement

    ranks = join(rank, size, folder)
    for sizes in meshes:
        context, replicas, tensor = sizes
        mesh = make_mesh("cpu", size, *sizes)
        each = {"sync_each_pass": context == replicas}
        made = lambda mesh=mesh, each=each: FSDPPlacement(mesh, ranks, **each)
        found = results(made, every, models_of(sizes, every))
        torch.save((found, peak(made)), folder / f"{rank}-{context}-{replicas}-{tensor}.pt")
    dist.destroy_process_group()

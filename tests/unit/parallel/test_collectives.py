"""What FSDP sends and holds, on one of several processes whose others only seem to be there (torch's fake backend)."""

import gc

import pytest
import torch
import torch.distributed as dist
from helpers import random_batch, tiny_model
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from whet.config import OptimConfig, load_run
from whet.config.lora import LoraConfig
from whet.models.activation_checkpointing import checkpoint_activations
from whet.models.load import load_model
from whet.models.lora import add_adapter
from whet.models.vocabulary import local_rows
from whet.parallel.fsdp import FSDPPlacement
from whet.parallel.mesh import make_mesh
from whet.parallel.ranks import Ranks
from whet.parallel.tensor import _Inputs, divide_vocabulary, sum_gradients
from whet.train.memory_plan import measure_model, plan_memory
from whet.train.rehearsal import _optimizer_state
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import ModelWorker

SIZE, LAYERS = 4, 3
MESHES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]


NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


class FakeRanks(Ranks):
    size = SIZE

    def all_gather(self, value):
        return [value] * SIZE


@pytest.fixture
def processes(request):
    dist.init_process_group("fake", rank=getattr(request, "param", 0), world_size=SIZE, store=FakeStore())
    yield
    dist.destroy_process_group()


def make(context, replicas, dtype=None, tensor=1, **options):
    model = load_model(tiny_model(num_hidden_layers=LAYERS, num_attention_heads=4))
    placement = FSDPPlacement(make_mesh("cpu", SIZE, context, replicas, tensor), FakeRanks(), **options)
    return ModelWorker(model, optim=OptimConfig(lr=0.1), placement=placement, max_tokens=60, dtype=dtype)


def loss(x):
    return x.logprobs, {}


def weighted(worker, *shapes):
    return RoleTrainer(worker, loss=loss).add_loss_weights(random_batch(*shapes))


class Collectives(TorchDispatchMode):
    """Counts collectives by name. torch's CommDebugMode also follows the modules, and fails on FSDP's hooks."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in NO_COLLECTIVES:
            name = func._opname.strip("_")
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def counts(fn):
    with Collectives() as found:
        fn()
    return found.counts


@pytest.mark.parametrize("context, replicas", MESHES)
def test_a_pass_gathers_each_layer_twice_and_an_update_reduces_it_once(processes, context, replicas):
    """No collective is of a token or of a parameter. The embedding with the head is one more part, gathered once."""
    worker = make(context, replicas)
    batch = weighted(worker, *((5 + i % 3, (20 + i,)) for i in range(9)))
    passes = len(worker.placement.split_passes(worker.micro_batches(batch, None)))
    assert passes > 1
    sent = counts(lambda: worker.forward_backward(batch, loss))
    expected = {"allgather_base": passes * (2 * LAYERS + 1), "reduce_scatter_base": LAYERS + 1}
    if SIZE == replicas:  # whole copies: nothing is sharded
        expected = {}
    if replicas > 1:
        expected["allreduce"] = LAYERS + 1
    if context > 1:
        expected["alltoall_base"] = passes * LAYERS * 8  # queries, keys, values and results, there and back
        expected["allreduce"] = expected.get("allreduce", 0) + passes  # the logprobs of all targets
    assert sent == expected
    assert counts(worker.optim_step) == {}

    def sample():
        with worker.rollout_weights() as module:
            worker.logprobs(batch)  # by itself, with the weights that an engine reads
            assert not any(isinstance(p, DTensor) for p in module.parameters())

    assert counts(sample) == ({} if SIZE == replicas else {"allgather_base": LAYERS + 1})
    assert counts(lambda: worker.forward_backward(batch, loss)) == expected  # as before


def test_tensor_parallelism_sums_twice_a_layer_forward_and_twice_backward(processes):
    """Forward after attention and MLP; backward the gradients of what q, k and v read, and of what gate and up read.

    Each process has the logits of half the tokens: the embeddings and the gradient of the last states are summed, and
    the statistics of the targets gathered. No process has the embedding or the head whole.
    """
    worker = make(1, 1, tensor=2)
    batch = weighted(worker, *((5 + i % 3, (20 + i,)) for i in range(9)))
    passes = len(worker.placement.split_passes(worker.micro_batches(batch, None)))
    assert passes > 1
    sent = counts(lambda: worker.forward_backward(batch, loss))
    assert sent == {"allgather_base": passes * (2 * LAYERS + 1), "reduce_scatter_base": LAYERS + 1,
                    "allreduce": passes * (LAYERS * 4 + 2), "allgather": passes}  # fmt: skip
    assert counts(worker.optim_step) == {"allreduce": 1}  # of the gradients of all norms of q and k
    shards = {name: p.to_local().numel() / p.numel() for name, p in worker.module.named_parameters()}
    assert shards["model.embed_tokens.weight"] == shards["model.layers.0.self_attn.q_proj.weight"] == 1 / SIZE
    with worker.rollout_weights() as module:
        whole = [module.lm_head.weight, module.model.layers[0].self_attn.q_proj.weight]
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in whole)
    assert not any(p.untyped_storage().nbytes() for p in whole)


def test_a_process_samples_with_the_kv_head_that_its_queries_read(processes):
    worker = make(1, 1, tensor=SIZE)  # two KV heads of four query heads
    with worker.rollout_weights(parts=True) as module:
        attention = module.model.layers[0].self_attn
        rows = {name: len(getattr(attention, name).weight) for name in ("q_proj", "k_proj", "v_proj")}
        assert rows == {"q_proj": 8, "k_proj": 8, "v_proj": 8}


def test_engines_of_their_own_are_sent_weights_in_the_dtype_that_the_model_computes_in(processes):
    worker = make(1, 1, torch.bfloat16)
    assert {w.dtype for _, w in worker.named_weights()} == {torch.bfloat16}
    assert {p.dtype for p in worker.module.parameters()} == {torch.float32}


def test_all_processes_run_the_fast_layers_that_each_has_found(processes, monkeypatch):
    assert len(make(1, 1).fast_layers) > 0
    others = lambda self, value: [value, ([], value[1])] if isinstance(value, tuple) else [value] * SIZE
    monkeypatch.setattr(FakeRanks, "all_gather", others)
    assert len(make(1, 1).fast_layers) == 0


@pytest.mark.parametrize("processes", [1], indirect=True)
def test_the_second_of_four_processes_reads_its_part_of_the_rows(processes):
    parts = {(1, 1): (1, 4), (2, 1): (1, 2), (4, 1): (0, 1), (1, 2): (0, 1)}  # replicas and processes of a matrix
    assert {sizes: make_mesh("cpu", SIZE, 1, *sizes).row_share for sizes in parts} == parts
    rows = torch.arange(8.0)[:, None]
    weight = distribute_tensor(rows, make_mesh("cpu", SIZE, 1, 1, SIZE).tensor, [Shard(0)], src_data_rank=None)
    assert local_rows(weight, slice(2, 4), is_own=True).tolist() == [[2.0], [3.0]]
    assert local_rows(weight, slice(2, 3), is_own=True).tolist() == [[2.0]]  # the last ids are of no token


def test_a_vocabulary_is_divided_where_each_process_has_a_token_of_it(processes):
    mesh = make_mesh("cpu", SIZE, 1, 1, SIZE).tensor
    for size, is_divided in ((6, False), (7, True)):  # two on each of the first three processes
        model = tiny_model(vocab_size=size, eos_token_id=1, pad_token_id=0)
        divide_vocabulary(model, mesh)
        assert isinstance(model.lm_head.weight, DTensor) is is_divided


def test_large_gradients_are_summed_one_by_one_and_small_ones_together(processes):
    mesh = make_mesh("cpu", SIZE, 1, 1, 2).tensor
    grads = [torch.ones(n) for n in (2**20, 3, 5)]
    assert counts(lambda: sum_gradients(grads, mesh)) == {"allreduce": 2}


@pytest.mark.parametrize("mode", ["none", "full"])
def test_projections_of_an_adapter_share_the_sum_of_what_they_read(processes, mode):
    """Forward the results of o and down, and of their A; backward what q, k, v read, gate and up, and five B."""
    model = tiny_model(num_hidden_layers=LAYERS, num_attention_heads=4)
    add_adapter(model, LoraConfig(r=2))
    placement = FSDPPlacement(make_mesh("cpu", SIZE, 1, 1, 2), FakeRanks())
    loaded = load_model(model)
    checkpoint_activations(loaded.module, mode)
    worker = ModelWorker(loaded, optim=OptimConfig(lr=0.1), placement=placement, max_tokens=60)
    batch = weighted(worker, *((5 + i % 3, (20 + i,)) for i in range(9)))
    passes = len(worker.placement.split_passes(worker.micro_batches(batch, None)))
    with worker.placement.whole_module() as whole:  # files hold what is trained
        for held in (worker.module, whole):
            assert all(p.requires_grad == ("lora_" in name) for name, p in held.named_parameters())
    sent = counts(lambda: worker.forward_backward(batch, loss))["allreduce"]
    once = passes * (LAYERS * 11 + 1)  # the frozen embedding, which layer 0 reads, needs no gradient
    assert sent == once if mode == "none" else sent > once  # a layer that runs again adds its results again
    held = lambda: [x for x in gc.get_objects() if type(x) is _Inputs and x._read]
    assert not held()
    worker.logprobs(batch)
    assert not held()


def test_gradients_may_be_reduced_in_each_pass(processes):
    worker = make(1, 1, sync_each_pass=True)
    batch = weighted(worker, *((5 + i % 3, (20 + i,)) for i in range(9)))
    passes = len(worker.placement.split_passes(worker.micro_batches(batch, None)))
    sent = counts(lambda: worker.forward_backward(batch, loss))
    assert sent == {"allgather_base": passes * (2 * LAYERS + 1), "reduce_scatter_base": passes * (LAYERS + 1)}


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_process_holds_what_the_plan_of_memory_says(processes, tmp_path, replicas, dtype, each):
    worker = make(1, replicas, getattr(torch, dtype), sync_each_pass=each)
    worker.module.config.save_pretrained(tmp_path)
    words = [f"model={tmp_path}", f"actor.dtype={dtype}", "algo.beta=0.1", f"trainer.sync_each_microbatch={each}",
             f"trainer.data_parallel_replicate_size={replicas}"]  # fmt: skip
    config = load_run(words)
    sizes = measure_model(config.actor, trained=True)
    parts = {part.name: part for part in plan_memory(config, sizes, num_processes=SIZE).parts}
    whole = sum(p.numel() for p in worker.module.parameters())
    shards = [p.to_local() for p in worker.module.parameters() if isinstance(p, DTensor)]
    assert parts["shards of weights"].rollout == sum(x.nbytes for x in shards)
    width = getattr(torch, dtype).itemsize
    assert parts["gathered weights"].rollout == whole * width > parts["gathered weights"].update
    batch = weighted(worker, *((5 + i % 3, (20 + i,)) for i in range(9)))
    between, sync = {}, worker.placement.set_gradient_sync

    def watch(last):
        """Notes the bytes of the gradients before each pass."""
        sync(last)
        parts = [part for part in worker.module.modules() if hasattr(part, "unshard")]
        held = [p for part in parts for p in part._get_fsdp_state()._fsdp_param_group.fsdp_params]
        grads = [p.unsharded_accumulated_grad for p in held]
        grads += [p._unsharded_param.grad for p in held if hasattr(p, "_unsharded_param")]
        grads += [p.sharded_param.grad for p in held]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in grads if g is not None]
        between[last] = sum(g.nbytes for g in local)

    worker.placement.set_gradient_sync = watch
    worker.forward_backward(batch, loss)
    assert between[True] == 4 * whole / (SIZE // replicas if each else 1) <= parts["gradients"].update
    for p in worker.module.parameters():
        assert isinstance(p.grad, DTensor)
        p.grad.to_local().fill_(1.0)  # fake processes send nothing: what was received is any memory, perhaps NaN
    worker.logprobs(batch)
    assert all(isinstance(p, DTensor) for p in worker.module.parameters())  # it has its shards alone again
    rehearsed = sum(len(x) for x in _optimizer_state(worker))
    worker.optim_step()
    moments = [x for state in worker.optim.optimizer.state.values() for x in state.values() if x.numel() > 1]
    local = sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in moments)
    assert parts["adamw moments"].update == pytest.approx(local, rel=0.01) == rehearsed
    assert parts["reference model"].update == whole * width / (SIZE / replicas)

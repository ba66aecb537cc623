# ruff: noqa: E402 - the library comes before torch
"""A program: steps of the engine and updates on a fake CUDA device. It prints a line of JSON for each case.

Fake tensors have a device, a dtype and a shape, and no numbers. So a tensor on the wrong device, a kernel whose output
shape depends on values, and an operation that CUDA branches alone reach raise here as they would on a GPU. `Ledger`
counts what a GPU would be waited for. The first argument is the library built from fake_cuda.cpp, which must be loaded
before torch is; the others are the cases.
"""

import contextlib
import ctypes
import json
import sys
import tempfile
import traceback
import types
from pathlib import Path
from unittest import mock

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "engines")]

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from helpers import random_batch
from tiny import VOCABULARY, build, prompts, requests
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from whet.config import OptimConfig, PreferenceConfig, RewardModelConfig, Role, RoleConfig, SFTConfig
from whet.config.lora import LoraConfig
from whet.learners.preference import PreferenceLearner, RewardModelLearner
from whet.learners.preference_from_config import make_preference_objective
from whet.learners.sft import SFTLearner
from whet.learners.step import ExampleStep
from whet.models import attention as layouts
from whet.models import compiled, fast_layers
from whet.models.activation_checkpointing import checkpoint_activations
from whet.models.load import load_model
from whet.models.varlen import VarlenRow
from whet.observe.trace import Trace
from whet.ops import LogitsProcessors, clipped_surrogate, clipped_value, nll, token_weights
from whet.ops.kl import reference_kl
from whet.ops.policy_losses import POLICY_LOSSES
from whet.ops.policy_objective import PolicyObjective
from whet.ops.preference import PREFERENCE_LOSSES
from whet.parallel.fsdp import FSDPPlacement
from whet.parallel.mesh import make_mesh
from whet.parallel.ranks import Ranks
from whet.parallel.tensor import sum_gradients
from whet.rollout.base import Sampling
from whet.rollout.engine import packed_linear, prefill
from whet.rollout.engine import runner as runner_file
from whet.rollout.engine.engine import EmbeddedEngine
from whet.rollout.engine.fused_backbone import FusedBackbone
from whet.rollout.engine.layouts import DecodeLayout
from whet.train.memory_plan import measure_model
from whet.train.offload import Offload, OffloadPlacement
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import Divergence, ModelWorker
from whet.types import Example, TokenBatch, TokenStats, TrainSequence
from whet.util.tensor_subclasses import shard_like
from whet.util.transfer import to_host

CUDA = torch.device("cuda", 0)
LORA = LoraConfig(r=4)
MODE = FakeTensorMode(allow_non_fake_inputs=True)
aten = torch.ops.aten
VALUE_SHAPES = {"nonzero", "_unique2", "unique_dim", "masked_select", "unique_consecutive", "bincount"}
PINNED = {}
"""Storage -> a tensor that holds it: the pinned memory made so far."""
COUNTS = ("kernels", "to_host", "to_device", "blocking", "waits", "places")
VIEWS = {
    *("view", "_unsafe_view", "split", "split_with_sizes", "chunk", "transpose", "select", "slice", "unsqueeze"),
    *("squeeze", "expand", "detach", "alias", "as_strided", "permute", "t"),
}


class Ledger(TorchDispatchMode):
    """Counts kernels, copies between the devices, and waits: reads of numbers after a kernel or a copy.

    A copy is blocking if it is from or to memory that is not pinned, or was not asked to be anything else.
    """

    def __init__(self):
        super().__init__()
        self.kernels = self.to_host = self.to_device = self.blocking = self.waits = 0
        self.places = []
        self._busy = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(_fake, (args, kwargs or {}))
        name, inputs = func.overloadpacket.__name__, _tensors((args, kwargs))
        on_device = [x for x in inputs if x.is_cuda]
        if name in ("_local_scalar_dense", "item"):
            if on_device and self._busy:
                self.waits, self._busy = self.waits + 1, False
                self.places.append(_place())
            return 1.0 if inputs[0].dtype.is_floating_point else inputs[0].dtype == torch.bool or 1
        if name in VALUE_SHAPES and on_device:
            raise RuntimeError(f"the shape of {name}'s output depends on values on the device")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and on_device:
            for index in _tensors(args[1]):
                if index.dtype in (torch.bool, torch.uint8):
                    raise RuntimeError(f"{name} by a mask: the shape depends on values on the device")
                if not index.is_cuda:
                    raise RuntimeError(f"{name} by an index on the host: each use copies it")
        out = func(*args, **kwargs)
        outputs = _tensors(out)
        if name in ("_to_copy", "copy_", "to"):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], outputs[0])
            if source.is_cuda != target.is_cuda:
                self.to_device += target.is_cuda
                self.to_host += source.is_cuda
                asked = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
                if not (asked and _storage(target if source.is_cuda else source) in PINNED):
                    self.blocking += 1
                    self.places.append(_place())
        if kwargs.get("pin_memory"):
            PINNED.update({_storage(x): x for x in outputs})
        if any(x.is_cuda for x in outputs) and name not in VIEWS:
            self.kernels, self._busy = self.kernels + 1, True
        return out

    def counts(self):
        return {name: getattr(self, name) for name in COUNTS}


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def _tensors(tree):
    return [x for x in tree_iter(tree) if isinstance(x, torch.Tensor)]


def _fake(x):
    return MODE.from_tensor(x) if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) else x


def _place():
    """The line of whet's that is running."""
    frames = [f for f in traceback.extract_stack() if "/whet/" in f.filename and "/tests/" not in f.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


def moved(tensor):
    """A fake tensor on the device, of the same kind."""
    with MODE:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CUDA)


def move(module):
    """Puts parameters, buffers and other tensors of a module on the device; shared ones stay shared."""
    seen = {}
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                if id(p) not in seen:
                    with MODE:
                        seen[id(p)] = torch.nn.Parameter(moved(p), requires_grad=p.requires_grad)
                m._parameters[name] = seen[id(p)]
        for name, b in m._buffers.items():
            m._buffers[name] = None if b is None else moved(b)
        for name, b in list(vars(m).items()):
            if isinstance(b, torch.Tensor):
                setattr(m, name, moved(b))
    return module


# ---- the engine ----------------------------------------------------------------------------------------------------


def _move_engine(engine, pool):
    runner = engine._runner
    forward = runner.forward
    move(forward.loaded.module)
    backbone = getattr(forward, "_backbone", None)
    if isinstance(backbone, FusedBackbone):
        backbone._cos, backbone._sin = moved(backbone._cos), moved(backbone._sin)
        for block in backbone._blocks:
            if block.qkv_weight is not None:
                object.__setattr__(block, "qkv_weight", moved(block.qkv_weight))
            for norm in (block.before, block.after, *(block.qk_norms or ())):
                norm._least = moved(norm._least)
        backbone._norm._least = moved(backbone._norm._least)
        for product in (*backbone.products(), forward._head):
            product._merged = {i: moved(w) for i, w in product._merged.items()}
    forward.refresh = lambda *, force: None  # fake parameters have no addresses
    forward.device = runner.device = CUDA
    with MODE:
        runner.state = torch.zeros(*runner.state.shape, dtype=torch.long, device=CUDA)
        if pool:
            engine._use_pool()
            engine._runner.graphs._captures = False
        else:
            runner.layout = DecodeLayout(runner.completion_store, CUDA)


def engine_case(family="qwen3", *, pool=True, lengths=(40, 9), dtype=torch.bfloat16, lora=False,
                prefill_tokens=8192, kv_cache_tokens=None, grammars=None, **sampling):  # fmt: skip
    """Drains an engine. Returns: counts, and the most copies of a block of decode steps."""
    model = load_model(build(family, max_position_embeddings=512).to(dtype), dtype=dtype, lora=LORA if lora else None)
    options = {"prefill_tokens": prefill_tokens, "kv_cache_tokens": kv_cache_tokens, "grammars": grammars}
    engine = EmbeddedEngine(model, max_batch=64, native=False, **options)
    _move_engine(engine, pool)
    rng, blocks, ledger = np.random.RandomState(0), [], Ledger()
    prefill.varlen_unsupported_reason = lambda case: None if pool else "it is not what this case shows"

    def read(tensors):
        fakes = to_host(tensors)
        with _disable_current_modes():  # the engine reads real tokens
            make = lambda x: np.zeros(x.shape, np.float32) if x.is_floating_point() else rng.randint(4, 60, x.shape)
            return [torch.from_numpy(make(x)).to(x.dtype) for x in fakes]

    decode = engine._runner.decode

    def counted(*args, **options):
        before = ledger.counts()
        out = decode(*args, **options)
        blocks.append({name: getattr(ledger, name) - before[name] for name in COUNTS if name != "places"})
        return out

    runner_file.to_host, engine._runner.decode = read, counted
    work = requests(prompts(lengths), Sampling(**{"max_tokens": 9, "temperature": 1.0, **sampling}), group=2)
    engine.submit(work)
    done = 0
    try:
        with MODE, ledger:
            while outputs := engine.step():
                done += len(outputs)
    finally:
        runner_file.to_host = to_host
    assert done == len(work)
    return {**ledger.counts(), "blocks": blocks, "backbone": engine.backends["backbone"]}


class AnyTokens:
    """Grammars of a language that has every text."""

    start = staticmethod(lambda request: request)
    advance = staticmethod(lambda matchers, tokens, first: {})
    rows = staticmethod(lambda matchers: torch.full((len(matchers), VOCABULARY // 8), 255, dtype=torch.uint8))


ENGINE = {
    "plain": {},
    "windows": {"family": "mistral_window"},
    "constrained": {"grammars": AnyTokens()},
    "stores": {"pool": False},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 20, "top_p": 0.95},
    "min-p": {"min_p": 0.1, "min_tokens": 4, "stop_ids": (3,), "forbidden_ids": (5, 6)},
    "penalty": {"repetition_penalty": 1.2},
    "logits": {"return_logits": True},
    "moe": {"family": "qwen3_moe", "pool": False},
    "lora": {"lora": True},
    "chunks": {"prefill_tokens": 16},
    "store chunks": {"prefill_tokens": 16, "pool": False},
    "bounded": {"kv_cache_tokens": 70},  # rows are queued again
    "fp32": {"dtype": torch.float32, "pool": False},
    "gemma2": {"family": "gemma2", "pool": False},
    "gemma3": {"family": "gemma3", "pool": False},
    "gpt_oss": {"family": "gpt_oss", "pool": False},
}


# ---- updates -------------------------------------------------------------------------------------------------------


def _worker(family="qwen3", *, role="actor", dtype=torch.bfloat16, lora=False, checkpointing=None, trained=True,
            offload=False, layers=2, attention="plain", compute=None, **options):  # fmt: skip
    model = build(family, max_position_embeddings=512, num_hidden_layers=layers).to(dtype)
    loaded = load_model(model, dtype=dtype, role=role, attention=attention, lora=LORA if lora else None)
    move(loaded.module)
    if checkpointing:
        checkpoint_activations(loaded.module, checkpointing)
    if offload:
        options["placement"] = OffloadPlacement(Offload(CUDA))
    optim = OptimConfig(lr=1e-3) if trained else None
    with MODE, Ledger():
        return ModelWorker(loaded, optim=optim, dtype=compute or dtype, max_tokens=140, **options)


def _on_device(worker, counts):
    """The worker, whose passes and steps run on the device; a name and what it counts is added to counts for each."""

    def micro_batches(*args, **options):
        with _disable_current_modes():  # a plan reads integers
            planned = worker._planned_within(*args, *[options.get("trained", False)][len(args) - 3 :])
        micro_batches.most = max(micro_batches.most, len(planned))
        return [m.to(CUDA) for m in planned]

    def on_device(name, call):
        def counted(*args, **options):
            with MODE, Ledger() as ledger:
                out = call(*args, **options)
            counts.append((name, {**ledger.counts(), "micro_batches": micro_batches.most}))
            return TokenStats(logprobs=torch.randn(out.logprobs.shape)) if name == "logprobs" else out

        return counted

    micro_batches.most = 0
    for name in ("logprobs", "values", "forward_backward", "optim_step"):
        setattr(worker, name, on_device(name, getattr(worker, name)))
    worker.micro_batches = micro_batches
    return worker


def update_case(family="qwen3", *, entropy=False, teacher=False, role="actor", loss=clipped_surrogate, **options):
    """Scoring, forward_backward and an optimizer step. Returns: the counts of each, and the micro-batches."""
    batch = random_batch((40, [30, 9]), (12, [80, 40]))
    batch = batch.replace(tokens=batch.tokens % VOCABULARY, prefixes=batch.prefixes % VOCABULARY)
    names = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "values", "returns")
    columns = {name: torch.randn(batch.num_tokens) for name in names}
    weights = token_weights(batch.mask, batch.trajectory, "token-mean")
    batch = batch.with_token_columns(weights=weights, **columns)
    counts = []
    worker = _on_device(_worker(family, role=role, **options), counts)
    extra = {"entropy": entropy}
    if role == "critic":
        loss, extra = clipped_value, {}
    if teacher:
        loss, extra = (lambda x: (x.divergence, {})), {"divergence": Divergence(_worker(family, trained=False))}
    (worker.values if role == "critic" else worker.logprobs)(batch)
    worker.forward_backward(batch, loss, **extra)
    worker.optim_step()
    return {"passes": counts}


def varlen_case():
    """An update with torch's varlen_attn, and with what is compiled, as where their comparisons have passed."""
    calls, attend = [], VarlenRow.attend
    layouts.varlen_unsupported_reason = lambda case: None
    VarlenRow.attend = lambda *args, **options: (calls.append(1), attend(*args, **options))[1]
    ran, outputs = set(), {"gate_grads": 2, "gate_grads_and_product": 3}

    def kernel(case):
        def run(x, *rows):
            ran.add((name := case.function.__name__, torch._C._current_graph_task_id() != -1))  # in a backward pass
            made = tuple(torch.empty_like(x) for _ in range(outputs.get(name, 1)))
            return made if len(made) > 1 else made[0]

        return run

    with mock.patch.multiple(compiled, MIN_ROWS=2, _kernel=kernel):
        line = update_case(attention="auto", checkpointing="selective")
    assert calls, "another kernel ran"
    again = {(name, backward) for name in ("gated", "rotated") for backward in (False, True)}
    assert ran == {*again, ("gate_grads_and_product", True)}, ran
    return line


def memory_case(tokens=500, lora=False):
    """A forward pass of a sequence. Returns: bytes held for its backward pass, and those of the plan of memory."""
    layouts.varlen_unsupported_reason = lambda case: None
    worker, held = _worker(attention="auto", lora=lora), {}
    with _disable_current_modes(), tempfile.TemporaryDirectory() as folder:
        worker.module.config.architectures = [type(worker.module).__name__]
        worker.module.config.save_pretrained(folder)
        plan = measure_model(RoleConfig(model=folder, lora=LORA if lora else None), trained=True)
    own = {_storage(p) for p in worker.module.parameters()}
    keep = lambda x: held.setdefault(_storage(x), x) if x.is_cuda and _storage(x) not in own else x
    with MODE, Ledger(), worker.layers(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        ids = torch.zeros(1, tokens, dtype=torch.long, device=CUDA)
        layout = layouts.SegmentLayout((tokens,), (-1,), CUDA, attention="auto")
        worker.module.model(input_ids=ids, position_ids=layout.position_ids, whet_layout=layout, use_cache=False)
    found = sum(x.untyped_storage().nbytes() for x in held.values())
    return {"held": found, "planned": plan.activations(tokens, "none"), "layers": worker.backends["layers"]}


def fsdp_case(offloads):
    """An update of one of four processes; the others only seem to exist. Returns: where its shards lie, and counts."""
    stream = type("Stream", (), {
        "__init__": lambda self, **options: None,
        **dict.fromkeys(("synchronize", "wait_event", "wait_stream", "record"), lambda self, *_: self),
    })  # fmt: skip
    stream.record_event = lambda self, *_: stream()
    torch.cuda.Stream = torch.cuda.Event = stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.current_stream = torch.accelerator.current_stream = lambda *_: stream()
    torch.cuda.current_device = lambda: 0
    torch.Tensor.pin_memory = lambda self: PINNED.setdefault(_storage(self), self)
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    ranks = type("FakeRanks", (Ranks,), {"size": 4, "all_gather": lambda self, value: [value] * 4})()
    mesh, counts = make_mesh("cuda", 4, 1, 1), []
    worker = _worker(
        dtype=torch.float32, compute=torch.bfloat16, placement=FSDPPlacement(mesh, ranks, offloads=offloads)
    )
    worker, masters = _on_device(worker, counts), worker.optim.masters.values()
    batch = random_batch((40, [30, 9]), (12, [80, 40]))
    batch = batch.replace(tokens=batch.tokens % VOCABULARY, prefixes=batch.prefixes % VOCABULARY)
    weights = token_weights(batch.mask, batch.trajectory, "token-mean")
    worker.forward_backward(batch.with_token_columns(weights=weights), nll)
    held, name = [m.grad for m in masters], next(iter(worker.optim.masters))
    worker.optim_step()
    held += [*worker.module.parameters(), *(x for s in worker.optim.optimizer.state.values() for x in s.values())]
    with MODE, Ledger():
        held += [
            made := worker.optim.empty_moment(f"{name}.exp_avg", held[0].shape, torch.float32),
            shard_like(held[0], made),
        ]
        sum_gradients(held[:1], mesh.fsdp)
        with worker.rollout_weights() as module:
            sampled = {(str(p.device), str(p.dtype)) for p in module.parameters()}
        with worker.placement.whole_module() as module:
            saved = {str(p.device) for p in module.parameters()}
    shards = {str((x.to_local() if isinstance(x, DTensor) else x).device) for x in held}
    return {"shards": [*shards], "sampled": [*sampled], "saved": [*saved], "passes": counts,
            "device": str(worker.device), "layers": worker.backends["layers"]}  # fmt: skip


def _every_policy_loss(x):
    """All losses of policies that read no distribution of a teacher, with corrections, KL and entropy bonus."""
    objective = lambda surrogate: PolicyObjective(surrogate=surrogate, kl=reference_kl, beta=0.1, entropy_coef=0.1)
    each = [objective(loss)(x) for name, loss in POLICY_LOSSES.items() if name != "gkd"]
    return sum(loss for loss, _ in each), {f"{n}/{i}": m for i, (_, part) in enumerate(each) for n, m in part.items()}


def learner_case(make, config, *, paired=True):
    """A step of a supervised learner by its own stages. Returns: the counts of each pass.

    Args: make: the learner. config: its algorithm. paired: two answers a row, else one with a label.
    """
    rng, counts = np.random.default_rng(0), []
    ids = lambda count: rng.integers(2, VOCABULARY, count).astype(np.int32)
    examples = []
    for row in range(4):
        prefix, lengths = ids(9 + row), (30 + row, 9 + row)[: 1 + paired]
        answers = [TrainSequence(prefix=prefix, tokens=ids(n), mask=np.arange(n) > 1) for n in lengths]
        columns = {} if make is SFTLearner else {"chosen": (1.0, 0.0)} if paired else {"label": (float(row % 2),)}
        examples.append(Example(sequences=tuple(answers), columns=columns, row=row))
    role = Role.REWARD if make is RewardModelLearner else Role.ACTOR
    workers = {role: _on_device(_worker(role="critic" if role is Role.REWARD else "actor", layers=1), counts)}
    if make is PreferenceLearner and make_preference_objective(config).needs.reference:
        workers[Role.REFERENCE] = _on_device(_worker(trained=False, layers=1), counts)
    models = types.SimpleNamespace(
        role=role, workers=workers, worker=workers.get, trained=workers[role], positions=256, trace=Trace(),
        trainer=RoleTrainer(workers[role], loss=nll, role=role), finish_step=lambda worker: None,
    )  # fmt: skip
    learner = make(models, config)
    learner.update(learner.score(learner.batch(ExampleStep(index=1, examples=examples))))
    return {"passes": counts}


UPDATES = {
    "plain": {},
    "entropy": {"entropy": True},
    "truncated": {"processors": LogitsProcessors(temperature=0.7, top_k=20, top_p=0.95)},
    "forbidden": {"processors": LogitsProcessors(min_tokens=3, stop_ids=(3,), forbidden_ids=(5, 6))},
    "penalty": {"processors": LogitsProcessors(repetition_penalty=1.2)},
    "constrained": {
        "processors": LogitsProcessors(constrained=True),
        "allowed": lambda m: torch.full((len(m.targets), VOCABULARY // 8), 255, dtype=torch.uint8, device="cpu"),
    },
    "full": {"checkpointing": "full"},
    "offload": {"offload": True},
    "selective": {"checkpointing": "selective"},
    "lora": {"lora": True},
    "fp32": {"dtype": torch.float32},
    "teacher": {"teacher": True},
    "critic": {"role": "critic"},
    "moe": {"family": "qwen3_moe"},
    "windows": {"family": "mistral_window"},
    "gemma2": {"family": "gemma2"},
    "gpt_oss": {"family": "gpt_oss"},
    "losses": {"loss": _every_policy_loss, "entropy": True},
}


def _preference(*names, paired=True, **options):
    return lambda: learner_case(PreferenceLearner, PreferenceConfig(loss_type=names, **options), paired=paired)


LOSSES_WITH_OPTIONS = ("sigmoid", "kto", "apo_zero_unpaired", "exo_pair")
LEARNERS = {
    "sft": lambda: learner_case(SFTLearner, SFTConfig(log_entropy=True), paired=False),
    "dft": lambda: learner_case(SFTLearner, SFTConfig(loss_type="dft"), paired=False),
    "reward": lambda: learner_case(RewardModelLearner, RewardModelConfig(center_rewards_coefficient=0.1)),
    "dpo": _preference("sigmoid", log_entropy=True),
    "weighted": _preference("sigmoid", "sft", loss_weights=(1.0, 0.1), use_weighting=True, ld_alpha=0.5),
    "kto": _preference("kto", paired=False),
    "apo_zero_unpaired": _preference("apo_zero_unpaired", paired=False),
    "exo_pair": _preference("exo_pair", label_smoothing=1e-3),
    **{name: _preference(name) for name in PREFERENCE_LOSSES if name not in LOSSES_WITH_OPTIONS},
}


# ---- mistakes that must show ---------------------------------------------------------------------------------------


def mistake_case(mistake):
    """Runs a mistake. Returns: the counts."""
    with MODE, Ledger() as ledger:
        mistake(torch.ones(4, device=CUDA))
    return ledger.counts()


MISTAKES = {
    "device": lambda x: x + torch.ones(4, device="cpu"),
    "shape": lambda x: x.nonzero(),
    "index": lambda x: x[torch.zeros(2, dtype=torch.long)],
    "read": lambda x: (float(x.sum()), x[0].item() + x[1].item(), float(x.max())),
}
CASES = {
    **{f"engine/{name}": lambda o=options: engine_case(**o) for name, options in ENGINE.items()},
    **{f"update/{name}": lambda o=options: update_case(**o) for name, options in UPDATES.items()},
    "update/varlen": varlen_case,
    "memory/plain": memory_case,
    "memory/lora": lambda: memory_case(lora=True),
    "fsdp/device": lambda: fsdp_case(False),
    "fsdp/host": lambda: fsdp_case(True),
    **{f"learner/{name}": case for name, case in LEARNERS.items()},
    **{f"mistake/{name}": lambda m=mistake: mistake_case(m) for name, mistake in MISTAKES.items()},
}


def _norm_of_a_gpu(x, shape, weight=None, eps=None, own=torch.nn.functional.rms_norm):
    """One kernel that keeps its input, as on a GPU; a CPU build of torch would run a formula for it."""
    if not (x.is_cuda and torch.is_grad_enabled()):
        return own(x, shape, weight, eps)
    return fast_layers._KernelNorm.apply(x, x.new_ones(shape) if weight is None else weight)


def _install():
    """Replaces what a CPU build of torch lacks."""
    torch.set_num_threads(1)
    check = TokenBatch.__post_init__

    def check_numbers(batch):
        with _disable_current_modes():
            check(batch)

    TokenBatch.__post_init__ = check_numbers
    fast_layers._is_plain = lambda layer: True  # fake parameters are of another class
    fast_layers._is_close = lambda *numbers, **options: True  # there are none
    torch.nn.functional.rms_norm = _norm_of_a_gpu
    packed_linear._is_plain = lambda tensor: tensor.is_contiguous()
    waits = type("Stream", (), {"synchronize": lambda self: None})
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_stream = lambda *_: waits()


if __name__ == "__main__":
    _install()
    for name in sys.argv[2:]:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                line = CASES[name]()
            except Exception as error:
                line = {"error": "".join(traceback.format_exception(error)[-6:])}
        print(json.dumps({"case": name, **line}), flush=True)

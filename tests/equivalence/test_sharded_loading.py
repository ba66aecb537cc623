"""Several processes load a model: none has all of it, and all values are those of the files."""

import ctypes
import functools
import logging
import resource
import sys

import pytest
import torch
from families import PACKABLE, REFUSED, tiny
from helpers import full
from mesh_programs import biased_model, join
from processes import as_torchrun, free_port, needs_gloo, start, wait
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from whet.config import OptimConfig, SupervisedTrainingConfig
from whet.config.lora import LoraConfig
from whet.errors import ConfigError, OtherRankError
from whet.models.heads import add_score_head
from whet.models.load import load_model, save_model
from whet.models.weight_files import InFile, _is_whole, check_finite, in_file
from whet.parallel.fsdp import FSDPPlacement
from whet.parallel.loading import _digest, load_sharded, receive
from whet.parallel.mesh import make_mesh
from whet.parallel.ranks import Ranks
from whet.train.supervised_models import SupervisedModels
from whet.train.worker import ModelWorker

M_MMAP_THRESHOLD = -3
"""Of mallopt: larger blocks are returned as soon as they are freed."""


def save_llama(folder, width, layers):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 4 * width}
    config = LlamaConfig(vocab_size=512, hidden_size=width, num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


def most_memory():
    """The most bytes that this process has had in memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def whole(load):
    """The same function, but weights do not stay in their files: rank 0 reads all and sends them."""
    return lambda in_files=False: load()


def load_three_times(rank, size, folder, port):
    """Loads a tiny model of as many layers, after which only weights need more memory, the one that is measured, and it
    on rank 0."""
    as_torchrun(rank, size, port)
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc: memory that was freed does not stay with the process
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    load = lambda name: SupervisedModels(
        actor=str(folder / name), tokenizer=str(folder / "tokenizer"), config=SupervisedTrainingConfig()
    )
    load("tiny")
    before = most_memory()
    weights = dict(load("model").trained.module.named_parameters())
    peak = most_memory() - before
    shards = sum(p.to_local().nbytes for p in weights.values() if isinstance(p, DTensor))
    torch.save((peak, shards, {n: p.full_tensor().detach() for n, p in weights.items()}), folder / f"{rank}.pt")
    del weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whet.train.role_workers.load_sharded", lambda ranks, load: load_sharded(ranks, whole(load)))
        load("model")
    torch.save(most_memory() - before, folder / f"whole-{rank}.pt")


@needs_gloo
@pytest.mark.timeout(200)
def test_a_rank_holds_its_shards_and_one_layer_while_a_model_is_loaded(tmp_path, tokenizer):
    save_llama(tmp_path / "model", 256, 48)
    save_llama(tmp_path / "tiny", 16, 48)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    wait(start(2, load_three_times, tmp_path, free_port()), tmp_path)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    nbytes = sum(p.nbytes for p in saved.parameters())
    assert torch.load(tmp_path / "whole-0.pt") > 0.9 * nbytes, "the measure shows a rank that reads all"
    for rank in range(2):
        peak, shards, weights = torch.load(tmp_path / f"{rank}.pt")
        assert 0.4 * nbytes < shards <= peak <= 0.6 * nbytes
        assert all(torch.equal(weights[name], p) for name, p in saved.named_parameters())


def save_models(folder):
    """Saves models whose weights can stay in their files, and models whose weights can't."""
    torch.manual_seed(0)
    model = biased_model()  # 263 rows, which do not divide evenly
    model.save_pretrained(folder / "one file")
    model.bfloat16().save_pretrained(folder / "bf16, several files", max_shard_size="20KB")
    save_llama(folder / "tied", 16, 2)
    loaded = load_model(folder / "tied", lora=LoraConfig(r=2, modules_to_save=["norm"]))
    for p in loaded.adapter.parameters():
        p.data.normal_()
    save_model(loaded, None, folder / "adapter")
    critic = load_model(folder / "tied", role="critic")
    critic.score_head.weight.data.normal_()
    save_model(critic, None, folder / "critic")
    AutoModelForSequenceClassification.from_pretrained(folder / "one file", num_labels=1).save_pretrained(
        folder / "scores"
    )
    tied = LlamaForCausalLM.from_pretrained(folder / "tied")
    both = load_model(add_score_head(tied, torch.randn(1, 16), shared=True))
    save_model(both, None, folder / "both heads")
    sizes = {"vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=2)).save_pretrained(folder / "experts")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, rope_parameters=rope)).save_pretrained(folder / "padded")
    LlamaForCausalLM.from_pretrained(folder / "tied").save_pretrained(folder / "doubled")
    file = folder / "doubled/model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file, {"format": "pt"})


CASES = {
    "one file": ({}, {}),
    "bf16, several files": ({}, {}),
    "bf16, several files, computed in bf16": ({}, {"dtype": torch.bfloat16}),
    "bf16, several files, frozen": ({"role": "reference"}, {"dtype": torch.bfloat16, "optim": None}),
    "one file, frozen and read in bf16": ({"role": "teacher", "dtype": "bfloat16"}, {"optim": None}),
    "tied": ({}, {}),
    "tied, new adapter": ({"lora": LoraConfig(r=2, modules_to_save=["norm"])}, {"dtype": torch.bfloat16}),
    "tied, new critic": ({"role": "critic"}, {}),
    "tied, both heads": ({"score_head": True}, {}),
    "adapter": ({}, {}),
    "critic": ({"role": "critic"}, {}),
    "scores": ({"role": "reward"}, {"optim": None}),
    "both heads": ({}, {}),
}
"""Name: the folder, in front of a comma if there is no folder of all of it -> options of load_model, of ModelWorker."""
WHOLE = {
    "adapter, merged": ({"role": "reference"}, {"optim": None}, "its adapter is merged into them"),
    "experts": ({}, {}, "transformers converts model.layers.0.mlp.experts.gate_up_proj as it reads it"),
    "padded": ({}, {}, "they tell how it trains"),
    "doubled": ({}, {}, "its config ties lm_head.weight to model.embed_tokens.weight"),
}
"""And why rank 0 reads all."""


SAME = ("name", "packable", "lm_head", "saved_dtype", "outputs")
"""Fields of a LoadedModel."""


def folder_of(folder, name):
    return next(path for path in (folder / name, folder / name.rpartition(", ")[0]) if path.is_dir())


def facts(loaded, worker):
    """All that two ways of loading have in common: shards, buffers and settings, by name."""
    module, found = worker.module, {}
    for name, p in module.named_parameters(remove_duplicate=False):
        found[name] = (p.to_local() if isinstance(p, DTensor) else p).detach().clone(), p.requires_grad
    found |= {name: (buffer.clone(), None) for name, buffer in module.named_buffers()}
    config = module.config.to_dict(), module.name_or_path, module.can_generate() and module.generation_config.to_dict()
    return found, (config, type(module), [getattr(loaded, name) for name in SAME])


def assert_same(one, other, what):
    """Both are results of `facts`."""
    (found, settings), (expected, expected_settings) = one, other
    assert settings == expected_settings and found.keys() == expected.keys(), what
    for key, (values, trained) in expected.items():
        assert found[key][1] is trained and found[key][0].dtype is values.dtype, (what, key)
        assert torch.equal(found[key][0], values), (what, key)


def compare_ways(rank, size, folder, meshes, names):
    """Loads each model in both ways on each mesh, and compares them bit by bit."""
    ranks = join(rank, size, folder)
    for mesh in meshes:
        for name in names:
            options, of_worker, *reason = {**CASES, **WHOLE}[name]
            load = functools.partial(load_model, folder_of(folder, name), on_cpu=True, **options)
            ways, lines = [], []
            handler = logging.Handler()
            handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
            logging.getLogger("whet").addHandler(handler)
            logging.getLogger("whet").setLevel(logging.INFO)
            for way in (load, whole(load)):
                loaded = load_sharded(ranks, way)
                unread = [n for n, p in loaded.module.named_parameters() if in_file(p)]
                assert bool(unread) == (way is load and not reason), (name, unread)
                optim = of_worker.get("optim", OptimConfig())
                placement = FSDPPlacement(make_mesh("cpu", size, *mesh), ranks)
                worker = ModelWorker(loaded, **{**of_worker, "optim": optim}, max_tokens=80, placement=placement)
                ways.append(facts(loaded, worker))
            logging.getLogger("whet").removeHandler(handler)
            sent = [line for line in lines if line.startswith("rank 0 reads all weights of ")]
            assert len(sent) == len(reason) * (rank == 0) and all(reason[0] in line for line in sent), (name, lines)
            assert_same(*ways, (mesh, name))


@needs_gloo
@pytest.mark.timeout(200)
@pytest.mark.parametrize("size, meshes, names", [
    (2, [(1, 1, 1)], ["bf16, several files", "tied, new adapter", "doubled"]),
    full(2, [(1, 1, 1)], [*CASES, *WHOLE]),
    full(4, [(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)], ["one file", "tied, new adapter", "critic", "padded"]),
])  # fmt: skip
def test_weights_read_by_each_rank_are_those_that_rank_0_sends(tmp_path, size, meshes, names):
    """Each mesh is (context_parallel_size, data_parallel_replicate_size, tensor_parallel_size)."""
    save_models(tmp_path)
    wait(start(size, compare_ways, tmp_path, meshes, names), tmp_path, 180)


@pytest.mark.full
@pytest.mark.parametrize("family", [*PACKABLE, *REFUSED])
def test_a_model_of_any_family_is_read_from_its_files_or_whole(tmp_path, family):
    """transformers merges experts, of which GptOss has them in one tensor; refused families must run themselves."""
    tiny(family, torch.bfloat16).save_pretrained(tmp_path)
    load = functools.partial(load_model, tmp_path, on_cpu=True)
    loaded = load_sharded(Ranks(), load)
    if family in REFUSED or family == "Qwen3Moe":
        assert not any(map(in_file, loaded.module.parameters()))
    else:
        assert all(map(in_file, loaded.module.parameters()))
        receive(loaded.module.parameters(), torch.device("cpu"), Ranks())
    whole_model = load()
    assert_same(facts(loaded, loaded), facts(whole_model, whole_model), family)


def meet_faults(rank, size, folder):
    """Loads folders in which something is wrong: all ranks raise, or rank 0 reads all."""
    ranks = join(rank, size, folder)
    loads = lambda name: load_sharded(ranks, functools.partial(load_model, folder / name, on_cpu=True))
    for name, text in (("torn", "can't load .*ncomplete"), ("missing", "has no weights for 1 parameters.*norm")):
        with pytest.raises(ConfigError, match=text):
            loads(name)
    place = FSDPPlacement(make_mesh("cpu", size, 1, 1, 1), ranks)
    for name, text in (("nan", "NaN or infinite numbers in lm_head.weight"), ("gone", "can't read the weights in")):
        loaded = loads(name)
        with pytest.MonkeyPatch.context() as patch:
            if name == "gone" and rank == 1:
                patch.setattr("whet.parallel.loading.safe_open", lambda *_: open(folder / "nothing"))
            error = ConfigError if rank == 1 else OtherRankError
            text = text if rank == 1 else "rank 1 of 2 failed: ConfigError; its own output"
            with pytest.raises(error, match=text):
                place.prepare(loaded.module, None)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # on a host without the files
            patch.setattr("whet.parallel.loading._digest", lambda file: None)
        assert not any(map(in_file, loads("whole").module.parameters()))


def test_a_transposed_square_is_another_tensor_and_numbers_whose_norm_overflows_are_finite():
    empty = torch.empty(3, 3)
    assert _is_whole(empty.view(3, 3), empty) and not _is_whole(empty.T, empty)
    check_finite(torch.full((9,), 3e38), "m", "w")
    with pytest.raises(ConfigError, match="NaN or infinite numbers in w"):
        check_finite(torch.tensor([1.0, torch.inf]), "m", "w")


def test_files_that_differ_in_length_or_in_the_middle_are_told_apart(tmp_path):
    zeros, digests = bytes(2**20), set()
    for name, content in (("a", zeros), ("b", zeros + bytes(9)), ("c", zeros[: 2**19] + b"x" + zeros[: 2**19 - 1])):
        (tmp_path / name).write_bytes(content)
        digests.add(_digest(str(tmp_path / name)))
    assert len(digests) == 3 and _digest(str(tmp_path / "none")) is None


def test_what_is_read_is_rounded_as_the_model_is_whatever_its_parameters_are_by_then(tmp_path):
    save_file({"w": torch.full((2, 3), 1 / 3)}, tmp_path / "m.safetensors")
    p = nn.Parameter(torch.empty(2, 3, device="meta"), requires_grad=False)
    p.whet_in_file = InFile(str(tmp_path / "m.safetensors"), "w", torch.bfloat16)
    receive([p], torch.device("cpu"), Ranks())
    assert torch.equal(p, torch.full((2, 3), 1 / 3).bfloat16().float()) and not p.requires_grad


@needs_gloo
@pytest.mark.timeout(200)
def test_what_is_wrong_with_a_file_is_said_and_no_rank_waits(tmp_path):
    model = biased_model()
    for name in ("whole", "torn", "missing", "nan", "gone"):
        model.save_pretrained(tmp_path / name)
    file = tmp_path / "torn/model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    tensors = load_file(tmp_path / "whole/model.safetensors")
    tensors["lm_head.weight"][-1, 3] = float("nan")  # of rank 1
    save_file(tensors, tmp_path / "nan/model.safetensors", {"format": "pt"})
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "missing/model.safetensors", {"format": "pt"})
    wait(start(2, meet_faults, tmp_path), tmp_path)

"""Adapters in PEFT's format: equal to PEFT's own forward and gradients, to and from its files, merged, and refused."""

import json

import pytest
import torch
import transformers
from families import BATCH, one_by_one, tiny, worst
from safetensors.torch import load_file, save_file

from whet.config import LoraConfig, OptimConfig
from whet.errors import ConfigError
from whet.models.load import load_model, save_model
from whet.models.lora import adapter_tensors, merged_model
from whet.models.lora_layers import Adapter, merged_weights
from whet.storage.model_paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from whet.train.worker import ModelWorker

peft = pytest.importorskip("peft")
WEIGHTED = BATCH.replace(weights=torch.linspace(0.1, 1.0, BATCH.num_tokens))
nll = lambda x: (-x.logprobs, {})


@pytest.fixture
def base(tmp_path):
    tiny("Qwen3").save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def stirred(loaded, seed=1):
    """An adapter that says something: all that is trained is moved."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in loaded.module.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.1)
    return loaded


def adapted(base, role="actor", **fields):
    return stirred(load_model(base, role=role, lora=LoraConfig(r=2, lora_alpha=4, **fields)))


def read(loaded):
    return ModelWorker(loaded).logprobs(BATCH).logprobs


# ---- equality with PEFT ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}, {"modules_to_save": ("norm", "lm_head")}],
    ids=["all-linear", "rslora", "modules"],
)
def test_packed_numbers_and_gradients_are_those_of_peft_padded(base, tmp_path, fields):
    loaded = adapted(base, **fields)
    scale = 4 / 2**0.5 if "use_rslora" in fields else 4 / 2
    assert {layer.scaling["default"] for layer in loaded.adapter.layers.values()} == {scale}
    save_model(loaded, None, tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"), is_trainable=True
    )
    want = one_by_one(model, BATCH, attention=None)
    worker = ModelWorker(loaded, optim=OptimConfig())
    torch.testing.assert_close(worker.logprobs(BATCH).logprobs, want.detach(), atol=1e-6, rtol=1e-6)
    (-want * WEIGHTED.weights * BATCH.mask).sum().backward()
    worker.forward_backward(WEIGHTED, nll)
    theirs = {n.removeprefix("base_model.model."): p.grad for n, p in model.named_parameters() if p.requires_grad}
    theirs = {n.replace(".default.", ".").replace(".modules_to_save", ""): g for n, g in theirs.items()}
    if "modules_to_save" in fields:  # whet trains a tied pair as the one tensor that it is, PEFT a copy of each
        tied = theirs.pop("lm_head.weight") + theirs.pop("model.embed_tokens.weight")
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"] = tied
    ours = {n: p.grad for n, p in adapter_tensors(loaded.module).items()}
    assert worst(ours, theirs) < 1e-4  # of fp32 beside fp32, in a model of large numbers


def test_a_fresh_adapter_adds_nothing_and_alone_is_trained(base):
    loaded = load_model(base, lora=LoraConfig(r=2))
    assert loaded.packable and loaded.adapter.is_untrained()
    assert torch.equal(read(loaded), read(load_model(base)))
    loaded = load_model(base, lora=LoraConfig(r=2))
    frozen = {n for n, p in loaded.module.named_parameters() if not p.requires_grad}
    worker = ModelWorker(loaded, optim=OptimConfig())
    worker.forward_backward(WEIGHTED, nll)
    worker.optim_step()
    own = sum(p.numel() for p in loaded.adapter.parameters())
    held = sum(t.numel() for t in worker.optim.masters.values())
    moments = sum(v.numel() for e in worker.optim.optimizer.state.values() for v in e.values() if v.dim())
    assert (held, moments) == (own, 2 * own)
    assert all(p.grad is None for n, p in loaded.module.named_parameters() if n in frozen)
    assert len(frozen) == len(list(load_model(base).module.parameters()))
    assert worker.backends["adapter"].startswith("PEFT's layers around 14")


def test_the_seed_says_how_an_adapter_begins(base):
    make = lambda seed, **fields: adapter_tensors(load_model(base, lora=LoraConfig(r=2, **fields), seed=seed).module)
    first = make(0)
    assert all(torch.equal(p, first[n]) for n, p in make(0).items())
    for other in (make(1), make(0, init_lora_weights="gaussian")):
        assert any(not torch.equal(p, first[n]) for n, p in other.items())


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_what_is_saved_loads_with_peft_and_here_and_is_the_same_model(base, tmp_path, role):
    loaded = adapted(base, role)
    folder = save_model(loaded, None, tmp_path / "adapter")
    assert {p.name for p in folder.iterdir()} >= {ADAPTER_WEIGHTS, ADAPTER_CONFIG}
    assert not (folder / "model.safetensors").exists()
    kind = transformers.AutoModelForCausalLM
    options = {}
    if role == "critic":
        kind, options = transformers.AutoModelForSequenceClassification, {"num_labels": 1}
    model = peft.PeftModel.from_pretrained(kind.from_pretrained(base, **options), str(folder)).eval()
    back = load_model(str(folder), role=role)
    ids, seen = torch.arange(2, 12)[None], []
    for module in (loaded.module.eval(), back.module.eval(), model):
        if module is not model:
            module.set_attn_implementation("sdpa")
        seen.append(module(input_ids=ids, use_cache=False).logits)
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0], atol=1e-6, rtol=1e-6)
    again = adapter_tensors(back.module)
    assert all(torch.equal(p, again[n]) for n, p in adapter_tensors(loaded.module).items())
    assert json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == base


def test_an_adapter_that_peft_has_saved_is_read(base, tmp_path):
    own = {"rank_pattern": {"layers.0.self_attn.v_proj": 2}, "alpha_pattern": {"layers.1.self_attn.v_proj": 11}}
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["v_proj"], init_lora_weights=False, lora_dropout=0.1, **own
    )
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(tmp_path / "adapter")
    loaded = load_model(str(tmp_path / "adapter"))
    assert loaded.adapter.dropout == 0.1 and len(loaded.adapter.layers) == 2
    want = one_by_one(model.eval(), BATCH, attention=None).detach()
    torch.testing.assert_close(read(loaded), want, atol=1e-6, rtol=1e-6)
    reference = load_model(str(tmp_path / "adapter"), role="reference")  # only read: as a plain model
    assert reference.adapter is None and type(reference.module) is transformers.Qwen3ForCausalLM
    torch.testing.assert_close(read(reference), read(loaded), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_merged_it_is_a_plain_model_of_the_same_numbers(base, tmp_path, role):
    if role == "actor":  # of a family whose layers have a bias
        model = tiny("Qwen2")
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(p)
        model.save_pretrained(base)
    loaded = adapted(base, role)
    save_model(loaded, None, tmp_path / "merged", merge=True)
    plain = load_model(str(tmp_path / "merged"), role=role)
    assert plain.adapter is None and loaded.adapter is not None
    kinds = ("scores", "values") if role == "critic" else ("logprobs",)
    for kind in kinds:
        ours, theirs = (getattr(ModelWorker(x), kind)(BATCH) for x in (loaded, plain))
        ours, theirs = (x if isinstance(x, torch.Tensor) else x.logprobs for x in (ours, theirs))
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


def test_masters_of_an_adapter_are_taken_up_to_the_bit_and_merged(base, tmp_path):
    def worker(seed):
        return ModelWorker(stirred(adapted(base), seed), optim=OptimConfig(lr=1e-3), dtype=torch.bfloat16)

    first, second = worker(1), worker(2)
    first.forward_backward(WEIGHTED, nll)
    first.optim_step()
    (tmp_path / "kept").mkdir()
    first.save(tmp_path / "kept")
    second.load(tmp_path / "kept")
    masters = first.optim.masters
    assert any(not torch.equal(m, first.optim.params[name].float()) for name, m in masters.items())
    assert all(torch.equal(second.optim.masters[name], m) for name, m in masters.items())
    name, layer = next(iter(first.loaded.adapter.layers.items()))
    a, b = (masters[f"{name}.lora_{x}.default.weight"] for x in "AB")
    want = layer.get_base_layer().weight.float() + 2.0 * (b @ a)
    got = merged_model(first.module, masters).get_submodule(name).weight
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_engines_of_their_own_are_given_the_merged_weights_under_the_bases_names(base):
    loaded = adapted(base)
    worker = ModelWorker(loaded, optim=OptimConfig())
    named = dict(worker.named_weights())
    plain = merged_model(loaded.module)
    assert named.keys() == dict(plain.named_parameters(remove_duplicate=False)).keys()
    assert all(torch.equal(named[n], p) for n, p in plain.named_parameters())
    reference = ModelWorker(load_model(base, role="reference"))
    reference.load_weights(worker.named_weights())
    torch.testing.assert_close(
        reference.logprobs(BATCH).logprobs, worker.logprobs(BATCH).logprobs, atol=1e-5, rtol=1e-5
    )
    assert set(dict(worker.trained_weights())) == {n for n, p in loaded.module.named_parameters() if p.requires_grad}


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_of_a_fresh_adapter_is_the_bare_base_bit_for_bit(base):
    loaded = load_model(base, lora=LoraConfig(r=2))
    view = ModelWorker(loaded.snapshot_view())
    stirred(loaded)
    assert torch.equal(view.logprobs(BATCH).logprobs, read(load_model(base)))
    assert not torch.equal(ModelWorker(loaded, optim=OptimConfig()).logprobs(BATCH).logprobs, read(load_model(base)))
    with pytest.raises(ConfigError, match="is a view"):
        view.load_weights([])


@pytest.mark.parametrize("modules", [(), ("norm", "embed_tokens")])
def test_the_reference_of_a_trained_adapter_is_what_it_was(base, modules):
    """Also in the dtype that the actor has been given, and with modules that are trained whole."""
    loaded = adapted(base, modules_to_save=modules)
    owner = ModelWorker(loaded, optim=OptimConfig(lr=0.1), dtype=torch.bfloat16)
    want = owner.logprobs(BATCH).logprobs
    view = ModelWorker(loaded.snapshot_view())
    copied = sum(t.numel() for _, t in view.loaded.snapshot.tensors)
    assert copied == sum(p.numel() for p in loaded.module.parameters() if p.requires_grad)
    owner.forward_backward(WEIGHTED, nll)
    owner.optim_step()
    assert torch.equal(view.logprobs(BATCH).logprobs, want)
    assert not torch.equal(owner.logprobs(BATCH).logprobs, want)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def gradients(base, *, seed=0, passes=1, **options):
    loaded = adapted(base, lora_dropout=0.3)
    worker = ModelWorker(loaded, optim=OptimConfig(name="sgd", lr=1e-3), seed=seed, **options)
    for _ in range(passes):
        worker.optim.step() if passes > 1 else None
        worker.forward_backward(WEIGHTED, nll)
    return {n: p.grad.clone() for n, p in worker.module.named_parameters() if p.requires_grad}


def test_draws_of_dropout_go_with_the_tokens_whatever_is_packed_with_them(base):
    first = gradients(base)
    for options in ({"max_sequences": 1}, {"max_sequences": 2}, {"max_tokens": 64}):
        for name, gradient in gradients(base, **options).items():
            torch.testing.assert_close(gradient, first[name], atol=1e-5, rtol=1e-4)


def test_dropout_is_on_in_training_alone_and_its_draws_have_an_address(base, tmp_path):
    loaded = adapted(base, lora_dropout=0.3)
    worker = ModelWorker(loaded, optim=OptimConfig())
    plain = ModelWorker(adapted(base), optim=OptimConfig())
    assert torch.equal(worker.logprobs(BATCH).logprobs, plain.logprobs(BATCH).logprobs)
    losses = [worker.evaluate(WEIGHTED, nll)["loss"].value for _ in range(2)]
    drawn = [worker.forward_backward(WEIGHTED, nll)["loss"].value for _ in range(2)]
    assert losses[0] == losses[1] == plain.evaluate(WEIGHTED, nll)["loss"].value
    assert worker.evaluate(WEIGHTED, nll)["loss"].value == losses[0]  # off again after a pass of training
    assert len({*losses, *drawn}) == 2  # the passes of one update draw the same
    first = gradients(base)
    torch.manual_seed(7)  # no global generator has a part in it
    same = lambda other: all(torch.equal(g, first[n]) for n, g in other.items())
    assert same(gradients(base)) and not same(gradients(base, seed=1))
    worker.optim_step()
    again = ModelWorker(adapted(base, lora_dropout=0.3), optim=OptimConfig())
    (tmp_path / "saved").mkdir()
    worker.save(tmp_path / "saved")
    again.load(tmp_path / "saved")
    second = worker.forward_backward(WEIGHTED, nll)["loss"].value
    assert second not in drawn  # another update, other draws
    assert again.forward_backward(WEIGHTED, nll)["loss"].value == second  # however many passes the first one had


def test_a_layer_that_is_recomputed_draws_the_same(base):
    from whet.models.activation_checkpointing import checkpoint_activations

    want = gradients(base)
    loaded = adapted(base, lora_dropout=0.3)
    checkpoint_activations(loaded.module, "full")
    worker = ModelWorker(loaded, optim=OptimConfig(name="sgd"))
    worker.forward_backward(WEIGHTED, nll)
    for name, p in loaded.module.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, want[name], atol=1e-6, rtol=1e-5)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_modules": ["q_proj", "q_prj"]}, "did you mean q_proj"),
        ({"target_modules": ".*nothing"}, "can't put an adapter into"),
        ({"target_modules": ["lm_head"]}, "an adapter on the lm_head"),
        ({"modules_to_save": ("lm_haed",)}, "did you mean lm_head"),
        ({"modules_to_save": ("q_proj",)}, "a module with an adapter"),
    ],
)
def test_names_that_fit_nothing_or_the_wrong_thing_are_refused(base, fields, said):
    with pytest.raises(ConfigError, match=said):
        load_model(base, lora=LoraConfig(r=2, **fields))


def changed(folder, **fields):
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def without_a_layer(folder):
    found = load_file(folder / ADAPTER_WEIGHTS)
    found.pop(sorted(found)[0])
    save_file(found, folder / ADAPTER_WEIGHTS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: changed(f, peft_type="IA3"), "of kind 'IA3'"),
        (lambda f: changed(f, use_dora=True), "use_dora=True, which whet does not run"),
        (lambda f: changed(f, init_lora_weights="pissa_niter_4"), "init_lora_weights='pissa_niter_4', which whet does"),
        (lambda f: changed(f, alora_invocation_tokens=[1]), "alora_invocation_tokens="),
        (lambda f: changed(f, bias="all"), "bias='all'"),
        (lambda f: changed(f, base_model_name_or_path=None), "does not name its base model"),
        (lambda f: changed(f, base_model_name_or_path="/nowhere/at/all"), "if the model has moved"),
        (lambda f: changed(f, base_model_name_or_path=str(f)), "another adapter names it as its base model"),
        (lambda f: changed(f, r=4), "is \\[2, 32\\] there and \\[4, 32\\] here"),
        (lambda f: (f / ADAPTER_CONFIG).write_text("{"), "can't read adapter_config.json"),
        (lambda f: (f / ADAPTER_WEIGHTS).write_bytes(b"no"), "can't read adapter_model.safetensors"),
        (lambda f: (f / ADAPTER_WEIGHTS).rename(f / "adapter_model.bin"), "is a pickle"),
        (without_a_layer, "here and not there"),
    ],
)
def test_a_broken_adapter_is_refused_with_the_reason(base, tmp_path, change, said):
    folder = save_model(adapted(base), None, tmp_path / "adapter")
    change(folder)
    with pytest.raises(ConfigError, match=said):
        load_model(str(folder))


def test_an_adapter_is_never_put_on_another(base, tmp_path):
    folder = save_model(adapted(base), None, tmp_path / "adapter")
    with pytest.raises(ConfigError, match="an adapter already"):
        load_model(str(folder), lora=LoraConfig())
    with pytest.raises(ConfigError, match="has an adapter already"):
        load_model(load_model(str(folder)).module, lora=LoraConfig())
    with pytest.raises(ConfigError, match="LM head"):
        load_model(str(save_model(adapted(base, "critic"), None, tmp_path / "critic")))


def test_the_weights_of_a_plain_model_are_its_parameters(base):
    module = load_model(base).module
    named = dict(merged_weights(module))
    assert all(named[n].data_ptr() == p.data_ptr() for n, p in module.named_parameters(remove_duplicate=False))
    assert Adapter.from_module(module) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_modules": ["q_prj"]}, "unknown lora.target_modules 'q_prj'; did you mean q_proj"),
        ({"target_modules": r".*\.q_prj"}, "fits no linear layer; choose from .*q_proj"),
        ({"r": 999}, r"lora.r=999 \(the rank\) is above the width of model.layers.0.mlp.down_proj, which is \d+"),
    ],
)
def test_an_adapter_that_fits_no_layer_is_refused_before_weights_are_read(base, monkeypatch, fields, said):
    monkeypatch.setattr("whet.models.load.read_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=said):
        load_model(base, lora=LoraConfig(**fields))


def test_a_rank_beyond_what_comes_out_of_key_heads_is_a_warning(base, caplog):
    out = load_model(base).module.model.layers[0].self_attn.k_proj.out_features
    load_model(base, lora=LoraConfig(r=out + 1, target_modules=["k_proj"]))
    assert f"lora.r={out + 1} (the rank) exceeds the output width of" in caplog.text

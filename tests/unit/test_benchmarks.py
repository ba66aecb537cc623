"""The benchmarks' command lines, workloads and JSON. The figures themselves are tested nowhere: they are measured."""

import dataclasses
import doctest
import importlib
import json
import os
import sys
from pathlib import Path

import pytest
from helpers import full

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = (
    "common", "tasks", "sides", "machine", "grpo_step", "learning_curve", "train_sides", "train_step",
    "floor", "rollout_sides", "rollout", "learning_tasks", "presets", "supervised_sides", "sft_step", "demo_seeds",
    "same_script", "scaling", "report_page",
)  # fmt: skip


@pytest.fixture
def scripts(monkeypatch):
    """The scripts as modules, imported as when one of them is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name)


def test_examples_in_docstrings_run(scripts):
    tried = [doctest.testmod(m) for m in scripts.values()]
    assert sum(t.failed for t in tried) == 0 and sum(t.attempted for t in tried) >= 8


# ---- command lines ---------------------------------------------------------------------------------------------------


def test_defaults_are_the_recorded_setting(scripts):
    args = scripts["grpo_step"].arguments([])
    assert (args.workloads, args.rounds, args.shape, args.dtype) == (["A", "B", "C"], 3, "25m", "float32")
    args = scripts["learning_curve"].arguments([])
    assert (args.seeds, args.steps, args.last) == (3, 60, 20)
    assert scripts["machine"].arguments(["--rows", "8,64"]).rows == [8, 64]


@pytest.mark.parametrize(
    ("name", "argv", "said"),
    [
        ("grpo_step", ["--workloads", "A,Z"], "--workloads Z: known are A, B, C"),
        ("grpo_step", ["--rounds", "0"], "at least 1"),
        ("train_step", ["--workloads", "Z"], "--workloads Z: known are A, B, C"),
        ("train_step", ["--sides", "verl"], "--sides verl: known are whet, naive, trl"),
        ("learning_curve", ["--steps", "5", "--last", "6"], "1..--steps (5)"),
        ("learning_curve", ["--seeds", "1"], "no spread"),
        ("rollout", ["--models", "1m,9b"], "--models 9b: known are tiny, 1m, 25m, smollm2, 0.6b"),
        ("rollout", ["--engines", "sglang"], "known are whet, generate, continuous, vllm"),
        ("rollout", ["--workloads", "25m-fp64-*"], "no workload"),
        ("rollout", ["--rounds", "0"], "at least 1"),
        ("presets", ["--out", "x", "--methods", "grpo,qrpo"], "--methods qrpo: known are grpo, grpo_without_kl"),
        ("presets", ["--out", "x", "--seeds", "0"], "at least 1"),
        ("demo_seeds", ["--seeds", "0"], "at least 1"),
        ("sft_step", ["--kinds", "sft,rm"], "--kinds rm: known are sft, dpo"),
        ("sft_step", ["--batch", "1"], "at least 2"),
        ("same_script", ["--steps", "1"], "--steps at least 2"),
        ("presets", ["--out", "x", "--completions", "40"], "a multiple of 32"),
        ("scaling", ["--meshes", "1,4c3"], "--meshes 4c3: write processes[c<size>][r<size>][t<size>], of sizes"),
        ("scaling", ["--meshes", "two"], "--meshes two: write processes"),
        ("scaling", ["--steps", "0"], "at least 1"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(scripts, capsys, name, argv, said):
    with pytest.raises(SystemExit):
        scripts[name].arguments(argv)
    assert said in capsys.readouterr().err


def test_the_given_interpreter_of_the_peer_comes_first(scripts):
    assert scripts["common"].peer_python("/x/python") == "/x/python"
    assert Path(scripts["common"].peer_python(None)).name.startswith("python")


# ---- workloads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "length", "flat"), [("A", 32, 0), ("B", 384, 0), ("C", 32, 5)])
def test_every_prompt_has_the_workloads_length_and_every_step_its_flat_groups(scripts, name, length, flat):
    tasks = scripts["tasks"]
    tokenizer, w = tasks.char_tokenizer(), tasks.WORKLOADS[name]
    rows = tasks.make_rows(w, 3, tokenizer, seed=1)
    assert {len(tokenizer(r["prompt"])["input_ids"]) for r in rows} == {length}
    assert [sum(r["flat"] for r in rows[i : i + 8]) for i in (0, 8, 16)] == [flat] * 3
    assert len({r["prompt"] for r in rows}) == 24  # prompts never repeat: no cache of the step before helps
    assert rows == tasks.make_rows(w, 3, tokenizer, seed=1) != tasks.make_rows(w, 3, tokenizer, seed=2)


def test_prompts_of_another_tokenizer_are_cut_to_the_length_in_its_own_tokens(scripts):
    from whet.data.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    rows = scripts["tasks"].make_rows(scripts["tasks"].WORKLOADS["A"], 1, tokenizer)
    assert {len(tokenizer(r["prompt"])["input_ids"]) for r in rows} == {32}


def test_the_model_ends_a_completion_about_once_in_105_tokens(scripts, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tasks = scripts["tasks"]
    tasks.make_model(tmp_path, "tiny", tasks.char_tokenizer())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(tokenizer) == 105 and model.generation_config.eos_token_id == tokenizer.eos_token_id == 103
    assert tokenizer.decode(tokenizer("a b,c")["input_ids"]) == "a b,c"
    ids = torch.randint(105, (8, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ends = model(ids).logits.softmax(-1)[..., tokenizer.eos_token_id]
    assert float(ends.mean()) == pytest.approx(1 / 105, rel=0.15)


def test_rewards_differ_between_completions_but_not_in_flat_groups(scripts):
    rewards = scripts["tasks"].REWARDS
    completions = ["ab", "a1", "", "12"]
    assert rewards["letters"](completions=completions, flat=[False] * 4, prompts=[""] * 4) == [1.0, 0.5, 0.0, 0.0]
    assert rewards["letters"](completions=completions, flat=[True] * 4) == [0.5] * 4
    prompts = scripts["tasks"].CLASS_PROMPTS
    said = ["a", "a", "A", "A", "1", "1", "?", "?"]
    assert len(prompts) == 8 and rewards["class"](prompts=prompts, completions=said) == [1.0] * 8
    assert rewards["class"](prompts=["lower:"], completions=[""]) == [0.0]


# ---- results ---------------------------------------------------------------------------------------------------------


def said(seconds, lengths, memory):
    step = {"step": seconds, "rollout": seconds / 4, "update": seconds * 3 / 4, "lengths": lengths, "reward": 0.5}
    warm = {**step, "step": 1000.0, "lengths": [999]}
    return {"steps": [warm, step], "memory": memory, "memory_exact": True, "versions": {"torch": "2"}}


def test_a_ratio_is_the_median_over_rounds_of_peer_over_whet_without_the_first_step(scripts):
    rounds = [{"whet": said(1.0, [4, 6], 10), "trl": said(s, [5, 5], 30)} for s in (2.0, 8.0, 3.0)]
    found = scripts["grpo_step"].compare(rounds)
    assert found["ratios"] == {"step": 3.0, "rollout": 3.0, "update": 3.0, "memory": 3.0}
    assert found["spread"]["step"] == [2.0, 8.0]
    assert found["tokens"]["per_step"] == {"whet": 10.0, "trl": 10.0} and found["tokens"]["agree"]


def test_a_pretrained_model_has_its_own_workload(scripts):
    arguments = scripts["grpo_step"].arguments
    assert arguments(["--model", "smollm2"]).workloads == ["S"]
    assert arguments(["--model", "smollm2", "--workloads", "A"]).workloads == ["A"]


def test_the_same_script_differs_in_one_word(scripts):
    module = scripts["same_script"]
    whet, trl = (module.SCRIPT.format(module=m, cpu=True, bf16=False).split("\n") for m in module.MODULES.values())
    changed = [(a, b) for a, b in zip(whet, trl, strict=True) if a != b]
    assert changed == [tuple(f"from {name} import GRPOConfig, GRPOTrainer" for name in ("whet.trl", "trl"))]


def test_costs_of_the_same_script_are_compared_by_seed(scripts):
    side = {"start": 1.0, "first": 1.0, "step": 1.0, "memory": 1, "tokens_per_s": 1.0, "cpu": 1.0, "lengths": [4.0]}
    runs = [
        {"whet": {**side, "rewards": [0.0, 0.5, 1.0]}, "trl": {**side, "step": s, "rewards": [0.0, 0.0, 0.5]}}
        for s in (2.0, 9.0, 4.0)
    ]
    found = scripts["same_script"].compare(runs)
    assert found["ratios"]["step"] == 4.0 and found["spread"]["step"] == [2.0, 9.0]
    assert found["sides"]["whet"]["reward_last"] == (1.0, 0.0) and found["sides"]["trl"]["reward_last"][0] == 0.5


def test_lengths_that_differ_beyond_chance_are_reported(scripts):
    rounds = [{"whet": said(1.0, [4, 5, 4, 5], 1), "trl": said(1.0, [8, 9, 8, 9], 1)}]
    assert not scripts["grpo_step"].compare(rounds)["tokens"]["agree"]


def test_the_learning_curves_are_compared_over_their_last_steps(scripts):
    curves = {"whet": [[0.0, 0.8, 1.0], [0.0, 0.6, 0.8]], "trl": [[0.0, 0.4, 0.6], [0.0, 0.5, 0.7]]}
    found = scripts["learning_curve"].compare(curves, last=2)
    assert found["reward"]["whet"] == pytest.approx([0.9, 0.7]) and found["difference"] == pytest.approx(0.25)
    # errors sd/sqrt(2): 0.1 and 0.05; 2 * sqrt(0.01 + 0.0025) = 0.2236
    assert found["two_pooled_standard_errors"] == pytest.approx(0.2236, abs=1e-4)
    assert not found["within"] and found["not_worse"]


def test_tuning_tries_the_peers_own_ways_to_be_fast_and_warms_a_compiled_model_up_longer(scripts, tmp_path):
    grpo_step, tasks = scripts["grpo_step"], scripts["tasks"]
    tokenizer = tasks.char_tokenizer()
    job = grpo_step.make_job(grpo_step.arguments([]), "A", tmp_path, tokenizer, seed=0)
    peer = {label: fields for side, label, fields in grpo_step.settings(job) if side == "trl"}
    micros = {fields["micro"] for label, fields in peer.items() if "generate fp32" in label}
    assert micros == {64, 32, 16, 8} and peer["16x4 generate, static cache"]["cache"] == "static"
    compiled = peer["16x4 generate, compiled"]
    assert compiled["compile"] and len(compiled["rows"]) >= compiled["steps"] * job.prompts > job.steps * job.prompts
    assert peer["16x4 continuous batching, pages as needed"]["pages"] * 64 >= 64 * (32 + 256)


def test_a_tiny_step_runs_in_whet_and_says_what_the_comparison_reads(scripts, tmp_path):
    grpo_step, tasks = scripts["grpo_step"], scripts["tasks"]
    tasks.make_model(tmp_path, "tiny", tokenizer := tasks.char_tokenizer())
    args = grpo_step.arguments(["--workloads", "tiny", "--steps", "1", "--threads", "1"])
    result = scripts["sides"].run_whet(grpo_step.make_job(args, "tiny", tmp_path, tokenizer, seed=0))
    assert json.loads(json.dumps(result)) == result
    assert len(result["steps"]) == 2 and all(len(s["lengths"]) == 8 for s in result["steps"])
    assert all(1 <= n <= 8 for s in result["steps"] for n in s["lengths"])
    assert all(s["step"] == pytest.approx(s["rollout"] + s["update"]) for s in result["steps"])
    assert set(grpo_step.costs(result)) == set(grpo_step.COSTS)


def test_the_machines_rates_come_as_json_on_the_last_line_and_in_the_file(scripts, tmp_path, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    argv = "--rows 2 --size 64 --copy-mib 1 --shape tiny --trial-s 0.001 --threads 1 --record".split()
    scripts["machine"].main([*argv, str(tmp_path)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    best = result["float32"]["decode"]["2"]
    assert best["gflop_per_s"] == max(best["all"].values()) == best["all"][best["kernel"]]
    square = result["float32"]["matmul_64"]
    assert square["gflop_per_s"] == max(square["all"].values()) and "torch" in square["all"]
    assert (result["bfloat16"] is None) == ("bfloat16_why_not" in result) and result["copy_gb_per_s"] > 0
    written = json.loads((tmp_path / f"machine-{result['kind']}.json").read_text())
    assert {"versions", "cpu", "commit"} <= set(written.pop("machine")) and written == result


# ---- one update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["A", "B"])
def test_given_completions_are_cut_at_the_limit_and_end_as_the_random_model_ends_them(scripts, name):
    tasks = scripts["tasks"]
    w = tasks.WORKLOADS[name]
    found = tasks.make_completions(w, 400, seed=1)
    assert found == tasks.make_completions(w, 400, seed=1) != tasks.make_completions(w, 400, seed=2)
    end = len(tasks.ALPHABET)
    for ids in found:
        assert w.min_tokens <= len(ids) <= w.max_tokens and max(ids) <= end and end not in ids[:-1]
        assert len(ids) == w.max_tokens or ids[-1] == end
    assert sum(map(len, found)) / 400 == pytest.approx(96, rel=0.1)


def test_every_side_and_every_mechanism_switched_off_makes_the_same_update(scripts, tmp_path):
    train_step, train_sides, tasks = (scripts[n] for n in ("train_step", "train_sides", "tasks"))
    tasks.make_model(tmp_path, "tiny", tokenizer := tasks.char_tokenizer())
    args = train_step.arguments(["--workloads", "tiny", "--shape", "tiny", "--threads", "1"])
    job = train_step.make_job(args, "tiny", tmp_path, tokenizer, seed=0)
    naive = train_sides.run_naive(job)
    assert len(naive["seconds"]) == 1 and naive["grad_norm"] > 0
    with pytest.MonkeyPatch.context() as patch:  # a mechanism is switched off for good: each run has its own process
        from whet.models import forward, matmul

        patch.setenv("WHET_NATIVE", os.environ.get("WHET_NATIVE", "1"))
        patch.setattr(forward, "linear_stats", forward.linear_stats)
        patch.setattr(matmul, "MIN_MULTIPLICATIONS", matmul.MIN_MULTIPLICATIONS)
        for mechanism in ("", *train_step.WITHOUT["tiny"]):
            found = train_sides.run_whet(dataclasses.replace(job, without=mechanism))
            assert found["grad_norm"] == pytest.approx(naive["grad_norm"], rel=1e-4), mechanism
    assert set(train_sides.MECHANISMS) == {"", *(m for off in train_step.WITHOUT.values() for m in off)}


def test_what_an_update_needs_leaves_out_groups_without_signal(scripts):
    train_step, tasks = scripts["train_step"], scripts["tasks"]
    args = train_step.arguments([])
    count = {}
    for name in ("A", "C"):
        job = train_step.make_job(args, name, Path(), tasks.char_tokenizer(), seed=0)
        count[name] = train_step.needed(job, tasks.SHAPES["25m"], 105)
    assert count["A"][0] == count["C"][0] and 0.2 < count["C"][1] / count["A"][1] < 0.55  # 3 of 8 groups


def test_ratios_are_over_whet_and_utilisation_over_the_machines_own_rate(scripts):
    side = lambda seconds, memory: {"seconds": [seconds], "memory": memory, "grad_norm": 1.0}
    rate = {"gflop_per_s": 10.0, "default": 5.0}
    rounds = [{"rate": rate, "whet": side(t, 5), "naive": side(3.0, 20)} for t in (1.0, 2.0, 3.0)]
    found = scripts["train_step"].compare(rounds, tokens=100, flops=1e10)
    shares = {"utilisation": 0.5, "of_default": 1.0}
    assert found["cost"]["whet"] == {"seconds": 2.0, "tokens_per_s": 50.0, **shares, "memory": 5.0}
    assert found["ratios"] == {"naive": {"time": 1.5, "memory": 4.0}}
    assert found["spread"]["naive"]["time"] == [1.0, 3.0]


# ---- rollouts --------------------------------------------------------------------------------------------------------


def test_the_rollouts_are_every_model_dtype_prompt_and_kind_of_length(scripts):
    rollout = scripts["rollout"]
    names = [w.name for w in rollout.arguments([]).chosen]
    assert len(names) == len(set(names)) == 17
    assert {"1m-fp32-p32-equal", "25m-bf16-p512-mixed", "0.6b-bf16-p32-equal"} <= set(names)
    assert [w.name for w in rollout.arguments(["--workloads", "25m-fp32-p32-*,0.6b-*"]).chosen] == [
        "25m-fp32-p32-equal",
        "25m-fp32-p32-mixed",
        "0.6b-bf16-p32-equal",
    ]
    on_gpu = rollout.arguments(["--device", "cuda", "--models", "0.6b"]).chosen
    assert [(w.name, len(w.lengths()), sum(w.lengths())) for w in on_gpu][1:] == [("0.6b-bf16-p128-equal", 256, 131072)]
    assert rollout.arguments(["--engines", "generate"]).engines == ["whet", "generate"]


def test_mixed_lengths_are_the_same_each_time_and_equal_ones_equal(scripts):
    equal, mixed = scripts["rollout"].arguments(["--workloads", "1m-fp32-p32-*"]).chosen
    assert equal.lengths() == [128] * 64
    assert mixed.lengths() == mixed.lengths() and len(set(mixed.lengths())) > 32
    assert len(mixed.lengths()) == 64 and max(mixed.lengths()) <= 512


def test_every_engine_gets_the_same_prompts_and_every_round_others(scripts):
    rollout = scripts["rollout"]
    w = rollout.arguments(["--workloads", "1m-fp32-p32-equal"]).chosen[0]
    a, b = rollout.make_work(w, 0), rollout.make_work(w, 1)
    assert a == rollout.make_work(w, 0) and a.prompts != b.prompts and a.lengths == b.lengths
    assert {len(p) for p in a.prompts} == {32} and len(a.repeated()) == 64
    assert a.repeated()[7] == a.prompts[0] != a.repeated()[8]


def test_the_shapes_have_the_parameters_that_their_names_say(scripts):
    floor, shapes = scripts["floor"], scripts["tasks"].SHAPES
    counted = {name: sum(floor.weights_of(name, shapes[name].get("vocabulary", 105))) for name in shapes}
    assert counted["1m"] == pytest.approx(1e6, rel=0.02) and counted["25m"] == pytest.approx(25.2e6, rel=0.01)
    assert counted["qwen3-0.6b"] == pytest.approx(596e6, rel=0.01)


def floor_of(floor, **fields):
    given = {"vocabulary": 105, "prompt": 4, "lengths": [3, 3], "generations": 2, "rates": {1: 10.0}, "copy": 1e9}
    return floor.floor_seconds("tiny", "float32", **{**given, **fields})


def test_the_floor_counts_the_flops_of_each_live_row_and_step(scripts):
    floor = scripts["floor"]
    layers, head = 2 * (32 * 16 * 6 + 3 * 32 * 64), 105 * 32  # queries and output 2 heads each, keys and values 1
    assert floor.weights_of("tiny", 105) == (layers, head)
    pair = 4 * 2 * 2 * 16
    prefill = 2 * 4 * layers + 2 * head + pair * 10  # 1 + 2 + 3 + 4 pairs of tokens, once for both completions
    second, third = (2 * (layers + head) + pair * n for n in (5, 6))
    assert floor_of(floor) == pytest.approx((prefill + 2 * second + 2 * third) / 10e9)
    assert floor_of(floor, lengths=[1, 3]) == pytest.approx((prefill + second + third) / 10e9)


def test_the_floor_is_the_memory_where_that_takes_longer(scripts):
    floor = scripts["floor"]
    weights, token = 4 * sum(floor.weights_of("tiny", 105)), floor.kv_bytes("tiny", "float32")
    read = 3 * weights + token * (4 + (4 + 2 * 1) + (4 + 2 * 2))  # the prompt once in each step, for both rows
    assert floor_of(floor, rates={1: 1e9}, copy=2.0) == pytest.approx(read / 2e9)


def gave(seconds, logprob=-4.6, error=0.02):
    return {
        "seconds": seconds, "tokens": 1000, "logprob": logprob, "logprob_error": error, "kv_bytes": int(seconds * 10)
    }  # fmt: skip


def sides_of(**seconds):
    return {side: {"rounds": [gave(s) for s in v], "setting": "x", "tried": {}} for side, v in seconds.items()}


def test_a_ratio_of_rates_is_the_median_over_the_rounds_that_both_sides_ran(scripts):
    found = scripts["rollout"].compare(sides_of(whet=[1.0, 2.0, 4.0], generate=[3.0, 4.0, 20.0], continuous=[8.0]), 0.5)
    assert found["ratios"] == {"generate": 3.0, "continuous": 8.0, "vllm": None, "floor": 0.25}
    assert found["spread"]["generate"] == [2.0, 5.0] and found["rounds"] == {"whet": 3, "generate": 3, "continuous": 1}
    assert found["tokens_per_s"]["whet"] == 500.0 and found["kv_bytes"]["generate"] == 200


def test_sides_that_draw_from_different_distributions_are_not_compared(scripts):
    sides = sides_of(whet=[1.0], generate=[1.0])
    sides["generate"]["rounds"] = [gave(1.0, logprob=-3.9)]
    with pytest.raises(RuntimeError, match="mean logprobs"):
        scripts["rollout"].compare(sides, 0.5)
    sides["generate"]["rounds"] = [gave(1.0, logprob=-3.9, error=0.2)]
    scripts["rollout"].compare(sides, 0.5)  # so few independent completions say nothing


@pytest.fixture
def tiny_rollout(scripts, tmp_path):
    """Arguments, workload with mixed lengths, and the spec of a tiny model."""
    rollout, tasks = scripts["rollout"], scripts["tasks"]
    args = rollout.arguments(["--models", "tiny", "--workloads", "*-mixed", "--dtypes", "fp32", "--threads", "1"])
    tasks.make_model(tmp_path, "tiny", tasks.char_tokenizer())
    return args.chosen[0], rollout.spec_of(args, args.chosen, tmp_path)


@pytest.mark.parametrize("side", ["whet", "generate", full("continuous")])
def test_every_setting_of_an_engine_makes_the_forced_lengths_and_the_same_greedy_tokens(scripts, tiny_rollout, side):
    import dataclasses

    w, spec = tiny_rollout
    sides, make_work = scripts["rollout_sides"], scripts["rollout"].make_work
    oracle = sides.Whet(spec).run(make_work(w, 0, greedy=True), "defaults")
    engine = sides.SIDES[side](spec)
    for setting in engine.settings:
        work = dataclasses.replace(make_work(w, 0, greedy=True), setting=setting)
        said = sides.timed(engine, work, "cpu")
        assert said["tokens"] == sum(w.lengths()) and said["kv_bytes"] > 0 and said["seconds"] > 0
        assert said["ids"] == [[int(t) for t in row] for row in oracle.tokens]
    drawn = sides.timed(engine, make_work(w, 0), "cpu")
    assert "ids" not in drawn and drawn["logprob"] == pytest.approx(-4.65, abs=0.3)


def test_logprobs_noted_while_generating_are_those_of_the_scores(scripts):
    import torch

    processor = scripts["rollout_sides"]._Logprobs()
    ids, scores = torch.tensor([[7], [7]]), torch.randn(3, 2, 11)
    for step in range(3):
        assert torch.equal(processor(ids, scores[step]), scores[step])
        ids = torch.cat([ids, torch.tensor([[step], [10 - step]])], 1)
    expected = scores.log_softmax(-1).transpose(0, 1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(processor.all(ids), expected)


def test_a_completion_of_another_length_than_forced_is_an_error(scripts, tiny_rollout):
    w, _ = tiny_rollout
    sides = scripts["rollout_sides"]

    class Short:
        settings = ("defaults",)

        def run(self, work, setting):
            return sides.Made(tokens=[[1]] * 4, logprobs=[[0.0]] * 4, kv_bytes=0)

    with pytest.raises(RuntimeError, match="place, made, asked for"):
        sides.timed(Short(), scripts["rollout"].make_work(w, 0), "cpu")


@pytest.mark.full
def test_a_rollout_in_processes_prints_its_ratios_as_the_last_line(scripts, capsys, monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    rates = {"rates": {1: 1.0}, "kernels": {}, "copy": 1.0}
    monkeypatch.setattr(scripts["floor"], "measure", lambda *args, **kw: rates)
    argv = "--models tiny --dtypes fp32 --workloads *-equal --rounds 1 --threads 1 --engines vllm".split()
    scripts["rollout"].main([*argv, "--vllm-python", str(tmp_path / "python")])
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    ratios = result["ratios"]["tiny-fp32-p6-equal"]
    assert set(ratios) == {"generate", "continuous", "vllm", "floor"} and ratios["floor"] > 0
    assert ratios["vllm"] is None and "there is no" in result["models"]["tiny-fp32"]["vllm_why_not"]
    assert result["workloads"]["tiny-fp32-p6-equal"]["tokens"] == 32


def test_bf16_is_null_with_the_reason_where_the_machine_has_none(scripts, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(scripts["machine"], "has_bf16", lambda device: "no such arithmetic")
    scripts["rollout"].main("--models tiny --dtypes bf16 --threads 1".split())
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ratios"] == {"tiny-bf16-p6-equal": None, "tiny-bf16-p6-mixed": None}
    assert result["bfloat16_why_not"] == "no such arithmetic"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_mesh_is_measured_against_one_process(scripts, tmp_path):
    argv = ["--meshes", "1,2r2", "--shape", "tiny", "--steps", "1", "--groups", "3", "--tokens", "600"]
    scripts["scaling"].main([*argv, "--record", str(tmp_path / "found.json")])
    one, two = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert (one["mesh"], two["mesh"], one["sent"], one["gradient_error"]) == ("1", "2r2", {}, 0)
    assert two["gradient_error"] < 1e-5 and two["sent"]["allreduce"]["calls"] == 3 and len(two["peak_mb"]) == 2

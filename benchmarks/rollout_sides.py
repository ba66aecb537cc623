"""One engine with one model in a process of its own: python rollout_sides.py SIDE spec.json.

It says {"ready": ...} when the model is loaded, then answers every line on its standard input, a Work as JSON, with a
line on its standard output: what the work gave and how long it took, from token ids to token ids and logprobs, both on
the host. Whatever else the libraries print goes to standard error. An error is answered as {"error": traceback}.

Lengths are forced: no engine stops at the end token, and each completion ends at its own length. whet and vLLM take a
limit for each request; so does continuous batching, by a hook where it forks a prompt. `generate` has one limit for a
batch, that of its longest completion, and what is too long is cut off: that is what a batch costs whose rows end by
themselves, since it runs until its last row is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What an engine is started with."""

    model: str
    """Folder."""
    dtype: str
    device: str
    threads: int
    max_length: int
    """Tokens of the longest prompt with its longest completion."""
    completions: int
    """The most that run together."""
    kv_bytes: int
    """What the keys and values of the largest work take."""
    compile: bool = False
    """vLLM: let it compile (and, on a GPU, capture) the model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One rollout."""

    prompts: list[list[int]]
    generations: int
    lengths: list[int]
    """Tokens of each completion, those of a prompt beside each other."""
    seed: int
    setting: str = ""
    """One of the engine's settings; "" = its first."""
    greedy: bool = False

    def repeated(self) -> list[list[int]]:
        """The prompt of each completion."""
        return [p for p in self.prompts for _ in range(self.generations)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """What an engine made of a Work, in its order."""

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    kv_bytes: int
    """The most memory that it held for keys and values."""


class Whet:
    """The embedded engine."""

    settings: ClassVar[tuple[str, ...]] = ("defaults",)
    library: ClassVar[str] = "whet"

    def __init__(self, spec: Spec) -> None:
        from whet.models.load import load_model
        from whet.rollout.engine import EmbeddedEngine

        self.engine = EmbeddedEngine(load_model(spec.model, dtype=spec.dtype, device=spec.device))

    def run(self, work: Work, setting: str) -> Made:
        """One request for each completion, all submitted at once."""
        import numpy as np

        from whet.rollout.base import Request, Sampling

        prompts = [np.array(p, np.int32) for p in work.prompts]
        temperature = 0.0 if work.greedy else 1.0
        requests = [
            Request(
                id=i,
                tokens=prompts[i // work.generations],
                sampling=Sampling(max_tokens=n, temperature=temperature),
                group=i // work.generations,
                rng_key=(work.seed, 0, i // work.generations, i % work.generations),
            )
            for i, n in enumerate(work.lengths)
        ]
        self.engine.submit(requests)
        outputs, held = {}, 0
        while len(outputs) < len(requests):
            outputs |= {o.id: o for o in self.engine.step()}
            held = max(held, self.engine.kv_bytes)
        order = [outputs[i] for i in range(len(requests))]
        return Made(tokens=[o.tokens for o in order], logprobs=[o.logprobs for o in order], kv_bytes=held)


def _share(work: Work, name: str) -> int:
    """Completions run at once."""
    return -(-len(work.lengths) // {"all": 1, "quarters": 4}[name])


class _Transformers:
    """A model of transformers that never stops by itself."""

    library: ClassVar[str] = "transformers"

    def __init__(self, spec: Spec) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.spec = spec
        dtype = getattr(torch, spec.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(spec.model, dtype=dtype, attn_implementation="sdpa")
        self.model: Any = model.to(spec.device).eval().requires_grad_(False)
        # After the prefill the output layer is given a strided slice; on a CPU torch would then copy its whole matrix
        # for every row, half a minute for 16 rows of a large vocabulary.
        self.model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
        self.model.generation_config.eos_token_id = self.model.config.eos_token_id = None

    def config(self, work: Work, **fields: Any) -> Any:
        """Of plain sampling at temperature 1, or of greedy decoding."""
        from transformers import GenerationConfig

        sampling = {} if work.greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        return GenerationConfig(do_sample=not work.greedy, pad_token_id=0, use_cache=True, **sampling, **fields)

    def token_bytes(self) -> int:
        """Keys and values of a token in all layers."""
        c = self.model.config
        return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * self.model.dtype.itemsize


class Generate(_Transformers):
    """`generate`, over all completions at once or over a quarter of them at a time."""

    settings: ClassVar[tuple[str, ...]] = (
        "dynamic, all",
        "static, all",
        "dynamic, quarters",
        "static, quarters",
        "prefilled, all",
    )

    def run(self, work: Work, setting: str) -> Made:
        """One batch, or four one after the other, each until its longest completion is done."""
        import torch

        cache, share = setting.split(", ")
        size = _share(work, share)
        torch.manual_seed(work.seed)
        prompts, tokens, logprobs, held = work.repeated(), [], [], 0
        for first in range(0, len(prompts), size):
            lengths = work.lengths[first : first + size]
            ids = torch.tensor(prompts[first : first + size], device=self.spec.device)
            new, processor = max(lengths), _Logprobs()
            fixed = {"cache_implementation": "static"} if cache == "static" else {}
            given = {"past_key_values": self._prefilled(work)} if cache == "prefilled" else {}
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self.config(work, max_new_tokens=new, **fixed),
                logits_processor=[processor],
                **given,
            )
            made, scored = out[:, ids.shape[1] :].cpu().numpy(), processor.all(out).cpu().numpy()
            tokens += [row[:n] for row, n in zip(made, lengths, strict=True)]
            logprobs += [row[:n] for row, n in zip(scored, lengths, strict=True)]
            held = max(held, len(ids) * (ids.shape[1] + new) * self.token_bytes())
        return Made(tokens=tokens, logprobs=logprobs, kv_bytes=held)

    def _prefilled(self, work: Work) -> Any:
        """A cache that holds all but the last token of each prompt, run once and repeated for its completions."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            ids = torch.tensor(work.prompts, device=self.spec.device)[:, :-1]
            self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(work.generations)
        return cache


class _Logprobs:
    """A logits processor that changes nothing and notes the logprobs of what is drawn.

    It keeps the scores of one step only, and reads the token drawn from them when it is called for the next.
    """

    def __init__(self) -> None:
        self.scores: Any = None
        self.found: list[Any] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self.scores is not None:
            self._note(input_ids)
        self.scores = scores
        return scores

    def _note(self, input_ids: Any) -> None:
        drawn = self.scores.gather(1, input_ids[:, -1:]).squeeze(1)
        self.found.append(drawn - self.scores.logsumexp(1))

    def all(self, sequences: Any) -> Any:
        """Float [B, C]: the logprobs of all tokens, the last one's too."""
        import torch

        self._note(sequences)
        return torch.stack(self.found, 1)


PAGE = 64
"""Tokens of a page of continuous batching."""


class Continuous(_Transformers):
    """Continuous batching: each prompt once with so many return sequences, or once for each completion.

    With room for all, or for a quarter of them at a time: without flash attention each is masked over the pages of all.
    """

    settings: ClassVar[tuple[str, ...]] = ("forked, all", "forked, quarters", "repeated, all")

    def run(self, work: Work, setting: str) -> Made:
        """A manager of its own for each run, as `generate_batch` makes one, with the pages that are needed."""
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        prompts, share = setting.split(", ")
        fork, together = prompts == "forked" and work.generations > 1, _share(work, share)
        names, blocks = self._names(work, fork), self._blocks(work, fork)
        batching = ContinuousBatchingConfig(
            return_logprobs=True,
            num_blocks=blocks,
            max_batch_tokens=2048,
            max_requests_per_batch=together,
            page_size=PAGE,
            seed=work.seed,
        )
        config = self.config(work, max_new_tokens=max(work.lengths))
        config.num_return_sequences = work.generations if fork else 1
        limits = dict(zip(names, work.lengths, strict=True))
        with (
            _limited_forks(limits),
            self.model.continuous_batching_context_manager(
                generation_config=config, continuous_batching_config=batching, timeout=5
            ) as manager,
        ):
            for name, prompt in zip(names, work.repeated(), strict=True):
                if "__child#" not in name:
                    manager.add_request(prompt, request_id=name, max_new_tokens=limits[name], eos_token_id=-1)
            found = self._wait(manager, len(names))
        return Made(
            tokens=[found[name].generated_tokens for name in names],
            logprobs=[found[name].logprobs for name in names],
            kv_bytes=blocks * PAGE * self.token_bytes(),
        )

    @staticmethod
    def _names(work: Work, fork: bool) -> list[str]:
        """The request id of each completion; the longest of a prompt is the request that the others are forked from."""
        if not fork:
            return [str(i) for i in range(len(work.lengths))]
        names = [""] * len(work.lengths)
        for prompt in range(len(work.prompts)):
            first = prompt * work.generations
            ranked = sorted(range(first, first + work.generations), key=lambda i: -work.lengths[i])
            for rank, i in enumerate(ranked):
                names[i] = f"{prompt}__child#{rank - 1}" if rank else str(prompt)
        return names

    @staticmethod
    def _blocks(work: Work, fork: bool) -> int:
        """Pages that the work needs, and an eighth for the scheduler's margin; forks share a prompt's full pages."""
        whole = [len(p) // PAGE if fork else 0 for p in work.repeated()]
        own = sum(-(-(len(p) + n) // PAGE) for p, n in zip(work.repeated(), work.lengths, strict=True)) - sum(whole)
        return (own + sum(whole) // work.generations) * 9 // 8 + 8

    @staticmethod
    def _wait(manager: Any, count: int) -> dict[str, Any]:
        """All results by request id."""
        found: dict[str, Any] = {}
        while len(found) < count:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError(f"continuous batching ended with {len(found)} of {count} requests done")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"continuous batching: {result.error}")
                found[result.request_id] = result
        return found


@contextlib.contextmanager
def _limited_forks(limits: dict[str, int]) -> Iterator[None]:
    """Within this a forked request of continuous batching has the limit of its own id, not that of its source."""
    from transformers.generation.continuous_batching import requests

    states: Any = requests.RequestState
    original = states.fork

    def fork(state: Any, new_request_id: str) -> Any:
        new = original(state, new_request_id)
        new.max_new_tokens = new._new_tokens_limit = limits[new_request_id]
        return new

    states.fork = fork
    try:
        yield
    finally:
        states.fork = original


class VLLM:
    """vLLM in this process; on a CPU without compilation unless asked."""

    settings: ClassVar[tuple[str, ...]] = ("defaults",)
    library: ClassVar[str] = "vllm"

    def __init__(self, spec: Spec) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        gib = -(-spec.kv_bytes * 5 // 4 // 2**30)
        if spec.device == "cpu":
            os.environ |= {"VLLM_CPU_KVCACHE_SPACE": str(gib), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        import torch
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        sized = {} if spec.device == "cpu" else {"kv_cache_memory_bytes": gib * 2**30}
        self.llm = LLM(
            model=spec.model,
            dtype=spec.dtype,
            skip_tokenizer_init=True,
            enforce_eager=not spec.compile,
            max_model_len=spec.max_length,
            max_num_seqs=spec.completions,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            seed=0,
            **sized,
        )
        torch.set_num_threads(spec.threads)
        self.held = gib * 2**30

    def run(self, work: Work, setting: str) -> Made:
        """All completions as requests of their own; equal prompts share their cache by its prefix cache."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        temperature = 0.0 if work.greedy else 1.0
        params = [
            SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False)
            for n in work.lengths
        ]
        prompts = [{"prompt_token_ids": p} for p in work.repeated()]
        done = [o.outputs[0] for o in self.llm.generate(prompts, params, use_tqdm=False)]
        return Made(
            tokens=[o.token_ids for o in done],
            logprobs=[[at[t].logprob for t, at in zip(o.token_ids, o.logprobs or [], strict=True)] for o in done],
            kv_bytes=self.held,
        )


SIDES: dict[str, type[Any]] = {
    "whet": Whet,
    "generate": Generate,
    "continuous": Continuous,
    "vllm": VLLM,
}


def timed(engine: Any, work: Work, device: str) -> dict[str, Any]:
    """What a work gave.

    Returns: seconds, cpu_s (of all threads), tokens, their mean logprob and its standard error (the tokens of one
        completion depend on each other), kv_bytes; ids too where it was greedy.
    Raises: RuntimeError: a completion has not the length that was asked for.
    """
    import numpy as np
    import torch

    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    sync()
    start, cpu = time.perf_counter(), time.process_time()
    made = engine.run(work, work.setting or engine.settings[0])
    sync()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    lengths = [len(t) for t in made.tokens]
    if lengths != work.lengths or [len(x) for x in made.logprobs] != lengths:
        wrong = [(i, n, wanted) for i, (n, wanted) in enumerate(zip(lengths, work.lengths, strict=True)) if n != wanted]
        raise RuntimeError(f"completions (place, made, asked for) of other lengths than forced: {wrong[:8]}")
    tokens, sums = sum(lengths), np.asarray([np.sum(np.asarray(x, np.float64)) for x in made.logprobs])
    logprob = float(sums.sum() / tokens)
    error = float(np.linalg.norm(sums - logprob * np.asarray(lengths)) / tokens)
    said = {
        "seconds": seconds,
        "cpu_s": cpu,
        "tokens": tokens,
        "logprob": logprob,
        "logprob_error": error,
        "kv_bytes": int(made.kv_bytes),
    }
    return said | ({"ids": [[int(t) for t in row] for row in made.tokens]} if work.greedy else {})


def main() -> None:
    """Answers until its input ends."""
    side, path = sys.argv[1:]
    spec = Spec(**json.loads(Path(path).read_text()))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(said: dict[str, Any]) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    try:
        import torch

        torch.set_num_threads(spec.threads)
        engine = SIDES[side](spec)
        names = {"torch", "transformers", engine.library}
        answer({"ready": _versions(names), "settings": engine.settings})
        for line in sys.stdin:
            answer(timed(engine, Work(**json.loads(line)), spec.device))
    except Exception:
        answer({"error": traceback.format_exc()})


def _versions(names: set[str]) -> dict[str, str]:
    """Versions of what is imported; whet's distribution, and vLLM's where it is built for CPUs, is named otherwise."""
    found = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    other = {"whet": "whet-rl"}
    return {name: found.get(other.get(name, name)) or found[f"{name}-cpu"] for name in sorted(names)}


if __name__ == "__main__":
    main()

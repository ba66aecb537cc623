"""check_environment: plays an environment with scripted agents before a run, and says what would go wrong in it.

    gold       says the row's answer                    empty      ends its turns at once
    garbage    says random characters                   silent     says blanks, and is cut off without an end mark
    caller     calls every tool without arguments       (where the environment has tools)

Left out on purpose: the model. What it can solve is seen with `whet eval`.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.envs.conversation import Conversation
from whet.errors import DataError, RewardError
from whet.rollout.base import Output, Sampling
from whet.rollout.driver import Episode
from whet.rollout.external_calls import ExternalCall, ExternalCalls
from whet.types import Completion, Group, Prompt

__all__ = ["Findings", "check_environment", "find_name_clashes"]

GARBAGE = "".join(map(chr, range(33, 127))) + " \n"
Agent = Callable[[Prompt, int], tuple[str, bool]]
"""(prompt, number of the turn) -> the text of the turn, and whether its end mark follows."""


@dataclass
class Findings:
    """What a check has found."""

    facts: list[str]
    problems: list[str]
    """What to repair, or to know of, before a run."""


@dataclass
class _Played:
    """An episode of an agent."""

    agent: str
    prompt: Prompt
    completions: list[Completion]
    rewards: dict[str, float]
    seconds: dict[str, float]
    drifted: int
    """Turns whose context is not what the template writes for the messages before them."""
    error: str | None
    total: float = float("nan")

    @property
    def told(self) -> list[str]:
        """What the environment said."""
        messages = self.completions[-1].messages if self.completions else ()
        return [str(m["content"]) for m in messages or () if m["role"] != "assistant"]


def find_name_clashes(tools: Sequence[Any]) -> list[str]:
    """Returns the problems with the names of tools, by which the model calls them.

    >>> named = lambda name: {"type": "function", "function": {"name": name}}
    >>> find_name_clashes([named("add"), named("Add"), named("sub")])
    ["tools differ only in capitals: 'Add', 'add'; a model mistakes one for the other: rename one"]
    """
    names = [tool["function"]["name"] if isinstance(tool, Mapping) else tool.__name__ for tool in tools]
    twice = [name for name, count in Counter(names).items() if count > 1]
    problems = [f"{names.count(n)} tools are named {n!r}, and the model calls them by name: rename one" for n in twice]
    for _, group in itertools.groupby(sorted(set(names), key=lambda n: (n.lower(), n)), key=str.lower):
        if len(same := list(group)) > 1:
            shown = ", ".join(map(repr, same))
            problems.append(f"tools differ only in capitals: {shown}; a model mistakes one for the other: rename one")
    return problems


def check_environment(
    talk: Conversation, prompts: Sequence[Prompt], reward: Callable[[Group, Sequence[Any]], float], gold: str = "answer"
) -> Findings:
    """Plays each prompt twice with each agent.

    Args:
        talk: the environment, as a run has it.
        prompts: of a few rows.
        reward: (a group of one episode, its messages) -> the total reward.
        gold: the column with the answer that a right agent gives.
    """
    names = find_name_clashes(talk.script.tools)
    calls = ExternalCalls()
    try:
        played = [
            [_run_episode(talk, calls, prompt, name, agent) for _ in range(2)]
            for prompt in prompts
            for name, agent in _agents(talk, gold, prompt)
        ]
    finally:
        calls.close()
    for one in itertools.chain.from_iterable(played):
        if one.error is None:
            group = Group(prompt=one.prompt, completions=tuple(one.completions), rewards=_columns(one))
            one.total = reward(group, [list(c.messages or ()) for c in one.completions])
    first = [pair[0] for pair in played]
    return Findings(
        [*_describe(first), *_times(first)],
        [*names, *_failures(first), *_transcripts(first), *_rewards(first), *_leaks(first, gold), *_differing(played)],
    )


def _columns(played: _Played) -> dict[str, np.ndarray]:
    return {name: np.array([value]) for name, value in played.rewards.items()}


# ---- agents ----------------------------------------------------------------------------------------------------------


def _agents(talk: Conversation, gold: str, prompt: Prompt) -> Iterator[tuple[str, Agent]]:
    if gold in prompt.columns:
        yield "gold", lambda p, turn: (str(p.columns[gold]), True)
    yield "empty", lambda p, turn: ("", True)
    yield "garbage", lambda p, turn: ("".join(random.Random(f"{p.row} {turn}").choices(GARBAGE, k=40)), True)
    yield "silent", lambda p, turn: ("  \n", False)
    if talk.script.environment is not None and talk.script.environment.tool_names and (text := _call_text(talk)):
        yield "caller", lambda p, turn: (text, True)


def _call_text(talk: Conversation) -> str:
    """Returns a turn that calls every tool, as the template writes it; "" = the template takes one call a turn only."""
    assert talk.script.environment is not None
    calls = [{"type": "function", "function": {"name": n, "arguments": {}}} for n in talk.script.environment.tool_names]
    user = {"role": "user", "content": "hi"}
    try:
        before = talk.encode.render([user], 0, {}).text
        text = talk.encode.render([user, {"role": "assistant", "content": "", "tool_calls": calls}, user], 0, {}).text
    except DataError:
        return ""
    turn = text[len(before) :]
    return re.split("|".join(re.escape(str(talk.encode.tokenizer.decode([i]))) for i in talk.end_ids), turn)[0]


def _run_episode(talk: Conversation, calls: ExternalCalls, prompt: Prompt, name: str, agent: Agent) -> _Played:
    """Plays an episode without a model."""
    tokenizer, end_ids, turns = talk.encode.tokenizer, talk.end_ids, itertools.count()
    sampling = Sampling(max_tokens=talk.max_tokens)
    episode = Episode(prompt, (0, 0, 0, 0), lambda e: talk.run_episode(e, sampling))
    running, made, drifted = episode.run(episode), _Played(name, prompt, [], {}, {}, 0, None), 0
    resume: Callable[[Any], Any] = running.send
    value: Any = None
    try:
        while True:
            asked = resume(value)
            resume = running.send
            if isinstance(asked, ExternalCall):
                calls.start(0, asked)
                (result,) = calls.collect()
                episode.seconds[asked.name] = max(episode.seconds.get(asked.name, 0.0), result.seconds)
                resume, value = (running.send, result.value) if result.error is None else (running.throw, result.error)
                continue
            text, ends = agent(prompt, turn := next(turns))
            ids = [*tokenizer(text, add_special_tokens=False).input_ids, *(list(end_ids[:1]) if ends else [])]
            ids = (ids or list(asked.tokens[-1:]))[: asked.sampling.max_tokens]
            if turn and not np.array_equal(asked.tokens, _whole(tokenizer, asked.tokens)):
                drifted += 1
            columns = {"logprobs": np.zeros(len(ids), np.float32), "versions": np.zeros(len(ids), np.int32)}
            reason = "stop" if ends and len(ids) and ids[-1] in end_ids else "length"
            value = Output(id=0, tokens=np.array(ids, np.int32), **columns, finish_reason=reason)
    except StopIteration as end:
        made.completions = list(end.value)
        made.error = made.completions[0].info.get("error")
    except (RewardError, DataError) as error:
        made.error = str(error).partition("; in the episode of")[0]
    made.rewards, made.seconds, made.drifted = dict(episode.rewards), dict(episode.seconds), drifted
    return made


def _whole(tokenizer: Any, ids: np.ndarray) -> np.ndarray:
    """Returns the ids of the same text, encoded as a whole."""
    text = tokenizer.decode([int(i) for i in ids], clean_up_tokenization_spaces=False)
    return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, np.int32)


# ---- what it shows ---------------------------------------------------------------------------------------------------


def _describe(played: Sequence[_Played]) -> Iterator[str]:
    """Yields a line for each agent: its turns, and its rewards in the rows."""
    for agent in dict.fromkeys(p.agent for p in played):
        of = [p for p in played if p.agent == agent]
        turns = [p.completions[0].info["turns"] for p in of if p.completions]
        shown = ", ".join("failed" if p.error else f"{p.total:.4g}" for p in of)
        yield f"{agent}: {min(turns, default=0)} to {max(turns, default=0)} turns; rewards {shown}"


def _times(played: Sequence[_Played]) -> Iterator[str]:
    longest: dict[str, float] = {}
    for p in played:
        for name, seconds in p.seconds.items():
            longest[name] = max(longest.get(name, 0.0), seconds)
    yield from (f"{name}: at most {seconds:.3g} s" for name, seconds in longest.items())


def _failures(played: Sequence[_Played]) -> Iterator[str]:
    for error in dict.fromkeys(p.error for p in played if p.error):
        agents = ", ".join(dict.fromkeys(p.agent for p in played if p.error == error))
        yield f"it fails with the agent {agents}: {error}; a run ends there, or leaves such episodes out"


def _transcripts(played: Sequence[_Played]) -> Iterator[str]:
    forks = [p.agent for p in played if p.completions and p.completions[0].info.get("forks")]
    if forks:
        agents = ", ".join(dict.fromkeys(forks))
        yield (
            f"the chat template rewrites earlier turns (agents {agents}): each such turn forks the episode, which is "
            "trained rightly and costs one more sequence; a template that only appends costs less"
        )
    drifted = [p.agent for p in played if p.drifted]
    if drifted:
        agents = ", ".join(dict.fromkeys(drifted))
        yield (
            f"a conversation is other tokens when it is encoded as a whole (agents {agents}): whet trains the tokens "
            "that were sampled; a server that encodes the history again gives the model others"
        )


def _rewards(played: Sequence[_Played]) -> Iterator[str]:
    known = [p for p in played if not p.error]
    if known and all(np.isnan(p.total) for p in known):
        yield "no agent has a reward: all are None; look at the columns that the reward reads"
        return
    rows = [[p for p in known if p.prompt is prompt] for prompt in {id(p.prompt): p.prompt for p in known}.values()]
    if rows and all(len({p.total for p in row if not np.isnan(p.total)}) <= 1 for row in rows):
        yield "all agents have the same reward in each row: nothing would be learned from it"
        return
    for row in rows:
        totals = {p.agent: p.total for p in row}
        if (best := totals.get("gold")) is None:
            continue
        better = [name for name, total in totals.items() if total > best]
        if better:
            yield f"row {row[0].prompt.row}: {', '.join(better)} scores higher than the right answer ({best:.4g})"
        elif best == totals.get("empty"):
            yield f"row {row[0].prompt.row}: the right answer scores {best:.4g}, as an empty one does"


def _leaks(played: Sequence[_Played], gold: str) -> Iterator[str]:
    for p in played:
        answer = str(p.prompt.columns.get(gold, ""))
        if p.agent == "empty" and answer and any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", t) for t in p.told):
            yield f"row {p.prompt.row}: the environment tells an agent that says nothing the answer {answer!r:.60}"


def _differing(played: Sequence[Sequence[_Played]]) -> Iterator[str]:
    for a, b in played:
        same = a.told == b.told and (a.total == b.total or (np.isnan(a.total) and np.isnan(b.total)))
        if not same or a.error != b.error:
            yield (
                f"row {a.prompt.row}, agent {a.agent}: a second episode with the same turns went another way; a "
                "resumed run does not repeat it: draw from a seed in the row, or set rollout.answers_dir"
            )
            return

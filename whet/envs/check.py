"""check_environment: plays an environment with scripted agents before a run, and says what would go wrong in it.

    gold       says the row's answer                    empty      ends its turns at once
    garbage    says random characters                   silent     says blanks, and is cut off without an end mark
    caller     calls every tool without arguments       (where the environment has tools)

Left out on purpose: the model. What it can solve is seen with `whet eval`.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.envs.conversation import Conversation
from whet.envs.failures import EpisodeFailures
from whet.envs.multi_turn import stand_in
from whet.errors import DataError
from whet.observe.trace import Trace
from whet.rollout.base import Output, Sampling
from whet.rollout.driver import Episode, RolloutDriver
from whet.rollout.queue_engine import QueueEngine
from whet.types import Group, Prompt

__all__ = ["Findings", "check_environment", "find_name_clashes"]

GARBAGE = "".join(map(chr, range(33, 127))) + " \n"
Agent = Callable[[int], tuple[str, bool]]
"""(number of the turn) -> the text of the turn, and whether its end mark follows."""


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
    group: Group
    """Of one episode."""
    drifted: int
    """Turns whose context is not what the template writes for the messages before them."""
    total: float = float("nan")

    @property
    def info(self) -> Mapping[str, Any]:
        """How the episode went."""
        return self.group.completions[-1].info

    @property
    def error(self) -> str | None:
        """The failure of the episode."""
        return self.info.get("error")

    @property
    def told(self) -> list[str]:
        """What the environment said."""
        messages = self.group.completions[-1].messages or ()
        return [str(m["content"]) for m in messages if m["role"] != "assistant"]


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
        talk: the environment, as a run has it, but for its failures: they are findings.
        prompts: of a few rows.
        reward: (a group of one episode, its messages) -> the total reward.
        gold: the column with the answer that a right agent gives.
    """
    names = find_name_clashes(talk.script.tools)
    talk, times = copy.copy(talk), _CallTimes()
    talk.failures = EpisodeFailures("none", on_infrastructure="mask")
    played = [
        [_run_episode(talk, times, prompt, name, agent) for _ in range(2)]
        for prompt in prompts
        for name, agent in _agents(talk, gold, prompt)
    ]
    for one in itertools.chain.from_iterable(played):
        if one.error is None:
            one.total = reward(one.group, [list(c.messages or ()) for c in one.group.completions])
    first = [pair[0] for pair in played]
    return Findings(
        [*_describe(first), *(f"{name}: at most {seconds:.3g} s" for name, seconds in times.longest.items())],
        [*names, *_failures(first), *_transcripts(first), *_rewards(first), *_leaks(first, gold), *_differing(played)],
    )


# ---- agents ----------------------------------------------------------------------------------------------------------


def _agents(talk: Conversation, gold: str, prompt: Prompt) -> Iterator[tuple[str, Agent]]:
    if gold in prompt.columns:
        yield "gold", lambda turn: (str(prompt.columns[gold]), True)
    yield "empty", lambda turn: ("", True)
    yield "garbage", lambda turn: ("".join(random.Random(f"{prompt.row} {turn}").choices(GARBAGE, k=40)), True)
    yield "silent", lambda turn: ("  \n", False)
    if talk.script.environment is not None and talk.script.environment.tool_names and (text := _call_text(talk)):
        yield "caller", lambda turn: (text, True)


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


class _ScriptedEngine(QueueEngine):
    """An engine that says what the agent of its one episode says."""

    def __init__(self, talk: Conversation, agent: Agent) -> None:
        super().__init__("scripted")
        self.talk, self.agent, self.turns, self.drifted = talk, agent, itertools.count(), 0

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """Returns the next turn; [] = nothing in flight."""
        if not self.queue:
            return []
        request, tokenizer, end_ids = self.queue.popleft(), self.talk.encode.tokenizer, self.talk.end_ids
        text, ends = self.agent(turn := next(self.turns))
        ids = [*tokenizer(text, add_special_tokens=False).input_ids, *(list(end_ids[:1]) if ends else [])]
        ids = (ids or list(request.tokens[-1:]))[: request.sampling.max_tokens]
        self.drifted += bool(turn) and not np.array_equal(request.tokens, _whole(tokenizer, request.tokens))
        columns = {"logprobs": np.zeros(len(ids), np.float32), "versions": np.zeros(len(ids), np.int32)}
        reason = "stop" if ends and len(ids) and ids[-1] in end_ids else "length"
        return [Output(id=request.id, tokens=np.array(ids, np.int32), **columns, finish_reason=reason)]


class _CallTimes(Trace):
    """The longest call of each name."""

    def __init__(self) -> None:
        super().__init__(keep=0)
        self.longest: dict[str, float] = {}

    def add(self, name: str, seconds: float, **tags: Any) -> None:
        self.longest[tags["call"]] = max(self.longest.get(tags["call"], 0.0), seconds)


def _run_episode(talk: Conversation, times: _CallTimes, prompt: Prompt, name: str, agent: Agent) -> _Played:
    """Plays an episode without a model."""
    engine, sampling = _ScriptedEngine(talk, agent), Sampling(max_tokens=talk.max_tokens)
    driver = RolloutDriver(engine, trace=times)
    episode = Episode(prompt, (0, 0, 0, 0), lambda e: talk.run_episode(e, sampling))
    try:
        (group,) = driver.run([episode])
    except DataError as error:
        failed = stand_in(episode, {"turns": 0, "error": str(error)}, "error")
        group = Group(prompt=prompt, completions=(failed,))
    finally:
        driver.close()
    return _Played(name, group, engine.drifted)


def _whole(tokenizer: Any, ids: np.ndarray) -> np.ndarray:
    """Returns the ids of the same text, encoded as a whole."""
    text = tokenizer.decode([int(i) for i in ids], clean_up_tokenization_spaces=False)
    return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, np.int32)


# ---- what it shows ---------------------------------------------------------------------------------------------------


def _describe(played: Sequence[_Played]) -> Iterator[str]:
    """Yields a line for each agent: its turns, and its rewards in the rows."""
    for agent in dict.fromkeys(p.agent for p in played):
        of = [p for p in played if p.agent == agent]
        turns = [p.info["turns"] for p in of]
        shown = ", ".join("failed" if p.error else f"{p.total:.4g}" for p in of)
        least, most = min(turns), max(turns)
        counted = f"{least} to {most} turns" if least < most else f"{most} turn{'s' * (most != 1)}"
        yield f"{agent}: {counted}; rewards {shown}"


def _failures(played: Sequence[_Played]) -> Iterator[str]:
    for error in dict.fromkeys(p.error for p in played if p.error):
        agents = ", ".join(dict.fromkeys(p.agent for p in played if p.error == error))
        yield f"it fails with the agent {agents}: {error}; a run ends there, or leaves such episodes out"


def _transcripts(played: Sequence[_Played]) -> Iterator[str]:
    forks = [p.agent for p in played if p.info.get("forks")]
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
    rows = [list(of) for _, of in itertools.groupby(known, key=lambda p: p.group.prompt.row)]
    if rows and all(len({p.total for p in row if not np.isnan(p.total)}) <= 1 for row in rows):
        yield "all agents have the same reward in each row: nothing would be learned from it"
        return
    for row in rows:
        totals = {p.agent: p.total for p in row}
        if (best := totals.get("gold")) is None:
            continue
        better = [name for name, total in totals.items() if total > best]
        if better:
            yield f"row {row[0].group.prompt.row}: {', '.join(better)} scores higher than the right answer ({best:.4g})"
        elif best == totals.get("empty"):
            yield f"row {row[0].group.prompt.row}: the right answer scores {best:.4g}, as an empty one does"


def _leaks(played: Sequence[_Played], gold: str) -> Iterator[str]:
    for p in played:
        row, answer = p.group.prompt.row, str(p.group.prompt.columns.get(gold, ""))
        if p.agent == "empty" and answer and any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", t) for t in p.told):
            yield f"row {row}: the environment tells the answer {answer!r:.60} to an agent that says nothing"


def _differing(played: Sequence[Sequence[_Played]]) -> Iterator[str]:
    for a, b in played:
        same = a.told == b.told and (a.total == b.total or (np.isnan(a.total) and np.isnan(b.total)))
        if not same or a.error != b.error:
            yield (
                f"row {a.group.prompt.row}, agent {a.agent}: a second episode with the same turns went another way; a "
                "resumed run does not repeat it: draw from a seed in the row, or set rollout.answers_dir"
            )
            return

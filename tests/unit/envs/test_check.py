"""`whet env check`: an environment is played by scripted agents, and what is wrong with it is told."""

import itertools
import json
import random

import pytest
from chat_templates import TEMPLATES, TOOLS, tokenizer_with

from whet.cli import main
from whet.data.prompts import PromptEncoder
from whet.envs import Conversation, load_script
from whet.envs.check import check_environment, find_name_clashes
from whet.rewards.manager import RewardManager

ENDS = {"llama": "<|eot|>", "gemma": "<|eot|>", "mistral": None}


class Guess:
    """A number is looked for."""

    def reset(self, prompt, answer, **row):
        self.number, self.tries, self.done = answer, 0, False

    async def step(self, message):
        self.tries += 1
        digits = "".join(c for c in message["content"] if c in "0123456789")
        self.done = digits == self.number
        return "Write a number." if not digits else "higher" if int(digits) < int(self.number) else "lower"

    def get_reward(self):
        return 1.0 / self.tries if self.done else 0.0


class Till(Guess):
    """The model pays by a tool."""

    def pay(self, amount: int) -> str:
        """Pays.

        Args:
            amount: in cents.
        """
        return f"paid {amount}"


def checked(kind, template=TOOLS, *, answers=("7", "12"), reward=None, end="<|im_end|>"):
    tokenizer = tokenizer_with(template)
    script = load_script(kind, turns=3)
    encode = PromptEncoder(tokenizer, apply_chat_template=True, tools=script.tools)
    rows = [{"prompt": [{"role": "user", "content": "Guess."}], "answer": answer} for answer in answers]
    manager = RewardManager(reward or [], groups_have_rewards=reward is None)
    end_ids = [tokenizer.eos_token_id if end is None else tokenizer.convert_tokens_to_ids(end)]
    talk = Conversation(script, encode, end_ids=end_ids, max_turns=3, max_tokens=2000)
    total = lambda group, messages: float(manager([group], [messages]).total[0])
    found = check_environment(talk, [encode(row, i) for i, row in enumerate(rows)], total)
    return "\n".join(found.facts), "\n".join(found.problems)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_sound_environment_has_no_problem_and_a_rewriting_template_is_told(name):
    facts, problems = checked(Guess, TEMPLATES[name], end=ENDS.get(name, "<|im_end|>"))
    assert "gold: 1 turn; rewards 1, 1" in facts and "empty: 3 turns; rewards 0, 0" in facts
    assert "silent: " in facts and "garbage: " in facts and "step of Guess: at most 0." in facts
    forks = name == "qwen3"  # it shows that a turn had no thinking
    assert ("rewrites earlier turns" in problems) is forks and len(problems.splitlines()) == forks


def test_a_caller_plays_an_environment_with_tools():
    facts, problems = checked(Till)
    assert "caller: 3 turns; rewards 0, 0" in facts and "the tools of Till: at most" in facts and not problems


def told_the_answer(self, message):
    return f"It is {self.number}, isn't it?"


NUMBERS = itertools.count()
FAULTS = {
    "leak": ({"step": told_the_answer}, r"row 0: the environment tells the answer '7' to an agent that says nothing"),
    "chance": ({"step": lambda self, message: str(random.random())}, "a second episode with the same turns went"),
    "chance of the reward": ({"get_reward": lambda self: next(NUMBERS)}, "row 0, agent gold: a second episode"),
    "no spread": ({"get_reward": lambda self: 1.0}, "all agents have the same reward in each row"),
    "no reward": ({"get_reward": lambda self: None}, "no agent has a reward: all are None"),
    "rewards silence": (
        {"get_reward": lambda self: float(self.tries)},
        "row 1: empty, garbage, silent scores higher than the right answer (1)",
    ),
    "fails": ({"step": lambda self, message: 1 / 0}, "it fails with the agent gold, empty, garbage, silent: step of"),
    "wrong answer": ({"step": lambda self, message: 5}, "step of Faulty returned 5; return a text or a list"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told(fault):
    methods, words = FAULTS[fault]
    assert words in checked(type("Faulty", (Guess,), methods))[1]


def test_names_of_tools_that_clash():
    tool = lambda name: {"type": "function", "function": {"name": name}}
    assert find_name_clashes([tool("add"), tool("add"), tool("sub")]) == [
        "2 tools are named 'add', and the model calls them by name: rename one"
    ]
    assert find_name_clashes([tool("add"), tool("sub")]) == []

    class Both(Till):
        def Pay(self, amount: int) -> str:
            """Pays too.

            Args:
                amount: in cents.
            """
            return ""

    assert "tools differ only in capitals: 'Pay', 'pay'" in checked(Both)[1]


ENV = """
TOOL = [{"type": "function", "function": {"name": name}} for name in ("look", "look")]

def interact(messages):
    return [] if messages[-1]["content"] else [{"role": "tool", "content": "?"}]

def reward_fn(messages, answer):
    return float(messages[-1]["content"] == answer)
"""


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}?", "answer": "x"}) for i in range(4)))
    words = ["env", "check", "tokenizer=byte", "data=data.jsonl", "data.apply_chat_template=true"]
    assert main([*words, "rollout.env_path=env.py", "rollout.max_turns=2", "rows=2"]) == 0
    printed = capsys.readouterr().out
    assert "gold: 1 turn; rewards 1, 1\nempty: 2 turns; rewards 0, 0" in printed
    assert "problem: 2 tools are named 'look'" in printed
    assert main([*words, "rows=0"]) == 2 and "rows=0: expected how many rows to play" in capsys.readouterr().err
    assert main(words) == 2 and "write rollout.env_path=file.py" in capsys.readouterr().err

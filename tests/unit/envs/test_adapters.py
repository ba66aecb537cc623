"""Environments of other packages, each played where its package is installed."""

import socket
import threading
import time
from importlib import util

import agent_runs
import numpy as np
import pytest
from helpers import cluster, tiny_model

from whet.config import DataConfig, GRPOConfig, Mode
from whet.data.tokenizer import byte_tokenizer
from whet.envs import EnvironmentClass
from whet.envs.adapters.gymnasium import Gymnasium
from whet.envs.adapters.harbor import HarborTask, harbor_rows
from whet.envs.adapters.openenv import OpenEnv
from whet.envs.adapters.textarena import TextArena
from whet.envs.adapters.verifiers import VerifiersAgent
from whet.envs.sandbox_server import missing_protection
from whet.errors import ConfigError, DataError
from whet.learners.grpo import GRPOLearner
from whet.learners.step import Step


def needs(package):
    return pytest.mark.skipif(util.find_spec(package) is None, reason=f"the package {package} is not installed")


def say(text):
    return {"role": "assistant", "content": text}


def sampled(kind, rows, turns=3):
    """The completions of a step in which a tiny model plays."""
    tokenizer = byte_tokenizer()
    rollout = {"env_path": kind, "max_turns": turns, "max_tokens_to_generate": 4, "max_prompt_length": 1500}
    made = cluster(
        actor=tiny_model(max_position_embeddings=4096),
        tokenizer=tokenizer,
        rollout={**rollout, "max_episode_tokens": 2000},
        max_tokens_per_microbatch=8192,
    )
    learner = GRPOLearner(made, GRPOConfig(beta=0.0, num_generations=2), None, data=DataConfig(batch_size=len(rows)))
    encode = learner.encoder(Mode.TRAIN)
    step = learner.reward(learner.sample(Step(index=1, prompts=[encode(row, i) for i, row in enumerate(rows)])))
    learner.close()
    return step


class Guess(TextArena):
    env_id = "GuessTheNumber-v0"


class Noughts(TextArena):
    env_id, num_players = "TicTacToe-v0", 2

    def _play(self, player, observation):
        return "[0]" if "'[0]'" in observation else "[1]"


class Lake(Gymnasium):
    env_id, options = "FrozenLake-v1", {"is_slippery": False}


class Echo(OpenEnv):
    action_field, observation_field = "text", "text"


@needs("textarena")
def test_a_game_of_one_player():
    game = Guess()
    assert "guess the number between 1 and 20" in game.reset(prompt="?", seed=3)
    assert game.step(say("I say [5]")) == "The target number is higher." and "invalid move" in game.step(say("hm"))
    answers = []
    for number in range(6, 21):
        answers.append(game.step(say(f"[{number}]")))
        if game.done:
            break
    assert game.done and game.get_reward() == 1.0 and answers[-1] == ""
    again = Guess()
    again.reset(seed=3)
    again.step(say(f"[{number}]"))
    assert again.get_reward() == 1.0  # the seed makes the game


@needs("textarena")
def test_a_game_of_two_players_tells_what_the_other_did():
    game = Noughts()
    game.reset(seed=1)
    answer = game.step(say("[4]"))
    assert "Player 1 placed their symbol (X) in cell 0" in answer and "[Player 0]" not in answer

    class Alone(TextArena):
        env_id, num_players = "TicTacToe-v0", 2

    with pytest.raises(ConfigError, match="Alone has 2 players; write _play"):
        Alone()


@needs("textarena")
def test_a_model_plays_a_game():
    chat = [{"role": "user", "content": "Play. "}]
    step = sampled(Guess, [{"prompt": chat, "seed": 5}])
    assert np.isfinite(step.rewards.total).all() and dict(step.rewards.table).keys() == {"environment"}
    for c in step.groups[0].completions:
        assert [m["role"] for m in c.messages] == ["assistant", "user", "assistant"]  # two invalid moves lose the game
        assert "invalid move" in c.messages[1]["content"]
        assert "Play. You are Player 0" in c.info["prompt"][0]["content"]


@needs("gymnasium")
def test_a_discrete_environment_of_gymnasium():
    lake = Lake()
    assert lake.reset(seed=1, prompt="?") == "0" and lake.step(say("I go 2 times: 1")) == "4"
    assert lake.step(say("9")) == lake.step(say("no")) == "This is no valid action. The actions are Discrete(4)."
    for action in (1, 2, 2, 1, 2):
        lake.step(say(str(action)))
    assert lake.done and lake.get_reward() == 1.0
    lake.close()


@needs("gymnasium")
def test_a_text_environment_of_gymnasium_is_played_by_a_model():
    import gymnasium

    class Words(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(100, charset=[chr(i) for i in range(32, 127)])

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.turn = 0
            return "say a word", {}

        def step(self, action):
            self.turn += 1
            return f"{len(action)}!", 0.5, self.turn == 2, False, {}

    gymnasium.register("whet/Words-v0", Words)

    class Speak(Gymnasium):
        env_id = "whet/Words-v0"

    assert Speak().reset() == "say a word"
    step = sampled(Speak, [{"prompt": [{"role": "user", "content": "Now "}], "seed": 1}], turns=4)
    for c in step.groups[0].completions:
        told = [m["content"] for m in c.messages if m["role"] == "user"]
        valid = sum(text[:-1].isdigit() for text in told)
        assert valid + sum("no valid action" in text for text in told) == len(told)
    assert all(total % 0.5 == 0 for total in step.rewards.total)


@pytest.mark.full  # the package takes seconds to import
@needs("openenv")
def test_a_session_of_a_server_of_openenv():
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Said(Action):
        text: str

    class Seen(Observation):
        text: str = ""

    class Server(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, **_):
            self.number = 0
            return Seen(text=f"seed {seed}")

        def step(self, action, **_):
            self.number += 1
            return Seen(text=action.text.upper(), reward=0.25, done=self.number == 2)

        @property
        def state(self):
            return State()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(
            create_fastapi_app(Server, Said, Seen, max_concurrent_envs=8), port=port, log_level="error", ws="auto"
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    Echo.base_url = f"http://127.0.0.1:{port}"
    try:
        session = Echo()
        assert session.reset(seed=7, prompt="?") == "seed 7" and session.step(say("hi")) == "HI" and not session.done
        assert session.step(say("you")) == "YOU" and session.done and session.get_reward() == 0.5
        session.close()
        step = sampled(Echo, [{"prompt": [{"role": "user", "content": "Now "}], "seed": 3}])
        assert step.rewards.total.tolist() == [0.5, 0.5]
        assert all("Now seed 3" in c.info["prompt"][0]["content"] for c in step.groups[0].completions)
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.mark.parametrize(
    ("kind", "package"), [(Guess, "textarena"), (Lake, "gymnasium"), (Echo, "openenv")], ids=lambda x: str(x)
)
def test_an_adapter_is_an_environment_and_names_its_extra(kind, package, monkeypatch):
    made = EnvironmentClass(kind)
    assert made.tool_names == [] and made.has_step and made.has_reward
    monkeypatch.setitem(__import__("sys").modules, package, None)
    if package == "openenv":
        monkeypatch.setitem(__import__("sys").modules, "openenv.core", None)
    with pytest.raises(ConfigError, match=rf"need the package; pip install .*\[{package}\]"):
        kind()


GUESSES = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    letter: str


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def turns(self, trace):
        return float(trace.num_turns)


class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for letter in "ab":
            yield Task(Data(prompt="Guess.", letter=letter, system_prompt="Say a letter."))


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[GameConfig]):
    async def run(self, task, agents):
        if task.data.letter == "b":
            raise KeyError("b")
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                segment = await interaction.turn(f"No, not {len(segment.last_reply)} characters.")


__all__ = ["Tasks", "Game"]
"""


@needs("verifiers")
def test_an_environment_of_verifiers_with_turns_is_played_by_a_model(tmp_path, monkeypatch):
    (tmp_path / "guess_taskset.py").write_text(GUESSES)
    monkeypatch.syspath_prepend(tmp_path)
    play = VerifiersAgent({"taskset": {"id": "guess-taskset"}})
    made = agent_runs.learner(play, algo={"num_generations": 2}, on_reward_error="none")
    encode = made.encoder(Mode.TRAIN)
    prompts = [encode(row, i) for i, row in enumerate(play.rows())]
    step = made.reward(made.sample(Step(index=1, prompts=prompts)))
    made.close()
    first, second = step.groups
    assert first.rewards["agent"].tolist() == [3.0, 3.0] and np.isnan(second.rewards.get("agent", [np.nan])).all()
    for c in first.completions:
        assert c.info["turns"] == 3 and [m["role"] for m in c.messages] == ["assistant", "user"] * 2 + ["assistant"]
    assert all("KeyError" in c.info["error"] for c in second.completions)
    with pytest.raises(ConfigError, match="verifiers refuses the configuration"):
        VerifiersAgent({"taskset": {"id": "no-taskset"}})


@pytest.fixture
def harbor(tmp_path):
    """A folder with a task of Harbor's: a function to repair."""
    task = tmp_path / "add"
    for folder in ("environment", "tests"):
        (task / folder).mkdir(parents=True)
    (task / "instruction.md").write_text("Repair add in calc.py.")
    (task / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 20.0\n')
    (task / "environment" / "Dockerfile").write_text("FROM python:3.12-slim\nWORKDIR /app\nCOPY calc.py .\n")
    (task / "environment" / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (task / "tests" / "test_calc.py").write_text("from calc import add\n\ndef test_sum():\n    assert add(2, 3) == 5\n")
    return tmp_path


@pytest.mark.skipif(missing_protection() is not None, reason="no sandbox here")
def test_a_task_folder_of_harbor_is_judged_by_its_tests(harbor):
    (row,) = harbor_rows(harbor)
    assert row["prompt"] == "Repair add in calc.py."
    task = HarborTask()
    task.reset(**row)
    assert task.list_files() == "calc.py" and "a - b" in task.read_file("calc.py") and task.get_reward() == 0.0
    task.write_file("calc.py", "def add(a, b):\n    return a + b\n")
    assert task.run_python("from calc import add; print(add(2, 3))") == "5\n" and task.get_reward() == 1.0
    task.write_file("calc.py", 'print("{}")\nraise SystemExit(0)')
    assert task.get_reward() == 0.0
    for path in ("../x", "/tmp/x", "calc.py/x", ""):
        with pytest.raises(ValueError, match="folder"):
            task.write_file(path, "")
    names = [tool["function"]["name"] for tool in EnvironmentClass(HarborTask).tools.schemas]
    assert names == ["list_files", "read_file", "run_python", "write_file"]


def test_a_task_of_harbor_that_needs_a_container_is_refused(harbor):
    (harbor / "add" / "environment" / "Dockerfile").write_text("FROM python\nRUN apt-get install -y gcc\n")
    with pytest.raises(ConfigError, match="runs 'apt-get install -y gcc', and there is no container"):
        harbor_rows(harbor)
    (harbor / "add" / "tests" / "test_calc.py").rename(harbor / "add" / "tests" / "test.sh")
    with pytest.raises(ConfigError, match=r"has no tests/test_\*.py"):
        harbor_rows(harbor)
    with pytest.raises(DataError, match="has no task folder"):
        harbor_rows(harbor / "add")

from whet.tunix.agentic import agents as agents
from whet.tunix.agentic import collect as collect
from whet.tunix.agentic import environments as environments
from whet.tunix.agentic import learner as learner
from whet.tunix.agentic import rewards as rewards
from whet.tunix.agentic import tools as tools
from whet.tunix.agentic.agents import Action as Action
from whet.tunix.agentic.agents import ConversationAgentBase as ConversationAgentBase
from whet.tunix.agentic.agents import LLMBaseAgent as LLMBaseAgent
from whet.tunix.agentic.agents import ModelAgent as ModelAgent
from whet.tunix.agentic.agents import Step as Step
from whet.tunix.agentic.agents import ToolAgent as ToolAgent
from whet.tunix.agentic.agents import Trajectory as Trajectory
from whet.tunix.agentic.agents import TrajectoryItem as TrajectoryItem
from whet.tunix.agentic.agents import TrajectoryStatus as TrajectoryStatus
from whet.tunix.agentic.collect import ChatTemplateParser as ChatTemplateParser
from whet.tunix.agentic.collect import TrajectoryCollectEngine as TrajectoryCollectEngine
from whet.tunix.agentic.config import AgenticGRPOConfig as AgenticGRPOConfig
from whet.tunix.agentic.environments import BaseEnv as BaseEnv
from whet.tunix.agentic.environments import BaseTaskEnv as BaseTaskEnv
from whet.tunix.agentic.environments import EnvStepResult as EnvStepResult
from whet.tunix.agentic.environments import TaskEnvironment as TaskEnvironment
from whet.tunix.agentic.environments import ToolEnvironment as ToolEnvironment
from whet.tunix.agentic.learner import AgenticGRPOLearner as AgenticGRPOLearner
from whet.tunix.agentic.rewards import RewardOutput as RewardOutput
from whet.tunix.agentic.tools import BaseTool as BaseTool
from whet.tunix.agentic.tools import CalculatorTool as CalculatorTool
from whet.tunix.agentic.tools import GeminiToolParser as GeminiToolParser
from whet.tunix.agentic.tools import QwenToolParser as QwenToolParser
from whet.tunix.agentic.tools import ToolCall as ToolCall
from whet.tunix.agentic.tools import ToolManager as ToolManager
from whet.tunix.agentic.tools import ToolOutput as ToolOutput
from whet.tunix.agentic.tools import ToolParser as ToolParser

agent_types = agents
agentic_grpo_learner = learner
base_agent = agents
base_environment = environments
base_tool = tools
calculator_tool = tools
model_agent = agents
parser = collect
reward = rewards
reward_types = rewards
task_environment = environments
tool_agent = agents
tool_environment = environments
tool_manager = tools
tool_parser_base = tools
tool_parser_registry = tools
trajectory_collect_engine = collect

ABSENT: dict[str, str]

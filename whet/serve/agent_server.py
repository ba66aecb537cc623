"""AgentServer: the API inside a training run. A key names an episode, and the episode answers the calls that bring it.

    server = AgentServer(model)
    inbox = server.open_episode()           inbox.key is the agent's API key
    events = await inbox.get()              its calls, and its end
    event.begin(model, session), event.finish(outputs)
    inbox.close()                           later calls get status 410

Handler threads read a call, put it into its episode's inbox, and wait. The thread that runs the episodes makes the
engine's requests and the response, so tokenizer, session and engine belong to one thread. Left out on purpose: streams
that show tokens as they are drawn; a streamed response comes whole.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.envs.sessions import Session
from whet.rollout.base import Output
from whet.serve.api_errors import ApiError, to_api_error
from whet.serve.calls import ROUTES, Call
from whet.serve.chat_model import ChatModel
from whet.serve.run_model import RunModel
from whet.serve.server import POLL_S, ApiHandler, ApiServer, Disconnected

__all__ = ["AgentCall", "AgentEnd", "AgentServer", "Inbox", "episode_over"]


def episode_over() -> ApiError:
    """Returns the error for a call to an episode that has ended. Clients don't repeat a call with this status."""
    return ApiError(410, "this episode has ended; an agent may call the model until it returns", code="episode_ended")


@dataclass(frozen=True, kw_only=True, eq=False)
class AgentEnd:
    """The end of an agent."""

    value: Any = None
    """What it returned."""
    error: BaseException | None = None
    """What it raised; a CallTimeoutError if it was late."""


class AgentCall:
    """A call of an agent, from its handler's thread to the episode and back.

    Args: call_class: of the route. body: of the request, checked.
    """

    def __init__(self, call_class: type[Call], body: Any) -> None:
        self.call_class, self.body = call_class, body
        self.answer: list[dict[str, Any]] | ApiError | None = None
        """The response, or the chunks of a streamed one; None = not yet."""
        self.is_abandoned = False
        """Whether the client has gone. What it never received is not trained."""
        self.call: Call
        self._answered = threading.Event()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> AgentCall:
        """Returns the call of `as_record`."""
        body_class, call_class = ROUTES[record["path"]]
        return cls(call_class, body_class.model_validate(record["body"]))

    def as_record(self) -> dict[str, Any]:
        """Returns path and body for JSON."""
        path = next(path for path, (_, call_class) in ROUTES.items() if call_class is self.call_class)
        return {"path": path, "body": self.body.model_dump(mode="json", exclude_unset=True)}

    def begin(self, model: ChatModel, session: Session) -> Call | None:
        """Returns the call of the engine; None = it was refused. Args: session: that records it."""
        try:
            self.call = self.call_class(model, self.body, session)
        except Exception as error:  # the agent's mistake, as a rule; it receives it
            self.refuse(to_api_error(error))
            return None
        return self.call

    def finish(self, outputs: Sequence[Output]) -> None:
        """Answers, and records the turns. Args: outputs: of the call's requests, in order."""
        if self.is_abandoned:
            return
        try:
            if self.body.stream:
                chunks = [c for i, output in enumerate(outputs) for c in self.call.chunks(i, output)]
                self._set([*chunks, *self.call.last_chunks()])
            else:
                self._set([self.call.response(outputs)])
        except ApiError as error:
            self.refuse(error)

    def refuse(self, error: ApiError) -> None:
        """Answers with an error, unless the call has its answer."""
        if self.answer is None:
            self._set(error)

    def wait(self, timeout_s: float) -> bool:
        """Returns whether the call has its answer."""
        return self._answered.wait(timeout_s)

    def _set(self, answer: list[dict[str, Any]] | ApiError) -> None:
        self.answer = answer
        self._answered.set()


class Inbox:
    """What an episode waits for: the calls of its agent, and the agent's end. Any thread may put events in.

    Args: key: the API key of the agent.

    >>> inbox = Inbox("k")
    >>> inbox.put(AgentEnd(value=1.0))
    >>> [event.value for event in asyncio.run(inbox.get())]
    [1.0]
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._events: list[AgentCall | AgentEnd] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, event: AgentCall | AgentEnd) -> None:
        """Adds an event. Raises ApiError: the episode has ended."""
        with self._lock:
            if self._is_closed:
                raise episode_over()
            self._events.append(event)
            waiting = self._waiting
        if waiting is not None:
            loop, arrived = waiting
            loop.call_soon_threadsafe(arrived.set)

    async def get(self) -> list[AgentCall | AgentEnd]:
        """Returns all events since the last time, at least one. One caller waits at a time."""
        arrived = asyncio.Event()
        with self._lock:
            self._waiting = asyncio.get_running_loop(), arrived
            if self._events:
                arrived.set()
        await arrived.wait()
        with self._lock:
            self._waiting = None
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Refuses the calls that wait, and all later ones."""
        with self._lock:
            self._is_closed = True
            events, self._events = self._events, []
        for event in events:
            if isinstance(event, AgentCall):
                event.refuse(episode_over())


class AgentServer(ApiServer):
    """Answers the calls of agents, on loopback, at a free port.

    Args: model: for /v1/models.
    """

    def __init__(self, model: RunModel) -> None:
        super().__init__("127.0.0.1", 0, None)
        self.model = model
        self._secret = secrets.token_bytes(32)
        self._numbers = itertools.count()
        self._inboxes: dict[str, Inbox] = {}
        self.start_thread()

    @property
    def handler(self) -> type[ApiHandler]:
        """The class that answers a connection."""
        return _AgentHandler

    @property
    def base_url(self) -> str:
        """The address for clients of OpenAI's API."""
        return f"{self.url}/v1"

    def open_episode(self) -> Inbox:
        """Returns the inbox of a new episode, under a new key."""
        inbox = Inbox(self._key(next(self._numbers)))
        self._inboxes[inbox.key] = inbox
        return inbox

    def close_episode(self, inbox: Inbox) -> None:
        """Ends an episode: its key is refused from now on."""
        self._inboxes.pop(inbox.key, None)
        inbox.close()

    def inbox(self, key: str) -> Inbox:
        """Returns the inbox of a key. Raises ApiError: the episode has ended, or no episode had this key."""
        own_inbox = self._inboxes.get(key)
        if own_inbox is not None:
            return own_inbox
        number = key.partition("-")[0]
        known = number.isdecimal() and len(number) < 20 and self._key(int(number))
        if known and hmac.compare_digest(known.encode(), key.encode("utf-8", "replace")):
            raise episode_over()
        raise ApiError(
            401,
            "wrong or missing API key; send the api_key that the agent was called with as Authorization: Bearer KEY",
            code="invalid_api_key",
        )

    def _key(self, number: int) -> str:
        """Returns the key of an episode. A secret signs the keys, so one can't be guessed from another."""
        return f"{number}-{hmac.new(self._secret, str(number).encode(), 'sha256').hexdigest()}"


class _AgentHandler(ApiHandler):
    server: AgentServer  # pyright: ignore[reportIncompatibleVariableOverride]
    log_level = logging.DEBUG

    def _check_allowed(self) -> None:
        """Raises ApiError for a request without the key of an episode that runs."""
        self._inbox = self.server.inbox(self._brought_key())  # the key names the episode, whatever session is named

    def _trajectories(self, path: str, body: bytes) -> None:
        raise ApiError(404, f"no route {path}: the run itself reads the trajectories")

    def _call(self, path: str, body: bytes) -> None:
        """Gives a call to its episode, and sends the answer."""
        body_class, call_class = ROUTES[path]
        model = self.server.model
        assert isinstance(model, RunModel)
        fields = model.without_own_settings(self._read_json(body))
        call = AgentCall(call_class, body_class.model_validate(fields))
        self._inbox.put(call)
        while not call.wait(POLL_S):
            if self._is_disconnected():
                call.is_abandoned = True
                raise Disconnected
        assert call.answer is not None
        if isinstance(call.answer, ApiError):
            raise call.answer
        if not call.body.stream:
            self._send(200, call.answer[0])
            return
        self._begin_stream()
        for chunk in call.answer:
            self._send_event(chunk)
        self._end_stream()

"""The HTTP server: routes, the API key, streaming by server-sent events, and clients that disconnect.

Each connection has a thread, which parses, tokenises, and waits for the engine's thread (engine_loop.py). A client that
disconnects has its requests cancelled. Every request is logged as one line.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import select
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from whet.config.serve import ServeConfig
from whet.envs.sessions import Session
from whet.errors import ConfigError
from whet.rollout.base import PartialOutput
from whet.rollout.sampler import Sampler
from whet.serve.api_errors import ApiError, to_api_error
from whet.serve.calls import ROUTES, Call, join_partials
from whet.serve.chat_model import ChatModel
from whet.serve.engine_loop import EngineLoop, Generation
from whet.serve.served_model import ServedModel
from whet.util.text_lines import escape_control_characters

__all__ = ["LOOPBACK", "SESSION_HEADER", "ApiHandler", "ApiServer", "Disconnected", "serving"]

log = logging.getLogger("whet")

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SESSION_HEADER = "X-Session-ID"
"""The header that names a session; /sessions/NAME before a route does the same."""
MAX_SESSIONS = 1024
"""Sessions that are kept; the one that was used least recently is forgotten first."""
MAX_BODY = 64 << 20
"""The most bytes of a body."""
POLL_S = 0.25
"""How often a thread that waits for the engine looks whether its client is still there."""


class Disconnected(Exception):
    """The client closed the connection before its response was complete."""


class ApiServer(ThreadingHTTPServer):
    """The server, bound to its address. `start` answers requests; until then clients wait.

    Args:
        host, port: where it listens; port 0 takes a free one.
        api_key: each request has to bring it as `Authorization: Bearer ...`; None = no key, on loopback only.
    Raises: ConfigError: no API key beyond loopback, or the address can't be bound.
    """

    daemon_threads = True
    request_queue_size = 512

    @property
    def handler(self) -> type[ApiHandler]:
        """The class that answers a connection."""
        return ApiHandler

    def __init__(self, host: str, port: int, api_key: str | None) -> None:
        if not api_key and host not in LOOPBACK:
            raise ConfigError(
                f"host={host}: other machines can reach it, so it needs an API key; leave api_key out for a random "
                "one, or set host=127.0.0.1"
            )
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.host, self.api_key = host, api_key
        self.model: ChatModel
        self.loop: EngineLoop
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._active = 0
        self._idle = threading.Condition()
        try:
            super().__init__((host, port), self.handler)
        except OSError as error:
            raise ConfigError(
                f"{host}:{port} can't be bound: {error.strerror or error}; set port=0 for a free one"
            ) from error

    @property
    def url(self) -> str:
        """The address, without a path."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.server_address[1]}"

    def start(self, model: ServedModel, loop: EngineLoop) -> None:
        """Answers requests from now on, in threads. Args: loop: runs, or will run, in another thread."""
        self.model, self.loop = model, loop
        self.start_thread()

    def start_thread(self) -> None:
        """Answers requests in threads from now on."""
        threading.Thread(target=self.serve_forever, args=(0.05,), name="whet-serve", daemon=True).start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Takes no more requests, and waits for the responses that are being written."""
        self.shutdown()
        with self._idle:
            self._idle.wait_for(lambda: not self._active, timeout_s)
        self.server_close()

    def session(self, name: str, *, create: bool = True) -> Session:
        """Returns the session of a name. Args: create: it may be new. Raises ApiError: it is not known."""
        with self._idle:
            if name not in self._sessions:
                if not create:
                    raise ApiError(404, f"no session {name!r}; it may have been forgotten")
                self._sessions[name] = Session(self.model)
            self._sessions.move_to_end(name)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
            return self._sessions[name]

    def count_active(self, change: int) -> None:
        """Counts the requests that are being answered."""
        with self._idle:
            self._active += change
            self._idle.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error outside of a request's own handling; a reset connection is not one."""
        log.debug("connection from %s", client_address, exc_info=True)


@contextmanager
def serving(sampler: Sampler, config: ServeConfig | None = None) -> Iterator[ApiServer]:
    """Serves a model from Python while the block runs; the engine steps in a thread.

    Args: sampler: the model; no other code uses it meanwhile. config: the settings; None = a free port. An api_key of
        None is a random one.
    Yields: the server, with its `url` and `api_key`.
    Raises: ConfigError: the address can't be bound.

    Example: `with serving(Sampler("runs/a")) as server: print(server.url)`.
    """
    config = ServeConfig(port=0) if config is None else config
    api_key = secrets.token_urlsafe(24) if config.api_key is None else config.api_key or None
    model = ServedModel(sampler, config)
    loop = EngineLoop(model.engine)
    server = ApiServer(config.host, config.port, api_key)
    thread = threading.Thread(target=loop.run, name="whet-engine", daemon=True)
    thread.start()
    server.start(model, loop)
    try:
        yield server
    finally:
        loop.stop()
        thread.join()
        server.stop()


class ApiHandler(BaseHTTPRequestHandler):
    """One connection of a client: its requests, one after the other."""

    server: ApiServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "whet", ""
    disable_nagle_algorithm = True
    timeout = 120.0
    log_level = logging.INFO
    """Of the line for each request."""

    def do_GET(self) -> None:
        """Answers a GET request."""
        self._answer({"/health": self._health, "/v1/models": self._models, "/trajectories": self._trajectories})

    def do_POST(self) -> None:
        """Answers a POST request."""
        self._answer(dict.fromkeys(ROUTES, self._call))

    def _answer(self, routes: dict[str, Any]) -> None:
        """Answers one request, and logs it."""
        self._start, self._note, self._status = time.monotonic(), "", 0
        path = unquote(urlsplit(self.path).path)
        self._session_name = self.headers.get(SESSION_HEADER)
        if found := re.fullmatch(r"/sessions/([^/]+)(/.*)", path):
            self._session_name, path = found[1], found[2]
        self.server.count_active(1)
        try:
            body = self._read_body()  # also of a request that is refused: the connection goes on after it
            if path != "/health":
                self._check_allowed()
            if path == f"/v1/models/{self.server.model.name}":
                path = "/v1/models"
            if path not in routes:
                known = ", ".join(["/v1/models", *ROUTES])
                raise ApiError(404, f"no route {self.command} {path}; there are {known}")
            routes[path](path, body)
        except (Disconnected, BrokenPipeError, ConnectionError, TimeoutError):
            self._status, self.close_connection = 499, True
            self._note = f"{self._note}, the client disconnected".removeprefix(", ")
        except Exception as error:
            self._fail(to_api_error(error))
            if self._status >= 500 and not isinstance(error, ApiError):
                log.debug("the error of %s", path, exc_info=True)
        finally:
            self.server.count_active(-1)
        if path != "/health":
            seconds = time.monotonic() - self._start
            session = f" [session {self._session_name[:40]}]" if self._session_name else ""
            line = f"{self.command} {path} {self._status}: {self._note or 'ok'}, {seconds:.2f} s{session}"
            log.log(self.log_level, "%s", escape_control_characters(line))

    def _fail(self, error: ApiError) -> None:
        """Sends an error; in a stream, as its last event."""
        self._note = f"{self._note}, {error.message}".removeprefix(", ")
        try:
            if self._status:
                self._send_event(error.body())
                self._end_stream()
            else:
                self._send(error.status, error.body())
        except (BrokenPipeError, ConnectionError, TimeoutError):
            self.close_connection = True
        self._status = error.status

    # ---- routes --------------------------------------------------------------------------------------------------

    def _health(self, path: str, body: bytes) -> None:
        self._send(200, {})

    def _models(self, path: str, body: bytes) -> None:
        model = self.server.model
        card = {"id": model.name, "object": "model", "created": model.created, "owned_by": "whet"}
        card["max_model_len"] = model.longest
        is_one = unquote(urlsplit(self.path).path).endswith(f"/models/{model.name}")
        self._send(200, card if is_one else {"object": "list", "data": [card]})

    def _trajectories(self, path: str, body: bytes) -> None:
        """Sends the token sequences of a session, as they can be trained on."""
        if self._session_name is None:
            raise ApiError(400, f"name a session, by the header {SESSION_HEADER} or as /sessions/NAME/trajectories")
        session = self.server.session(self._session_name, create=False)
        self._send(200, {"session": self._session_name, "trajectories": [s.as_dict() for s in session.sequences]})

    def _call(self, path: str, body: bytes) -> None:
        """Runs a call of the engine, and sends its response or its stream."""
        body_class, call_class = ROUTES[path]
        fields = self._read_json(body)
        session = None if self._session_name is None else self.server.session(self._session_name)
        call = call_class(self.server.model, body_class.model_validate(fields), session)
        generation = self.server.loop.submit(call.requests_of(self._conversation()), streams=call.body.stream)
        try:
            if call.body.stream:
                self._stream(call, generation)
            else:
                outputs: list[list[PartialOutput]] = [[] for _ in call.requests]
                for index, partial in self._events(generation):
                    outputs[index].append(partial)
                self._send(200, call.response([join_partials(partials) for partials in outputs]))
        finally:
            if generation.remaining:
                self.server.loop.cancel(generation)
            count = len(call.requests)
            self._note = (
                f"{count} choice{'s' * (count != 1)}, {call.prompt_tokens} prompt + {call.completion_tokens} "
                "completion tokens"
            )

    def _read_json(self, body: bytes) -> Any:
        """Returns the value of a body. Raises ApiError: it is not JSON, or has texts that UTF-8 can't hold."""
        try:
            value = json.loads(body)
            if rb"\ud" in body.lower():  # half of a surrogate pair, such as a cut emoji
                json.dumps(value, ensure_ascii=False).encode()
            return value
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON of valid texts: {error}") from error

    def _conversation(self) -> int | None:
        """Returns the number of the session's conversation; None = the request names no session."""
        name = self._session_name
        return None if name is None else int.from_bytes(blake2b(name.encode(), digest_size=8).digest())

    def _stream(self, call: Call, generation: Generation) -> None:
        """Sends the tokens of a call as they are drawn."""
        events = self._events(generation)
        with closing(events):
            first = next(events)  # an error before it is a response with its own status
            self._begin_stream()
            for chunk in call.chunks(*first):
                self._send_event(chunk)
            for event in events:
                for chunk in call.chunks(*event):
                    self._send_event(chunk)
        for chunk in call.last_chunks():
            self._send_event(chunk)
        self._end_stream()

    def _events(self, generation: Generation) -> Generator[tuple[int, PartialOutput]]:
        """Returns the events of a generation. Raises Disconnected: the client has gone."""
        while generation.remaining:
            event = generation.next(POLL_S)
            if event is not None:
                yield event
            elif self._is_disconnected():
                raise Disconnected

    def _is_disconnected(self) -> bool:
        """Returns whether the client has closed the connection."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    # ---- HTTP ----------------------------------------------------------------------------------------------------

    def _check_allowed(self) -> None:
        """Raises ApiError for a request without the key; without keys, for one that names another host.

        A page of another site reaches this server only by a name of its own for this machine.
        """
        key = self.server.api_key
        if key is None:
            if urlsplit("//" + self.headers.get("Host", "")).hostname not in LOOPBACK:
                raise ApiError(403, "this server answers only on loopback; use the address 127.0.0.1")
            return
        if not hmac.compare_digest(self._brought_key().encode("utf-8", "replace"), key.encode()):
            raise ApiError(
                401,
                "wrong or missing API key; send the key that whet serve printed as Authorization: Bearer KEY "
                "(OPENAI_API_KEY)",
                code="invalid_api_key",
            )

    def _brought_key(self) -> str:
        """Returns the API key that the request brings; "" = none."""
        return self.headers.get("Authorization", "").removeprefix("Bearer ").strip()

    def _read_body(self) -> bytes:
        """Returns the body of the request. Raises ApiError: it has no length, or is too long."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            self.close_connection = True
            raise ApiError(411, "send a Content-Length; this server reads no chunked bodies")
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            raise ApiError(413, f"Content-Length {length[:20]}: send at most {MAX_BODY} bytes")
        return self.rfile.read(int(length))

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        self._send_headers(status, "application/json", {"Content-Length": str(len(data))})
        self.wfile.write(data)

    def _send_headers(self, status: int, kind: str, headers: dict[str, str]) -> None:
        self._status = status
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_event(self, event: dict[str, Any]) -> None:
        self._send_data(b"data: " + json.dumps(event, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n")

    def _send_data(self, data: bytes) -> None:
        """Sends one chunk of a stream."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _begin_stream(self) -> None:
        self._send_headers(200, "text/event-stream", {"Transfer-Encoding": "chunked", "Cache-Control": "no-cache"})

    def _end_stream(self) -> None:
        self._send_data(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers a request that is no HTTP, or of another method, in OpenAI's form."""
        self.close_connection = True
        self._send(code, ApiError(code, message or "bad request").body())

    def log_message(self, format: str, *args: Any) -> None:
        """`_answer` logs instead."""

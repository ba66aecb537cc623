"""Serves the report of runs that go on: the same page over HTTP, which asks for new rows every two seconds.

The server only reads and answers GET alone. On loopback a request must name a loopback host, so that a page of another
site can't read a run through its own name for this machine; elsewhere each request needs a token.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from whet.errors import CheckpointError, ConfigError
from whet.report.completions import TokenTexts, load_token_texts, step_scripts
from whet.report.report import Warnings, page_text, script_text, standard_error
from whet.report.run_data import CompletionFile, completion_files, metric_columns, run_data
from whet.storage.run_folder import read_metrics

__all__ = ["LOOPBACK", "LiveRuns", "make_server"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CACHED_BYTES = 400_000_000
"""Scripts of completions that are kept in memory, beside those of the step that was asked for last."""


class LiveRuns:
    """What the page shows of runs that go on, read from their folders at each request.

    Args: runs: run folders. find_warnings: see `report.write_report`.
    Raises: ConfigError: a folder is no run, or has no rows yet.
    """

    def __init__(self, runs: Sequence[str | Path], find_warnings: Warnings | None = None) -> None:
        self._folders = [Path(run) for run in runs]
        self._find_warnings = find_warnings
        self._lock = threading.Lock()
        self._scripts_lock = threading.Lock()
        self._scripts: OrderedDict[tuple[Path, int], dict[str, bytes]] = OrderedDict()
        self._errors: dict[tuple[Path, int], float | None] = {}
        self._texts: dict[int, TokenTexts] = {}
        self._configs: dict[int, dict[str, Any]] = {}
        """The configuration of each run, as of the last `data`: it has the bounds of warnings."""
        self.title = " · ".join(data["name"] for data in self.data())

    def data(self) -> list[dict[str, Any]]:
        """Returns what the page begins with: for each run `run_data`, with its warnings and the list of its
        completions.
        """
        found = [run_data(folder) for folder in self._folders]
        self._configs = {i: data["config"] for i, data in enumerate(found)}
        return [{**data, **self._with_completions(i, data)} for i, data in enumerate(found)]

    def update(self, i: int, cursors: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        """Returns what is new in a run.

        Args: i: the run. cursors: mode -> (rows that the page has, step of the last of them).
        Returns: `metrics`: mode -> `metric_columns` of the new rows, and `replace`: whether they are all rows, because
            the run was resumed from an earlier step; `warnings` and `completions`, whole.
        """
        rows = read_metrics(self._folders[i])
        of_mode = {mode: [row for row in rows if row["mode"] == mode] for mode in cursors}
        whole = {mode: metric_columns(rows_of_mode) for mode, rows_of_mode in of_mode.items()}
        new = {}
        for mode, (count, step) in cursors.items():
            rows_of_mode = of_mode[mode]
            continues = count == 0 or (count <= len(rows_of_mode) and rows_of_mode[count - 1]["step"] == step)
            new[mode] = {"replace": not continues, **metric_columns(rows_of_mode[count if continues else 0 :])}
        return {**self._with_completions(i, {"config": self._configs[i], "metrics": whole}), "metrics": new}

    def script(self, key: str) -> bytes:
        """Returns a script of a file of completions.

        Args: key: the run's number, mode and step, as the page has them, and the part; without it, the index:
            0-train-000012.3.
        Raises: KeyError: there is no such script.
        """
        number, _, name = key.partition("-")
        name, dot, part = name.partition(".")
        if not number.isdecimal() or int(number) >= len(self._folders):
            raise KeyError(key)
        i = int(number)
        file = next((f for f in completion_files(self._folders[i]) if f.key == name), None)
        if file is None:
            raise KeyError(key)
        with self._scripts_lock:
            at = (file.path, file.path.stat().st_mtime_ns)
            if at not in self._scripts:
                self._scripts[at] = {
                    suffix: script_text(f"{i}-{name}{suffix}", text).encode("utf-8", "replace")
                    for suffix, text in step_scripts(file.path, self._token_texts(i))
                }
                size = sum(len(text) for scripts in self._scripts.values() for text in scripts.values())
                while size > _CACHED_BYTES and len(self._scripts) > 1:
                    size -= sum(map(len, self._scripts.popitem(last=False)[1].values()))
            self._scripts.move_to_end(at)
            return self._scripts[at][dot + part]

    def _with_completions(self, i: int, data: dict[str, Any]) -> dict[str, Any]:
        files = completion_files(self._folders[i])
        with self._lock:
            entries = [f.entry(i, self._standard_error(f)) for f in files]
        warnings = self._find_warnings(data) if self._find_warnings is not None else []
        return {"completions": entries, "left_out": 0, "warnings": warnings}

    def _token_texts(self, i: int) -> TokenTexts | None:
        """Loads the tokenizer of run i, which has one in its folder only when a checkpoint is written."""
        if i not in self._texts:
            texts = load_token_texts(self._folders[i], run_data(self._folders[i])["config"].get("actor.model"))
            if texts is None:
                return None
            self._texts[i] = texts
        return self._texts[i]

    def _standard_error(self, file: CompletionFile) -> float | None:
        if file.mode != "eval":
            return None
        at = (file.path, file.path.stat().st_mtime_ns)
        if at not in self._errors:
            try:
                self._errors[at] = standard_error(file.path)
            except CheckpointError:
                self._errors[at] = None
        return self._errors[at]


def make_server(runs: LiveRuns, host: str, port: int, token: str | None) -> ThreadingHTTPServer:
    """Returns the server of the page, bound and not yet serving.

    Args: runs: what it shows. host, port: where it listens; port 0 takes a free one. token: what each request has to
        bring, as `?token=` at first and as a cookie then; None = nothing, for loopback alone.
    Raises: ConfigError: no token beyond loopback, or the address can't be bound.
    """
    if token is None and host not in LOOPBACK:
        raise ConfigError(f"host={host}: other machines can reach it, so it needs a token; pass one, or use 127.0.0.1")

    class Handler(_Handler):
        live, secret = runs, token

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    try:
        return Server((host, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} can't be bound: {error.strerror or error}; set port=0 for a free one"
        ) from error


class _Handler(BaseHTTPRequestHandler):
    live: LiveRuns
    secret: str | None
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "whet", ""
    timeout = 30.0

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if not self._is_allowed(query.get("token", "")):
            return self._send(403, "text/plain", b"this address needs the token that whet watch has printed\n")
        try:
            self._answer(unquote(url.path), query)
        except (ConfigError, CheckpointError, OSError) as error:
            self._send(503, "text/plain", f"{error}\n".encode())
        except (KeyError, ValueError, IndexError):
            self._send(404, "text/plain", b"not found\n")

    def _answer(self, path: str, query: Mapping[str, str]) -> None:
        if path == "/":
            return self._send(200, "text/html", page_text(self.live.title, live=True).encode(), cookie=self.secret)
        if path == "/data/runs.js":
            return self._send(200, "text/javascript", script_text("runs", self.live.data()).encode("utf-8", "replace"))
        if path == "/update":
            cursors = {mode: (int(query[mode]), int(query[f"{mode}_step"])) for mode in ("train", "eval")}
            update = self.live.update(int(query["run"]), cursors)
            return self._send(200, "application/json", json.dumps(update, allow_nan=False).encode("utf-8", "replace"))
        name = path.removeprefix("/data/").removesuffix(".js")
        self._send(200, "text/javascript", self.live.script(name))

    def _is_allowed(self, token: str) -> bool:
        if self.secret is None:
            return urlsplit("//" + self.headers.get("Host", "")).hostname in LOOPBACK
        cookie = SimpleCookie(self.headers.get("Cookie", "")).get("whet_token")
        brought = token or (cookie.value if cookie is not None else "")
        return hmac.compare_digest(brought.encode(), self.secret.encode())

    def _send(self, status: int, kind: str, body: bytes, *, cookie: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if cookie is not None:
            self.send_header("Set-Cookie", f"whet_token={cookie}; HttpOnly; SameSite=Strict; Path=/")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

"""`whet serve`: a model behind an OpenAI-compatible API, until Ctrl-C."""

from __future__ import annotations

import logging
import os
import secrets
import signal
from contextlib import suppress
from typing import Any

from whet.cli.generate import open_sampler
from whet.cli.output import print_text
from whet.config.serve import ServeConfig
from whet.parallel.torchrun_env import require_single_process
from whet.serve.engine_loop import EngineLoop
from whet.serve.served_model import ServedModel
from whet.serve.server import ApiServer

__all__ = ["serve"]

log = logging.getLogger("whet")


def serve(config: ServeConfig) -> None:
    """Serves a model until Ctrl-C or SIGTERM, and prints its address and its key.

    Args: config: the configuration.
    Raises: ConfigError: no model there, or the address can't be bound.
    """
    require_single_process("whet serve")
    api_key = os.environ.get("WHET_API_KEY") if config.api_key is None else config.api_key
    is_random = api_key is None
    api_key = secrets.token_urlsafe(24) if api_key is None else api_key or None
    server = ApiServer(config.host, config.port, api_key)  # before the model is loaded: the port may be taken
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        sizes = {"kv_cache_tokens": config.kv_cache_tokens, "max_length": config.max_length}
        log.info("loading the model %s", config.model)
        with open_sampler(config, max_batch_size=config.max_batch_size, **sizes) as sampler:
            model = ServedModel(sampler, config)
            loop = EngineLoop(model.engine)
            server.start(model, loop)
            shown = api_key if is_random else "the one that was set" if api_key else "none"
            print_text(f"{server.url}/v1\n  model: {model.name}\n  API key: {shown}\n  Ctrl-C ends it")
            with suppress(KeyboardInterrupt):
                loop.run()
            server.stop()
            log.info("stopped")
    finally:
        signal.signal(signal.SIGTERM, before)
        server.server_close()


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt

"""`whet serve`: an engine behind an OpenAI-compatible API, and behind a route that takes and returns token ids.

server.py         HTTP: routes, the API key, streaming by server-sent events, disconnected clients
bodies.py         the bodies of requests, checked
calls.py          one call of a route: its engine requests, and its response or chunks
chat_model.py     what a call needs of a model: tokenizer, chat template and tool calls
served_model.py   the model of `whet serve`, with its defaults of sampling
engine_loop.py    one thread steps the engine for the requests of all clients
api_errors.py     errors in OpenAI's form
agent_server.py   the API inside a training run: a key names an episode, which answers its calls
agent_episodes.py the episodes of agents; run_model.py is their model

In `whet serve`, handler threads parse, tokenise and wait, and only the engine's thread touches the engine. In a run the
thread that runs the episodes does all but the HTTP. Left out on purpose: several
models, embeddings, images, and OpenAI's Responses and Assistants APIs.
"""

"""`whet serve`: an engine behind an OpenAI-compatible API, and behind a route that takes and returns token ids.

server.py         HTTP: routes, the API key, streaming by server-sent events, disconnected clients
bodies.py         the bodies of requests, checked
calls.py          one call of a route: its engine requests, and its response or chunks
served_model.py   the model, its tokenizer and the defaults of sampling
engine_loop.py    one thread steps the engine for the requests of all clients
api_errors.py     errors in OpenAI's form

Handler threads parse, tokenise and wait; only the engine's thread touches the engine. Left out on purpose: several
models, embeddings, images, and OpenAI's Responses and Assistants APIs.
"""

"""Token ids of a prompt, and text of token ids."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from pydantic_core import from_json

from outpace.server.guard import check_body_complexity, parse_request
from outpace.server.http_error import HttpError
from outpace.server.request_handler import RequestHandler
from outpace.server.schema import BoundedTokenIds, ChatRequest, CompletionRequest, Name, StrictModel
from outpace.server.service import Service
from outpace.server.writer import Translation


class DetokenizeRequest(StrictModel):
    """Token ids whose text is wanted."""

    model: Name | None = None
    tokens: BoundedTokenIds


def parse_prompt_request(body: bytes) -> ChatRequest | CompletionRequest:
    check_body_complexity(body)
    try:
        value = from_json(body)
    except ValueError:
        value = None  # `parse_request` raises the error
    if isinstance(value, dict) and "messages" in value:
        return parse_request(ChatRequest, body)
    return parse_request(CompletionRequest, body)


async def tokenize(service: Service, body: bytes) -> dict[str, Any]:
    """Return the token ids of the prompt of a request, which is not answered."""
    handler = RequestHandler(service, parse_prompt_request(body))
    if len(handler.prompts) > 1:
        raise HttpError(400, "prompt: must be one prompt here", param="prompt")
    if handler.model.entry.lazy or not handler.model.engine.cache_usage:
        await service.client.update_stats()
    tokens, length = await encode_prompt(handler), handler.model.context_length
    return {"count": len(tokens), "max_model_len": length, "tokens": tokens}


async def count_tokens(service: Service, translation: Translation) -> dict[str, Any]:
    """Return the number of tokens of a translated request, which is not answered."""
    with translation.rename_faults():
        handler = RequestHandler(service, translation.request, translation)
        return {"input_tokens": len(await encode_prompt(handler))}


async def encode_prompt(handler: RequestHandler) -> list[int]:
    engine = handler.model.engine
    read = partial(engine.read_request, handler.prompts[0][0], handler.read_options)
    try:
        loop = asyncio.get_running_loop()
        tokens, *_ = await loop.run_in_executor(engine.tokenizer_executor, read)
    except ValueError as error:
        raise handler.validation_error(error) from None
    return tokens


async def detokenize(service: Service, body: bytes) -> dict[str, Any]:
    """Return the text of token ids, with special tokens."""
    request = parse_request(DetokenizeRequest, body)
    model = service.find_model(request.model)
    size = model.text.vocab_size
    if size is None:
        raise HttpError(400, f"model: {model.name} has no tokenizer", param="model")
    for place, token in enumerate(request.tokens):
        if token >= size:
            param = f"tokens.{place}"
            raise HttpError(400, f"{param}: must be less than {size}, got {token}", param=param)
    decode = partial(model.text.decode, request.tokens, special=True)
    text = await asyncio.get_running_loop().run_in_executor(model.engine.tokenizer_executor, decode)
    return {"prompt": text}

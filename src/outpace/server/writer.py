"""Interface between request handlers and the APIs in whose form they answer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import ValidationError

from outpace.api.output import Event, Output
from outpace.api.pending_request import PendingRequest
from outpace.server.http_error import HttpError
from outpace.server.models import HostedModel
from outpace.server.parsing import validation_http_error
from outpace.server.schema import ChatRequest


class AnswerWriter(ABC):
    """Format of everything that is sent for one request.

    Attributes:
        id: Id of the answer.
    """

    id: str

    @abstractmethod
    def begin_stream(self, pending: Sequence[PendingRequest]) -> str:
        """Return the events before all text, of the choices that were submitted."""

    @abstractmethod
    def format_event(self, index: int, event: Event) -> str:
        """Return the events for the progress of a choice."""

    @abstractmethod
    def end_stream(self, outputs: Sequence[Output]) -> bytes:
        """Return the events after all text."""

    @abstractmethod
    def format_answer(self, outputs: Sequence[Output], prompts: Sequence[Sequence[int]]) -> bytes:
        """Return the whole answer as one object; `prompts` are the token ids of each choice's."""

    @abstractmethod
    def format_failure(self, fault: HttpError) -> bytes:
        """Return the last event of a stream that fails."""


class Translation(ABC):
    """A request of another API, as a chat request.

    Attributes:
        RENAMED_FIELDS: Patterns of field paths of chat requests, and the paths of this API.
        request: The chat request.
    """

    RENAMED_FIELDS: ClassVar[Mapping[str, str]]
    request: ChatRequest

    @abstractmethod
    def open_writer(self, model: HostedModel, number: int) -> AnswerWriter:
        """Return the writer of the answer; `number` is the random number of the request."""

    def rename_fault(self, fault: HttpError) -> HttpError:
        """Return an error that names the field of this API."""
        if fault.param is None:
            return fault
        name = rename_field(fault.param, self.RENAMED_FIELDS)
        text = str(fault)
        if text.startswith(fault.param):
            text = name + text.removeprefix(fault.param)
        return HttpError(fault.status, text, param=name, code=fault.code, headers=fault.headers)

    @contextmanager
    def rename_faults(self) -> Iterator[None]:
        """Let errors name the fields of this API."""
        try:
            yield
        except HttpError as fault:
            if type(fault) is not HttpError:
                raise  # the client has disconnected
            raise self.rename_fault(fault) from None


def rename_field(param: str, names: Mapping[str, str]) -> str:
    """Return a path of fields with the first matching pattern replaced at its beginning."""
    for pattern, name in names.items():
        if re.match(pattern, param):
            return re.sub(pattern, name, param, count=1)
    return param


def build_chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """Return a chat request without the fields that are None; raises `HttpError` if invalid."""
    try:
        return ChatRequest.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        raise validation_http_error(error) from None

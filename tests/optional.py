"""Packages that tests may lack: what needs one of them is skipped without it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

OPTIONAL = (
    *("accelerate", "aiohttp", "build", "compressed_tensors", "datasets", "fastapi", "gguf"),
    *("httptools", "httpx2", "jsonschema", "llama_cpp", "llguidance", "lm_eval", "math_verify"),
    *("matplotlib", "nbclient", "openai", "playwright", "prometheus_client", "pydantic"),
    *("pydantic_ai",),
    *("ray", "schemathesis", "starlette", "tensorboard", "torchao", "triton", "uvicorn", "uvloop"),
    *("xllamacpp", "zensical"),
)
ABSENT = frozenset(name for name in OPTIONAL if find_spec(name) is None)
"""Optional packages that are not installed, before any test hides one."""


def absent_package(error: BaseException | None) -> str | None:
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            name = (error.name or "").partition(".")[0]
            if name in ABSENT:
                return name
        error = error.__cause__ or error.__context__
    return None


def skip_if_absent(report: Any, call: pytest.CallInfo[Any], path: Path) -> None:
    """Turn a failure for want of an optional package into a skip."""
    if report.failed and call.excinfo and (name := absent_package(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(path), 0, f"Skipped: {name} is not installed")

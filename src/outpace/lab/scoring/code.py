"""Scoring of programs: extract them from answers and run them with their tests."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

from outpace.jsonl import JsonRecord
from outpace.lab import sandbox

FENCE = "```"
PYTHON_FENCE = "```python\n"
FENCED_BLOCK = re.compile(r"```(?:\w+)?\n?(.*?)\n?```", re.DOTALL)
DONE_MARK = "[DONE]"
MAX_SANITIZED_LINES = 100

Definition = ast.ClassDef | ast.FunctionDef | ast.Assign


def judge_humaneval(answer: str, reference: JsonRecord) -> bool:
    """Judge HumanEval as Dream and D2F do: prompt and fenced block (or all), sanitized.

    The reference is a line of the published file.
    """
    code = answer.partition(PYTHON_FENCE)[2] or answer
    program = f"{reference['prompt']}\n{code.partition(FENCE)[0]}"
    return passes_humaneval(sanitize_program(program, reference["entry_point"]), reference)


def judge_humaneval_completion(answer: str, reference: JsonRecord) -> bool:
    """Judge HumanEval as lm-eval does: prompt and answer unchanged, up to a fence."""
    return passes_humaneval(reference["prompt"] + answer.partition(FENCE)[0], reference)


def passes_humaneval(program: str, reference: JsonRecord) -> bool:
    tests = f"{reference['test']}\ncheck({reference['entry_point']})"
    return sandbox.run_sandboxed(f"{program}\n{tests}").passed


def judge_mbpp_instruct(answer: str, reference: JsonRecord) -> bool:
    """Judge MBPP as lm-eval's `mbpp_instruct` does: the first fenced block, and the tests.

    The prompt has already opened the block. An answer that continues it is judged as published: a
    word directly after the fence counts as the language name. An answer that opens a block itself
    is
    judged unchanged.
    """
    opens = answer.count(FENCE) % 2 == 0 or re.match(r"\w", answer.partition(FENCE)[2])
    block = FENCED_BLOCK.search(answer if opens else FENCE + answer)
    return block is not None and passes_mbpp(block[1], reference)


def judge_mbpp_few_shot(answer: str, reference: JsonRecord) -> bool:
    """Judge few-shot MBPP as WeDLM does: the text before `[DONE]`, without quotes."""
    program = answer.partition(DONE_MARK)[0].strip()
    if len(program) > 1 and program[0] == program[-1] == "'":
        program = program[1:-1].strip()
    return passes_mbpp(program, reference)


def passes_mbpp(program: str, reference: JsonRecord) -> bool:
    parts = (program, reference.get("test_setup_code") or "", *reference["test_list"])
    return sandbox.run_sandboxed("\n".join(parts)).passed


def sanitize_program(text: str, entry: str) -> str:
    """Return the longest part of a string that is Python, reduced to what `entry` needs.

    Keeps imports, and those classes, functions with a return, and assigned names that `entry` uses.
    A later definition replaces an earlier one.
    """
    text = text.replace("\t", "    ").replace("\r\n", "\n").replace("\r", "\n").strip()
    tree = longest_program(text.splitlines()[:MAX_SANITIZED_LINES])
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    definitions = dict(top_level_definitions(tree))
    reached: set[str] = set()
    pending = [entry]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += referenced_names(definitions[name]) if name in definitions else []
    used = [node for name, node in definitions.items() if name in reached]
    return "\n".join(ast.unparse(node) for node in [*imports, *used])


def longest_program(lines: list[str]) -> ast.Module:
    """Return the largest run of lines that is Python, the first of them; else an empty module."""
    program, best = ast.Module([], []), 0
    for begin in range(len(lines)):
        for end in range(len(lines), begin, -1):
            count = sum(bool(line.strip()) for line in lines[begin:end])
            if count <= best:
                break
            if (tree := parse_python("\n".join(lines[begin:end]))) is not None:
                program, best = tree, count
                break
    return program


def parse_python(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def top_level_definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                yield name, node
            case ast.FunctionDef(name=name) if any(
                isinstance(n, ast.Return) for n in ast.walk(node)
            ):
                yield name, node
            case ast.Assign(targets=[ast.Name(id=name), *_]):
                yield name, node


def referenced_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a definition uses; only `c` of `a.b.c`, as published."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case _:
                yield from referenced_names(child)

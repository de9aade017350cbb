"""Answers that are programs: found in what a model wrote, and run with their tests."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

from outpace.evaluation import sandbox
from outpace.jsonl import Record

FENCE = "```"
PYTHON = "```python\n"
BLOCK = re.compile(r"```(?:\w+)?\n?(.*?)\n?```", re.DOTALL)
DONE = "[DONE]"
MOST_LINES = 100

Definition = ast.ClassDef | ast.FunctionDef | ast.Assign


def humaneval(answer: str, reference: Record) -> bool:
    """HumanEval as Dream and D2F judge it: the fenced block, or all, behind the prompt, sanitized.

    The reference is a line of the published file.
    """
    written = answer.partition(PYTHON)[2] or answer
    program = f"{reference['prompt']}\n{written.partition(FENCE)[0]}"
    return passes(sanitized(program, reference["entry_point"]), reference)


def completion(answer: str, reference: Record) -> bool:
    """HumanEval as lm-eval judges it: prompt and answer as they stand, up to a fence."""
    return passes(reference["prompt"] + answer.partition(FENCE)[0], reference)


def passes(program: str, reference: Record) -> bool:
    """Whether a program passes the tests of a line of HumanEval."""
    tests = f"{reference['test']}\ncheck({reference['entry_point']})"
    return sandbox.run(f"{program}\n{tests}").passed


def fenced(answer: str, reference: Record) -> bool:
    """MBPP as lm-eval's `mbpp_instruct` judges it: the first fenced block, and the tests.

    There the prompt has opened the block, and an answer that goes on in it is judged as published,
    where a word right behind the fence is taken for the name of a language. An answer that opens a
    block itself is taken as it stands.
    """
    opens = answer.count(FENCE) % 2 == 0 or re.match(r"\w", answer.partition(FENCE)[2])
    block = BLOCK.search(answer if opens else FENCE + answer)
    return block is not None and tested(block[1], reference)


def done(answer: str, reference: Record) -> bool:
    """MBPP of few shots as WeDLM judges it: what stands before `[DONE]`, without quotes."""
    program = answer.partition(DONE)[0].strip()
    if len(program) > 1 and program[0] == program[-1] == "'":
        program = program[1:-1].strip()
    return tested(program, reference)


def tested(program: str, reference: Record) -> bool:
    """Whether a program passes the tests of a line of MBPP."""
    parts = (program, reference.get("test_setup_code") or "", *reference["test_list"])
    return sandbox.run("\n".join(parts)).passed


def sanitized(text: str, entry: str) -> str:
    """The longest piece of a text that is Python, cut to what `entry` needs.

    Imports stay, and of classes, functions that return something, and named values those that
    `entry` reaches by name; a later one replaces an earlier one.
    """
    text = text.replace("\t", "    ").replace("\r\n", "\n").replace("\r", "\n").strip()
    tree = longest(text.splitlines()[:MOST_LINES])
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    definitions = dict(defined(tree))
    reached: set[str] = set()
    coming = [entry]
    while coming:
        name = coming.pop()
        if name not in reached:
            reached.add(name)
            coming += names(definitions[name]) if name in definitions else []
    kept = [node for name, node in definitions.items() if name in reached]
    return "\n".join(ast.unparse(node) for node in [*imports, *kept])


def longest(lines: list[str]) -> ast.Module:
    """The run of lines with most text that is Python, the first of them; empty without one."""
    found, best = ast.Module([], []), 0
    for begin in range(len(lines)):
        for end in range(len(lines), begin, -1):
            count = sum(bool(line.strip()) for line in lines[begin:end])
            if count <= best:
                break
            if (tree := parsed("\n".join(lines[begin:end]))) is not None:
                found, best = tree, count
                break
    return found


def parsed(text: str) -> ast.Module | None:
    """A text as Python; None where it is none."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def defined(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Names that a program gives at its top, and what they stand for."""
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


def names(node: ast.AST) -> Iterator[str]:
    """Names that a definition uses; of `a.b.c` only `c`, as published."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case _:
                yield from names(child)

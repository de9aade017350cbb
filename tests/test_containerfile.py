"""The Containerfile, as far as it can be checked without building an image."""

import ast
import json
import re
import shlex
import subprocess
import tomllib
from fnmatch import fnmatch
from typing import NamedTuple

import pytest

from shown import ROOT

DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


class Instruction(NamedTuple):
    name: str
    text: str


def read_stages() -> list[list[Instruction]]:
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    stages: list[list[Instruction]] = [[]]
    for line in text.splitlines():
        if line and not line.startswith("#"):
            instruction = Instruction(*line.split(None, 1))
            stages += [[]] if instruction.name == "FROM" else []
            stages[-1].append(instruction)
    return stages


STAGES = read_stages()
RUNS = [each.text for stage in STAGES for each in stage if each.name == "RUN"]


def test_variables_are_declared() -> None:
    assert [each.name for each in STAGES[0]] == ["ARG"]
    shared = {each.text.partition("=")[0] for each in STAGES[0]}
    for stage in STAGES[1:]:
        declared = {"PATH"}
        for name, text in stage:
            used = set(re.findall(r"\$\{?(\w+)", text))
            assert used <= (shared if name == "FROM" else declared), text
            declared |= {text.partition("=")[0]} if name == "ARG" else set()


def test_copied_files_exist() -> None:
    names: list[str] = []
    for stage in STAGES[1:]:
        names.append(stage[0].text.partition(" AS ")[2])
        for text in [each.text for each in stage if each.name == "COPY"]:
            flags = [word for word in text.split() if word.startswith("--")]
            *sources, _ = [word for word in text.split() if not word.startswith("--")]
            for source in sources:
                if flags:
                    (origin,) = (flag.removeprefix("--from=") for flag in flags)
                    made = " ".join(each.text for each in STAGES[1 + names.index(origin)])
                    assert f"venv {source}" in made
                else:
                    assert (ROOT / source).exists()
    ignored = (DEPLOY / "Containerfile.containerignore").read_text().split()
    (module,) = PROJECT["tool"]["setuptools"]["ext-modules"]
    read = ["pyproject.toml", PROJECT["project"]["readme"], *module["sources"], *module["depends"]]
    tracked = [str(path.relative_to(ROOT)) for path in (ROOT / "src/outpace").rglob("*.py")]
    for path in [*read, *tracked]:
        assert (ROOT / path).exists()
        places = [path, *(str(each) for each in (ROOT / path).relative_to(ROOT).parents)]
        assert not any(fnmatch(place, pattern) for place in places for pattern in ignored), path


@pytest.mark.parametrize("command", RUNS)
def test_commands_are_valid(command: str) -> None:
    subprocess.run(["sh", "-n", "-c", command], check=True)
    for named in re.findall(r"/source\[(.*?)\]", command):
        assert {*named.split(",")} <= {*PROJECT["project"]["optional-dependencies"]}
    assert "apt-get install" not in command or "--yes" in command


def test_users_are_created_and_own_the_volumes() -> None:
    service = (DEPLOY / "compose.yaml").read_text().partition("  prometheus:")[0]
    folders = re.findall(r"- \w+:(/\S+)", service)
    assert folders
    texts = [f"{each.name} {each.text}" for each in STAGES[-1]]
    start = texts.index("USER outpace")
    assert all(f"RUN mkdir {folder}" in texts[start:] for folder in folders)
    (user,) = re.findall(r"^User=(.+)$", (DEPLOY / "outpace.service").read_text(), re.MULTILINE)
    assert f"`useradd --system {user}`" in (ROOT / "docs/operating.md").read_text()


def test_image_is_served_and_checked() -> None:
    last = {each.name: each.text for each in STAGES[-1]}
    assert last["USER"] != "root" and f"useradd --create-home {last['USER']}" in RUNS
    assert json.loads(last["ENTRYPOINT"]) == ["outpace"]
    assert f"http://127.0.0.1:{last['EXPOSE']}/health" in last["HEALTHCHECK"]
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    ast.parse(check[-1])
    assert shlex.split(last["ENV"])[0].startswith("PATH=/opt/outpace/bin:")

"""Files of `deploy/`, as far as they can be checked without building an image."""

import ast
import json
import re
import shlex
import subprocess
import tomllib
from fnmatch import fnmatch
from typing import NamedTuple

import pytest

from outpace.server.settings import read_config
from shown import ROOT

DEPLOY = ROOT / "deploy"
ZOO = {path.name for path in (ROOT / "src/outpace/zoo").iterdir()}
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
UNIT = (DEPLOY / "outpace.service").read_text()
INSTALLATION = re.findall(r"^#   (.+)$", UNIT, re.MULTILINE)


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
    context = (ROOT / ".dockerignore").read_text().split()
    assert context[0] == "*"
    copied = [line[1:] for line in context if line.startswith("!")]
    ignored = [line for line in context[1:] if not line.startswith("!")]
    (module,) = PROJECT["tool"]["setuptools"]["ext-modules"]
    read = ["pyproject.toml", PROJECT["project"]["readme"], *module["sources"], *module["depends"]]
    tracked = [str(path.relative_to(ROOT)) for path in (ROOT / "src/outpace").rglob("*.py")]
    for path in [*read, *tracked]:
        assert (ROOT / path).exists()
        places = [path, *(str(each) for each in (ROOT / path).relative_to(ROOT).parents)]
        assert {*places} & {*copied}, path
        assert not any(fnmatch(place, pattern) for place in places for pattern in ignored), path


@pytest.mark.parametrize("command", [*RUNS, *INSTALLATION])
def test_commands_are_valid(command: str) -> None:
    subprocess.run(["sh", "-n", "-c", command], check=True)
    for named in re.findall(r"(?:/source|\.)\[(.*?)\]", command):
        assert {*named.split(",")} <= {*PROJECT["project"]["optional-dependencies"]}
    assert "apt-get install" not in command or "--yes" in command


def test_users_are_created_and_own_the_volumes() -> None:
    service = (DEPLOY / "compose.yaml").read_text().partition("  prometheus:")[0]
    folders = re.findall(r"- \w+:(/\S+)", service)
    assert folders
    texts = [f"{each.name} {each.text}" for each in STAGES[-1]]
    start = texts.index("USER outpace")
    assert all(f"RUN mkdir {folder}" in texts[start:] for folder in folders)
    (user,) = re.findall(r"^User=(.+)$", UNIT, re.MULTILINE)
    assert f"useradd --system {user}" in INSTALLATION


def test_unit_starts_what_its_commands_install_within_a_limit_of_memory() -> None:
    settings = dict(re.findall(r"^(\w+)=(.+)$", UNIT, re.MULTILINE))
    assert 0 < int(settings["MemoryMax"].removesuffix("%")) < 100
    program, *words = settings["ExecStart"].split()
    assert f"python3 -m venv {program.removesuffix('/bin/outpace')}" in INSTALLATION
    for path in (words[words.index("--config") + 1], settings["LoadCredential"].split(":")[1]):
        assert any(command.rstrip(")").endswith(f" {path}") for command in INSTALLATION)


def test_compose_serves_a_published_model_and_has_no_known_password() -> None:
    assert not {entry.path for entry in read_config(DEPLOY / "serve.toml").models.values()} & ZOO
    compose, ignored = (DEPLOY / "compose.yaml").read_text(), (ROOT / ".gitignore").read_text()
    secrets = dict(re.findall(r"^  (\w+):\n    file: \./(\w+)$", compose, re.MULTILINE))
    assert all(f"/deploy/{file}\n" in ignored for file in secrets.values())
    grafana = compose.partition("  grafana:")[2]
    (password,) = re.findall(r"GF_SECURITY_ADMIN_PASSWORD__FILE: /run/secrets/(\w+)", grafana)
    assert f"secrets: [{password}]" in grafana and password in secrets


def test_image_is_served_and_checked() -> None:
    last = {each.name: each.text for each in STAGES[-1]}
    assert last["USER"] != "root" and f"useradd --create-home {last['USER']}" in RUNS
    assert json.loads(last["ENTRYPOINT"]) == ["outpace"]
    assert f"http://127.0.0.1:{last['EXPOSE']}/health" in last["HEALTHCHECK"]
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    ast.parse(check[-1])
    assert shlex.split(last["ENV"])[0].startswith("PATH=/opt/outpace/bin:")

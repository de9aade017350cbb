"""What is handed out: a wheel with the zoo, and a source distribution that tests itself."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch

from outpace.kernels.tiles import has_tile_loop
from shown import ROOT

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both; the wheel is made from the source distribution.

    What is built is a copy, since another process may build at the same time.
    """
    folder, copy = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("copy")
    leave = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "site", "runs")
    shutil.copytree(ROOT, copy, ignore=leave, dirs_exist_ok=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, copy]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> dict[str, bytes | int]:
    """Sizes of the files of the wheel, and the text of its metadata."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        sizes: dict[str, bytes | int] = {f.filename: f.file_size for f in archive.infolist()}
        (name,) = (name for name in sizes if name.endswith(".dist-info/METADATA"))
        return {**sizes, "metadata": archive.read(name), "wheel": path.stat().st_size}


def test_the_wheel_has_the_zoo_once(wheel: dict[str, bytes | int]) -> None:
    assert sum(name.endswith(".safetensors") for name in wheel) == 11
    assert [name for name in wheel if name.endswith("tokenizer.json")] == [
        "outpace/zoo/vocabulary/tokenizer.json"
    ]
    for name in (
        "py.typed",
        "server/playground/page.html",
        "server/playground/marked.LICENSE",
        "evaluation/protocols/apd.toml",
        "benchmark/reproduce/papers/apd.toml",
    ):
        assert f"outpace/{name}" in wheel
    compiled = [name for name in wheel if name.startswith("outpace/_compiled")]
    assert len(compiled) == (shutil.which("gcc") is not None)
    assert not [name for name in wheel if name.startswith(("test", "benchmarks"))]
    size = wheel["wheel"]
    assert isinstance(size, int) and size < 36 * 2**20


def test_metadata_say_what_it_is(wheel: dict[str, bytes | int]) -> None:
    text = wheel["metadata"]
    assert isinstance(text, bytes)
    message = HeaderParser().parsestr(text.decode())
    kinds = message.get_all("Classifier") or []
    assert {f"Programming Language :: Python :: 3.{n}" for n in (11, 12, 13, 14)} <= set(kinds)
    extras = {"train", "plot", "evaluate", "load", "serve", "constrain", "docs", "dev"}
    assert extras <= set(message.get_all("Provides-Extra") or [])
    assert message["Description-Content-Type"] == "text/markdown"


def test_the_source_distribution_tests_itself(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    ours = {p.relative_to(ROOT) for kind in ("py", "c", "h", "json", "safetensors", "toml", "md")
            for folder in ("tests", "benchmarks", "examples", "recipes", "docs", "src/outpace")
            for p in (ROOT / folder).rglob(f"*.{kind}")}  # fmt: skip
    theirs = {p.relative_to(root) for p in root.rglob("*") if p.is_file()}
    assert not ours - theirs
    some = ["tests/decoding/test_order.py", "tests/golden/test_apd.py", "tests/test_floors.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some],
        cwd=root, env={"PYTHONPATH": str(root / "src"), "PATH": ""},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


NO_OPENMP = """#!/bin/sh
case " $* " in *" -fopenmp "*) echo "unsupported option '-fopenmp'" >&2; exit 1;; esac
exec gcc $(printf '%s ' "$@" | sed 's/-O3/-O1/')
"""
"""A compiler without OpenMP."""

PRODUCT = """
import torch
from outpace.kernels.tiles import bind_tile_product, to_tiles
torch.set_num_threads(3)
weight, x = torch.arange(16 * 64).view(16, 64) % 7 - 3.0, torch.ones(9, 64)
assert torch.equal(bind_tile_product(to_tiles(weight))(x), x @ weight.T)
"""


@pytest.mark.skipif(not has_tile_loop(torch.float32), reason="this processor has no compiled loops")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="apt-get install gcc")
def test_kernels_build_without_openmp(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(NO_OPENMP)
    compiler.chmod(0o755)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = ["setup.py", "build_ext", "--build-lib", "lib", "--build-temp", "temp"]
    run = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env={**os.environ, "CC": str(compiler)},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    (library,) = (tmp_path / "lib/outpace").glob("_compiled*")
    assert b"GOMP" not in library.read_bytes()
    script = "from types import SimpleNamespace as Spec; from outpace.kernels import loader\n"
    script += f"loader.find_spec = lambda _: Spec(origin={str(library)!r})\n{PRODUCT}"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr

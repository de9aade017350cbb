"""What is handed out: wheels with the zoo, and a source distribution that tests itself."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import HeaderParser
from importlib.util import find_spec
from pathlib import Path

import pytest

from shown import ROOT

pytestmark = pytest.mark.nightly

PROCESSORS = {"x86_64": 62, "aarch64": 183}
"""Processors of wheels, and their numbers in files of ELF."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what is built, since another process may build at the same time."""
    copy = tmp_path_factory.mktemp("copy")
    leave = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "site", "runs")
    return Path(shutil.copytree(ROOT, copy, ignore=leave, dirs_exist_ok=True))


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both; the wheel is made from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source]
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
        "lab/protocols/apd.toml",
        "lab/reproduce/papers/apd.toml",
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
    extras = {"train", "plot", "evaluate", "serve", "constrain", "docs", "dev"}
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


@pytest.fixture(scope="module")
def released(source: Path) -> dict[str, Path]:
    """Wheels of `make wheels`, by processor."""
    if find_spec("ziglang") is None:
        pytest.skip("no linker: pip install ziglang")
    if any(shutil.which(f"{name}-linux-gnu-gcc") is None for name in PROCESSORS):
        pytest.skip("no compiler: apt-get install gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    command = ["make", "--old-file=.venv/nightly", "wheels", f"BIN={Path(sys.executable).parent}"]
    run = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stdout + run.stderr
    return {name: next((source / "dist").glob(f"*_{name}.whl")) for name in PROCESSORS}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_wheels_need_no_newer_library(released: dict[str, Path], processor: str) -> None:
    with zipfile.ZipFile(released[processor]) as archive:
        names = [name for name in archive.namelist() if ".so" in name]
        assert names == ["outpace/_compiled.abi3.so"]
        (tags,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        tag = f"Tag: cp311-abi3-manylinux_2_28_{processor}"
        assert tag in archive.read(tags).decode().splitlines()
        library = archive.read(names[0])
    assert int.from_bytes(library[18:20], "little") == PROCESSORS[processor]
    needed = set(re.findall(rb"lib\w+\.so\.\d+", library))
    assert needed <= {b"libc.so.6", b"libpthread.so.0"}
    versions = re.findall(rb"GLIBC_2\.(\d+)", library)
    assert versions and max(map(int, versions)) <= 28
    assert b"outpace_multiply" in library and b"GOMP_parallel" in library


def test_a_wheel_runs_its_loops_without_a_compiler(
    released: dict[str, Path], tmp_path: Path
) -> None:
    venv.create(tmp_path, with_pip=False)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    env = {"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    install = ["pip", "install", "--no-deps", "--no-index", "--ignore-installed"]
    wheel = str(released[os.uname().machine])
    for words in (
        ["-m", *install, f"--prefix={tmp_path}", wheel],
        ["-m", "outpace", "generate", "tiny-ar", "At the zoo 3 birds", "--max-tokens", "4"],
        ["-c", f"{PRODUCT}assert '{packages}' in loader.load_library()._name"],
    ):
        run = subprocess.run(
            ["python", *words], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert run.returncode == 0, run.stdout + run.stderr
    mapped = re.findall(r"\S*lib(?:gomp|omp|iomp)\S*", run.stdout)
    assert len(set(mapped)) == 1


PRODUCT = """
import torch
from outpace.kernels import loader
from outpace.kernels.tiles import bind_tile_product, has_tile_loop, to_tiles
torch.set_num_threads(3)
weight, x = torch.arange(16 * 1024).view(16, 1024) % 7 - 3.0, torch.ones(99, 1024)
if has_tile_loop(torch.float32):
    assert torch.equal(bind_tile_product(to_tiles(weight))(x), x @ weight.T)
print(open("/proc/self/maps").read())
"""

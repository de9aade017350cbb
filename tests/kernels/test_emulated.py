"""Loops of other processors give the bits of this one."""

import shutil
import subprocess
from ctypes import CDLL
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from emulation import (
    attention_calls,
    differing,
    numbers,
    packed_calls,
    recurrent_calls,
    rounding_calls,
    tile_calls,
)
from helpers import needs_packed_loops
from outpace.attention import compiled as attention
from outpace.kernels import loader, packed, tiles
from outpace.kernels.loader import Isa, has_isa
from packing import pack_blocks, random_blocks
from shown import ROOT
from spans import random

KERNELS = ROOT / "src/outpace/kernels"
FLAGS = ("-O1", "-ffp-contract=off")
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
EVEX_VNNI = '-DAVX_VNNI_TARGET="avx2,fma,f16c,avx512vl,avx512vnni"'
"""The instruction of AVX-VNNI on 256 bits as AVX512 encodes it."""

pytestmark = [pytest.mark.nightly, needs_packed_loops]


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the program that makes recorded calls."""
    if not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)):
        pytest.skip("no emulator: apt-get install gcc-aarch64-linux-gnu qemu-user")
    if has_isa(Isa.NEON):
        pytest.skip("this machine runs the loops of Arm itself")
    program = tmp_path_factory.mktemp("arm") / "emulated"
    sources = [ROOT / "tests/emulated.c", *sorted(KERNELS.glob("*.c"))]
    command = [ARM_COMPILER, *FLAGS, "-static", f"-I{KERNELS}", "-o", program, *sources]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and not run.stderr, run.stderr
    return program


def test_arm_gives_the_same_bits(arm_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "find_loop", tiles.find_loop)
    monkeypatch.setattr(attention, "load_library", attention.load_library)
    isa = Isa.NEON
    calls = [*tile_calls(isa), *packed_calls(isa), *rounding_calls(), *attention_calls(isa)]
    calls += recurrent_calls(isa)
    given = b"".join(call.encode() for call in calls) + numbers(0)
    command = [ARM_EMULATOR, "-cpu", "max", arm_program, str(int(isa))]
    run = subprocess.run(command, input=given, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert not differing(calls, run.stdout)


@pytest.fixture(scope="module")
def evex_library(tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    """Build the loops of AVX-VNNI with the same instruction of AVX512."""
    if (gcc := shutil.which("gcc")) is None:
        pytest.skip("no gcc: apt-get install gcc")
    if not has_isa(Isa.AVX512_VNNI):
        pytest.skip("this machine has no AVX512-VNNI")
    path = tmp_path_factory.mktemp("evex") / "loops.so"
    flags = (*FLAGS, EVEX_VNNI, "-fPIC", "-shared", "-o", path)
    command = [gcc, *flags, *sorted(KERNELS.glob("*.c"))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and not run.stderr, run.stderr
    return CDLL(str(path))


def test_avx_vnni_gives_the_same_bits(evex_library: CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda _: SimpleNamespace(origin=evex_library._name))
    library = loader.load_library.__wrapped__()
    int8 = next(loop for loop in tiles.TILE_LOOPS[torch.int8] if loop.isa is Isa.AVX_VNNI)
    codes = random(80, 1100).mul_(40).clamp_(-128, 127).to(torch.int8)
    laid, scale, x = tiles.to_tiles(codes), random(80).abs(), random(131, 1100, seed=1)
    wanted = [tiles.bind_tile_product(laid, None, scale)(x)]
    matrices = {
        name: pack_blocks(name, random_blocks(name, 40, 2 * packed.INPUT_MULTIPLES[kind]))
        for name, kind in packed.BLOCK_FORMATS.items()
    }
    rows = {name: random(19, matrix.inputs, seed=2) for name, matrix in matrices.items()}
    wanted += [packed.bind_packed_product(matrices[name])(rows[name]) for name in matrices]
    for module in (tiles, packed):
        monkeypatch.setattr(module, "load_library", lambda: library)
    monkeypatch.setattr(tiles, "find_loop", lambda _: int8)
    monkeypatch.setattr(packed, "has_isa", lambda _: True)
    for count in (1, 2, 3, 4, 5, 8, 12, 16, 19):
        found = [tiles.bind_tile_product(laid, None, scale)(x[-count:])]
        for name, matrix in matrices.items():
            product = packed.bind_packed_product(matrix, loop=Isa.AVX_VNNI)
            found.append(product(rows[name][-count:]))
        for ours, others in zip(found, wanted, strict=True):
            assert torch.equal(ours, others[-count:])

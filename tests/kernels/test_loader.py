"""What the log records about the instruction sets of a processor."""

from __future__ import annotations

import pytest

from outpace.kernels.loader import Isa, has_isa, load_library, log_missing_instructions


@pytest.mark.parametrize(
    ("present", "line"),
    [
        ([], "neither AVX2 nor Arm's dot products"),
        ([Isa.AVX2], "kernels use AVX2: this processor has no AVX512-VNNI"),
        ([Isa.AVX2, Isa.AVX_VNNI], "kernels use AVX2 and AVX-VNNI: this processor"),
        ([Isa.AVX2, Isa.AVX512], "kernels use AVX2 and AVX512: this processor"),
        ([Isa.AVX2, Isa.AVX512, Isa.AVX512_VNNI], None),
        ([Isa.NEON], None),
    ],
)
def test_missing_instructions_are_logged_once(
    present: list[Isa], line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "outpace.kernels.loader"):
        log_missing_instructions(present)
    assert len(caplog.records) == (line is not None)
    assert line is None or line in caplog.text
    assert bool([each for each in caplog.records if each.levelname == "WARNING"]) == (not present)


@pytest.mark.skipif(load_library() is None, reason="the kernels were not compiled")
def test_instruction_sets_include_those_they_need() -> None:
    assert not has_isa(Isa.AVX512) or has_isa(Isa.AVX2)
    for isa in (Isa.AVX512_VNNI, Isa.AVX512_BF16):
        assert not has_isa(isa) or has_isa(Isa.AVX512)
    assert not (has_isa(Isa.NEON) and has_isa(Isa.AVX2))

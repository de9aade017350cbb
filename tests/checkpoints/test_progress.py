"""Progress of loading."""

from __future__ import annotations

import pytest

from outpace.checkpoints.load import ZOO_FOLDER, load_model
from outpace.checkpoints.progress import LOAD_PROGRESS, ignore_progress, report_load_progress
from outpace.checkpoints.weights import WEIGHTS_FILE
from outpace.cli import flags


def test_loading_reports_progress() -> None:
    reports: list[tuple[int, int]] = []
    with report_load_progress(lambda done, total: reports.append((done, total))):
        model = load_model("tiny-ar")
    parameters = list(model.parameters())
    assert len(reports) == 1 + len(parameters) and reports == sorted(reports) and reports[0][0] == 0
    size = (ZOO_FOLDER / "tiny-ar" / WEIGHTS_FILE).stat().st_size
    assert {total for _, total in reports} == {size} == {reports[-1][0]}
    assert LOAD_PROGRESS.get() is ignore_progress
    load_model("tiny-ar")
    assert len(reports) == 1 + len(parameters)


def test_a_callback_may_stop_loading() -> None:
    def end(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), report_load_progress(end):
        load_model("tiny-ar")
    assert LOAD_PROGRESS.get() is ignore_progress


def test_the_terminal_shows_it_for_large_models() -> None:
    reports: list[str] = []
    flags.report_progress(reports.append, 2**26, 2**27)
    flags.report_progress(reports.append, 2**30, 15 * 2**30)
    assert reports == ["1.0 of 15.0 GiB"]

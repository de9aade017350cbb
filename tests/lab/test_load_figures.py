"""Tests of load figures against values computed by hand."""

import pytest

from outpace.lab.load_figures import RequestRecord, compute_figures

# Text at 0.1, 0.3 and 0.4 s after sending; over at 0.5 s; nine tokens of three forwards.
ONE = RequestRecord(began=10.0, ended=10.5, events=[10.1, 10.3, 10.4], tokens=9, forwards=3)
# Text at 0.3 s only; over at 0.3 s; one token of one forward.
TWO = RequestRecord(began=20.0, ended=20.3, events=[20.3], tokens=1, forwards=1)
# End-of-sequence at once.
SILENT = RequestRecord(began=0.0, ended=0.2, tokens=0, forwards=1)
CUT = RequestRecord(began=0.0, ended=9.0, events=[5.0, 8.0], tokens=None, error="dropped")


def test_figures_of_two_answers():
    found = compute_figures([ONE, TWO], 2.0, {})
    assert (found["requests"], found["completed"], found["errors"]) == (2, 2, {})
    assert (found["requests_per_second"], found["tokens_per_second"]) == (1.0, 5.0)
    assert found["output_tokens"] == 10
    assert found["ttft_ms"] == {"mean": 200, "p50": 200, "p90": 280, "p99": 298}
    assert found["gap_ms"] == {"mean": 150, "p50": 150, "p90": 190, "p99": 199}
    assert found["tpot_ms"] == {"mean": 50, "p50": 50, "p90": 50, "p99": 50}
    assert found["e2e_ms"]["mean"] == 400 and found["e2e_ms"]["p50"] == 400


def test_events_of_many_tokens_do_not_flatter():
    burst = RequestRecord(began=0.0, ended=0.8, events=[0.4, 0.8], tokens=16)
    found = compute_figures([burst], 0.8, {})
    assert found["gap_ms"]["p50"] == 400
    assert found["tokens_per_event"]["mean"] == 8
    assert found["tpot_ms"]["mean"] == pytest.approx(400 / 15, abs=1e-3)
    assert found["tokens_per_forward"] is None  # not reported by the server


def test_answers_that_failed_are_in_no_time_and_no_throughput():
    found = compute_figures([ONE, CUT, CUT, RequestRecord(began=0, ended=1, error="429")], 1.0, {})
    assert found["errors"] == {"dropped": 2, "429": 1}
    assert (found["requests"], found["completed"], found["output_tokens"]) == (4, 1, 9)
    assert found["ttft_ms"]["p99"] == pytest.approx(100)
    assert found["gap_ms"]["p99"] == pytest.approx(199)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"ttft": 150}, [ONE, SILENT]),
        ({"ttft": 100.1, "gap": 200.1}, [ONE, SILENT]),
        ({"gap": 150}, [TWO, SILENT]),  # the longest gap counts, not the mean
        ({"tpot": 49}, [TWO, SILENT]),
        ({"e2e": 300.1}, [TWO, SILENT]),
        ({"e2e": 100}, []),
        ({"e2e": 10_000}, [ONE, TWO, SILENT]),  # not the one that was dropped
    ],
)
def test_goodput_is_of_all_that_were_asked(limits, kept):
    goodput = compute_figures([ONE, TWO, SILENT, CUT], 2.0, limits)["goodput"]
    assert goodput["share"] == len(kept) / 4
    assert goodput["requests_per_second"] == len(kept) / 2

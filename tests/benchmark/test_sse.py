"""Tests of the reader of server-sent events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.benchmark import sse
from outpace.benchmark.sse import EventReader

STREAM = (
    b': ping\r\n\r\ndata: {"a": "\xc3\xa9"}\n\nevent: x\ndata:b\r\n\r\nid: 3\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a": "\xc3\xa9"}', b"b", b"[DONE]"]


@given(st.sets(st.integers(0, len(STREAM))))
def test_cut_anywhere(cuts):
    ends = sorted({0, *cuts, len(STREAM)})
    reader, found = EventReader(), []
    for begin, end in zip(ends, ends[1:], strict=False):
        found += reader.read_chunk(STREAM[begin:end])
    assert found == EVENTS and reader.incomplete_line == b""


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 10)
    reader = EventReader()
    assert reader.read_chunk(b"data: 1234") == []
    with pytest.raises(ValueError, match="more than 10 bytes"):
        reader.read_chunk(b"5")

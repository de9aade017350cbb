"""A conversation, typed at a terminal or read from a pipe."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM
from outpace.api.options import Options
from outpace.api.output import Output
from outpace.cli import terminal as terminal_module
from outpace.cli.chat import ChatSession
from outpace.cli.main import main
from outpace.methods import Autoregressive, WeDLM
from prepared import prepared
from thinking import thinking_llm

STORY = "Tom has 5 bags with 7 apples in each bag. He gives 9 apples to Ann. How many are left?"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a conversation from lines in a pipe: exit status, output, errors."""

    def run(model: str, *lines: str, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        with pytest.raises(SystemExit) as ended:
            main(["chat", model, *flags])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture(scope="module")
def llm() -> LLM:
    """A causal model that fills masks."""
    return LLM("tiny-wedlm")


def conversation(llm: LLM, **options: Any) -> ChatSession:
    return ChatSession(llm, [], {"max_tokens": 64, **options})


def test_each_answer_has_its_figures(chat: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.cli.draw.speed_over_plain", lambda output: 1.2)
    status, out, err = chat("tiny-aux", STORY, "", "And now?", flags=("--max-tokens", "96"))
    assert status == 0 and "#### 26\n" in out and "tokens per" not in out
    assert (
        len(re.findall(r".*[\d.]+ tokens per forward, \d+ tokens per second.*, 1.20 × .*\n", err))
        == 2
    )
    assert err.count("\n") == 2


def test_the_model_sees_what_was_said(llm: LLM) -> None:
    talk = conversation(llm, min_tokens=8)
    talk.handle_line("/method autoregressive")
    saved = llm.engine.prefix_stats.slots
    for message in (STORY, "Why?"):
        assert talk.handle_line(message)
    roles = ["user", "assistant", "user", "assistant"]
    assert [message["role"] for message in talk.messages] == roles
    assert llm.engine.prefix_stats.slots - saved >= 48
    asked: Options = {"method": "autoregressive", "max_tokens": 64, "min_tokens": 8}
    (alone,) = llm.generate(talk.messages[:3], **asked)
    assert talk.messages[3]["content"] == alone.text
    talk.handle_line("/continue")
    assert len(talk.messages) == 4 and len(talk.messages[3]["content"]) > len(alone.text)
    assert talk.messages[3]["content"].startswith(alone.text)
    talk.handle_line("/reset")
    assert talk.messages == [] and talk.last_turn is None


def test_another_method_decodes_what_follows(llm: LLM) -> None:
    talk = conversation(llm)
    talk.handle_line("/method autoregressive")
    talk.handle_line(STORY)
    assert talk.method == Autoregressive()
    assert talk.last_turn is not None and isinstance(talk.last_turn.output, Output)
    assert talk.last_turn.output.tokens_per_forward <= 1


def test_a_race_answers_the_same_again(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    talk = conversation(llm)
    talk.handle_line(STORY)
    earlier = list(talk.messages)
    capsys.readouterr()
    talk.handle_line("/race wedlm verify=true entropy=0.8")
    shown = capsys.readouterr().out
    assert re.search(r"^wedlm +wedlm verify=true entropy=0.8 *$", shown, re.MULTILINE)
    assert shown.count("####") == 2
    assert talk.messages == earlier and isinstance(talk.method, WeDLM)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("/nonsense", "/help"),
        ("/method nonsense", "apd"),
        ("/method wedlm x=1", "entropy"),
        ("/method wedlm x", "option=value"),
        ("/method wedlm entropy=a", "entropy"),
        ("/method left_to_right", "diffusion"),
        ("/method speculative draft=nowhere", "nowhere"),
        ("/race autoregressive", "/race"),
        ("/set colour 3", "temperature"),
        ("/set top_p 7", "top_p"),
        ("/set min_p nan", "min_p"),
        ("/set max_tokens many", "max_tokens"),
        ("/file nowhere.txt", "nowhere.txt"),
        ("/file", "path"),
        ("/save /dev/full/x", "/dev/full"),
        ("x " * 600, "context"),
        ("\udcff", "surrogate"),
    ],
)
def test_the_chat_continues_after_an_invalid_line(chat: Run, line: str, name: str) -> None:
    status, out, err = chat("tiny-aux", line, STORY, flags=("--max-tokens", "96"))
    assert status == 0 and "#### 26\n" in out
    assert name in err and err.count("\n") == 2  # the other are the figures of the answer


def test_a_race_needs_a_method(chat: Run) -> None:
    _, _, err = chat("tiny-aux", STORY, "/race", flags=("--max-tokens", "8"))
    assert "/race needs a method" in err


def test_a_conversation_goes_on_from_its_file(tmp_path: Path) -> None:
    llm = thinking_llm("tiny-ar", "think")  # its template has system prompts
    talk, file = conversation(llm), tmp_path / "new folder" / "talk.json"
    talk.handle_line("/system Count.")
    talk.handle_line("/set max-tokens 8")
    (tmp_path / "a story.txt").write_text(STORY)
    talk.handle_line(f"/file '{tmp_path}/a story.txt' Solve this.")
    assert talk.messages[0] == {"role": "system", "content": "Count."}
    assert talk.messages[1]["content"] == f"Solve this.\n\n{STORY}"
    assert talk.last_turn is not None and talk.last_turn.output is not None
    assert len(talk.last_turn.output.ids) <= 8
    for _ in range(2):  # the second replaces the first
        talk.handle_line(f"/save {file}")
    assert file.stat().st_mode & 0o777 == 0o600
    other = conversation(llm)
    other.handle_line(f"/load {file}")
    assert (other.messages, other.initial_messages) == (talk.messages, talk.messages[:1])
    other.handle_line("/system")
    assert other.messages == talk.messages[1:]


def test_a_saved_conversation_is_continued_at_the_start(chat: Run, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    flags = ("--max-tokens", "96", "--prefix-dir", str(tmp_path / "prefixes"))
    chat("tiny-aux", STORY, f"/save {file}", flags=flags)
    status, again, _ = chat("tiny-aux", f"/save {file}", flags=(*flags, "--continue", str(file)))
    assert status == 0 and STORY in again and "#### 26" in again
    assert [*(tmp_path / "prefixes").glob("*.page")]
    for wrong in (("--continue", str(tmp_path)), ("--continue", str(file), "--system", "x")):
        status, out, err = chat("tiny-aux", flags=wrong)
        assert status == 2 and not out and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"\xff", "cannot be read as text"),
        (b"[]", "/save"),
        (b'{"messages": 3}', "/save"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "turns"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "turns"),
        (b"[" * 100_000, "/save"),
    ],
)
def test_a_foreign_file_is_no_conversation(
    llm: LLM, tmp_path: Path, content: bytes, named: str
) -> None:
    talk, file = conversation(llm), tmp_path / "talk.json"
    file.write_bytes(content)
    for command in ("/load", "/save"):
        with pytest.raises(ValueError, match=named):
            talk.handle_line(f"{command} {file}")
    assert file.read_bytes() == content and talk.messages == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_history_that_cannot_be_written_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    terminal_module.open_history().append_string("a\nb")
    path = tmp_path / "outpace" / "chat_history"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [*terminal_module.open_history().load_history_strings()] == ["a\nb"]
    path.unlink()
    path.symlink_to("/dev/full")
    terminal_module.open_history().append_string("c")
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert [*terminal_module.open_history().load_history_strings()] == []


def test_ctrl_c_ends_an_answer_and_keeps_what_is_there(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = conversation(llm, ignore_eos=True)
    talk.handle_line("/method autoregressive")
    step, count = llm.driver.step, 0

    def interrupted() -> bool:
        nonlocal count
        count += 1
        if count == 9:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.driver, "step", interrupted)
    talk.handle_line(STORY)
    assert talk.last_turn is not None and talk.last_turn.output is not None
    assert talk.last_turn.output.finish_reason == "cancelled"
    assert (
        talk.messages[1]["content"] == talk.last_turn.output.text == talk.last_turn.text.plain != ""
    )
    assert llm.driver.stats.is_idle
    talk.handle_line(STORY)
    assert talk.last_turn.output.finish_reason == "length"


def test_a_model_without_a_template_is_refused(chat: Run, tmp_path: Any) -> None:
    status, _, err = chat("tiny-dflash", STORY)
    assert status == 2 and err.startswith("outpace: ") and err.count("\n") == 1


@contextmanager
def terminal(*words: str, kind: str = "xterm-256color") -> Iterator[Callable[[str, str], str]]:
    """Run a command at a terminal; returns a function that types keys and waits for a word."""
    ours, theirs = pty.openpty()
    command = prepared(CONTROL, "-m", "outpace", *words)
    environment = {**os.environ, "TERM": kind, "COLUMNS": "80", "PROMPT_TOOLKIT_NO_CPR": "1"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)

    def talk(keys: str, until: str) -> str:
        os.write(ours, keys.encode())
        shown, ends = "", time.monotonic() + 120
        while until not in shown and time.monotonic() < ends:
            if select.select([ours], [], [], 1.0)[0]:
                try:
                    shown += os.read(ours, 4096).decode(errors="replace")
                except OSError:  # nobody has the other end open any more
                    break
        return shown

    try:
        yield talk
        process.wait(60)
    finally:
        process.kill()
        os.close(ours)


CONTROL = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)"
"""Makes the input the controlling terminal, so that Ctrl-C is delivered."""


@pytest.mark.nightly
def test_a_conversation_at_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with terminal("chat", "tiny-aux", "--ignore-eos", "--max-tokens", "400") as talk:
        assert talk("", "> ").startswith("> ")
        shown = talk(f"{STORY}\r", "\x1b[38;5;31m")
        shown += talk("\x03", "(cancelled)")
        assert "tokens per forward" in shown and "Traceback" not in shown
        assert "Ctrl-D" in talk("\x03", "Ctrl-D")
        talk("/set seed 5\r", "seed 5")  # the conversation goes on
        assert "Ctrl-D" in talk("\x03", "Ctrl-D")
        assert "outpace: interrupted" in talk("\x03", "interrupted")
    assert STORY in (tmp_path / "outpace" / "chat_history").read_text()


@pytest.mark.nightly
def test_what_is_typed_during_an_answer_waits_in_the_input_line() -> None:
    with terminal("chat", "tiny-aux", "--ignore-eos", "--max-tokens", "150") as talk:
        talk("", "> ")
        talk(f"{STORY}\r", "\x1b[38;5;31m")
        shown = talk("/hel", "tokens per second")
        assert "/hel" not in shown
        assert "/hel" in talk("", "/hel")
        assert "show this help" in talk("p\r", "show this help")
        assert "Traceback" not in talk("\x04", "never shown")


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [0.3, 0.8, 1.5, 2.5])
def test_ctrl_c_while_it_loads_is_one_line(seconds: float) -> None:
    long = ("--ignore-eos", "--max-tokens", "400", "--n", "8")
    with terminal("generate", "tiny-aux", STORY, *long) as talk:
        time.sleep(seconds)
        shown = talk("\x03", "never")
        assert "outpace: interrupted" in shown and "Traceback" not in shown

"""Commands as typed by a user, run in this process."""

import re

import pytest

from outpace.cli.main import main


@pytest.fixture
def outpace(capsys):
    """Return a function that runs a command line: exit status, output, errors."""

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def refused(outpace):
    """Return a function that runs an invalid command line, and returns its only error line."""

    def run(*words):
        status, _, err = outpace(*words)
        assert status == 2 and re.fullmatch(r"outpace: .+\n", err), err
        return err

    return run

"""What tests expect of refusals: the name of the option that is at fault."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outpace import OptionError


@contextmanager
def refuses(param: str) -> Iterator[None]:
    """Expect an `OptionError` of `param`, whose text begins with the same name, once."""
    with pytest.raises(OptionError) as refused:
        yield
    assert refused.value.param == param
    assert str(refused.value).startswith(param)
    assert not refused.value.reason.startswith(f"{param}:")

"""Flags that say whether a model runs here or as several copies on Ray."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from outpace.api.llm import LLM
from outpace.cli.flags import Loading, one_thread
from outpace.cli.terminal import waiting
from outpace.errors import OptionError
from outpace.methods.options import Named

if TYPE_CHECKING:
    from outpace.ray.batches import Fleet


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Where prompts of a file are answered."""

    ray: Annotated[bool, Option("--ray", help="By several copies of the model, on Ray.")] = False
    replicas: Annotated[
        int | None, Option(help="So many, with --ray.", show_default="one for each GPU")
    ] = None

    def open(
        self, loading: Loading, model: str, method: Named | None, *, prefix_cache: bool = True
    ) -> LLM | Fleet:
        """A model ready to decode, or copies of it."""
        if not self.ray:
            if self.replicas is not None:
                raise OptionError("replicas", self.replicas, "--replicas goes with --ray")
            return loading.open(model, method, prefix_cache=prefix_cache)
        try:
            from outpace.ray.batches import Fleet
        except ImportError as error:
            raise ValueError(f"{error}; --ray needs: pip install 'outpace[ray]'") from error
        loading.check([(model, method)])
        small = one_thread(model, loading.device)
        told = {**asdict(loading), "prefix_cache": prefix_cache}
        with waiting("starting Ray"):
            return Fleet(model, method, replicas=self.replicas, small=small, **told)


SPREAD = Spread()

"""Flags that select a single model or several replicas on Ray."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from outpace.api.llm import LLM
from outpace.cli.flags import LoadFlags, uses_one_thread
from outpace.cli.terminal import show_spinner
from outpace.errors import OptionError
from outpace.methods.options import MethodSpec

if TYPE_CHECKING:
    from outpace.ray.batches import Fleet


@dataclass(frozen=True, kw_only=True)
class ReplicaFlags:
    """Flags of where the prompts of a file are answered."""

    ray: Annotated[bool, Option("--ray", help="Use several replicas of the model, on Ray.")] = False
    replicas: Annotated[
        int | None, Option(help="Number of replicas with --ray.", show_default="one per GPU")
    ] = None

    def open_model(
        self,
        load_flags: LoadFlags,
        model: str,
        method: MethodSpec | None,
        *,
        prefix_cache: bool = True,
    ) -> LLM | Fleet:
        """Load a model, or start replicas of it."""
        if not self.ray:
            if self.replicas is not None:
                raise OptionError("replicas", self.replicas, "--replicas needs --ray")
            return load_flags.open_model(model, method, prefix_cache=prefix_cache)
        try:
            from outpace.ray.batches import Fleet
        except ImportError as error:
            raise ValueError(f"{error}; --ray needs: pip install 'outpace[ray]'") from error
        load_flags.check_methods([(model, method)])
        small = uses_one_thread(model, load_flags.device)
        options = {**asdict(load_flags), "prefix_cache": prefix_cache}
        with show_spinner("starting Ray"):
            return Fleet(model, method, replicas=self.replicas, small=small, **options)


REPLICA_FLAGS = ReplicaFlags()

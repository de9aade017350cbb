"""`MethodSelector`: the decoding methods of requests to one model, by default its own."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path

from outpace.checkpoints.draft_lookup import local_draft
from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.load import target_config
from outpace.engine.pairing import check_models
from outpace.methods import METHODS, Lookup, Method
from outpace.methods.options import AUTO_METHOD, MethodSpec, make_method, resolve_method
from outpace.models.config import ModelConfig

LOSSLESS_DRAFTING = ("dflash", "eagle", "speculative")
"""Methods with a draft that "auto" selects from, by how much they usually gain."""

LOG = logging.getLogger(__name__)


class MethodSelector:
    """Selects the method of each request to a model.

    Args:
        method: method of requests that set none; None and "auto" select that of the model.
        target: name of the model.
        config: its configuration.

    Raises:
        ValueError: the specification is invalid.
    """

    def __init__(self, method: MethodSpec | None, target: str, config: ModelConfig) -> None:
        self.target, self.config = target, config
        self.default = self.native if method is None else self.select_method(method)

    def select_method(self, method: MethodSpec | None) -> Method:
        """Return the method of a request; "auto" is that of the model.

        Raises:
            ValueError: the specification is invalid.
        """
        if method is None:
            return self.default
        return self.native if method == AUTO_METHOD else resolve_method(method)

    def default_sampling(self, method: Method) -> dict[str, float]:
        """Return default sampling options by name: the method's, or else the model family's."""
        family = FAMILIES[self.config.family]
        return {"temperature": family.temperature, "top_p": family.top_p, **method.default_sampling}

    @cached_property
    def native(self) -> Method:
        """The model's own method; drafts are looked for once.

        For a causal model with a published draft on this machine, it is the method of the draft,
        with copies; otherwise that of the family.
        """
        method = family_method(self.config)
        if isinstance(method, Lookup):
            for name in LOSSLESS_DRAFTING:
                if (draft := local_draft(self.target, name)) is not None:
                    message = "%s: drafts by %s; method='lookup' decodes without it"
                    LOG.info(message, self.target, draft)
                    return make_method(name, {"draft": draft, "lookup": True})
        return method


def family_method(config: ModelConfig) -> Method:
    """Return the default method of a model without a draft, that of its family."""
    return METHODS[FAMILIES[config.family].method]()


def check_fit(
    model: str | Path,
    method: MethodSpec | None,
    *,
    max_length: int | None = None,
    mask_id: int | None = None,
) -> None:
    """Check that a method can decode a model, before any model is loaded.

    Raises:
        ValueError: the method cannot decode the model.
    """
    config = target_config(model, max_length=max_length, mask_id=mask_id)
    check_models(MethodSelector(method, str(model), config).default, str(model), config)

"""Modules for inference that replace modules of a model, and can be replaced by them again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


class Replacement(nn.Module):
    """A module in place of another, with which it shares parameters, parts and hooks."""

    # State that only the replacement needs is created in `__init__` of a subclass.

    original: tuple[nn.Module]

    def __init__(self, original: nn.Module) -> None:
        vars(self).update(vars(original))
        self.original = (original,)  # in a tuple, so that it is not registered as a submodule

    def restore(self) -> nn.Module:
        """Return the original module, with its parameters as they were."""
        original = self.original[0]
        return original.restore() if isinstance(original, Replacement) else original


def replace_modules(model: nn.Module, kinds: Mapping[type[nn.Module], type[Replacement]]) -> None:
    """Replace each submodule whose class is in `kinds`; names and parameters are unchanged."""
    for name, module in [*model.named_modules()]:
        if type(module) in kinds:
            model.set_submodule(name, kinds[type(module)](module))


def restore_modules(model: nn.Module) -> None:
    """Put the original modules back."""
    for name, module in [*model.named_modules()]:
        if isinstance(module, Replacement):
            model.set_submodule(name, module.restore())

"""Check that the answers of a data file were made by the target of a draft."""

from __future__ import annotations

from outpace.checkpoints.fingerprint import Fingerprint
from outpace.training.data import Examples
from outpace.training.sources import JsonLinesFile, ShuffledRecords

FINGERPRINT_FIELD = "fingerprint"
"""Field of a line that identifies the model that made it."""


def check_origin(examples: Examples, target: str) -> None:
    """Compare the fingerprint of each line that has one with that of a target, given by name.

    Raises:
        ValueError: a line was made by another target, unless `Data.other_target` is set, or with
            another tokenizer or chat template. Line and differences are named.
    """
    data = examples.data
    expected: Fingerprint | None = None
    for source in examples.sources:
        if not (isinstance(source, ShuffledRecords) and isinstance(source.records, JsonLinesFile)):
            continue
        for number in range(len(source.records)):
            record = source.records[number]
            if not isinstance(record, dict) or FINGERPRINT_FIELD not in record:
                continue
            expected = expected or Fingerprint.of(target, examples.tokenizer, data.template)
            other = expected.differences(record[FINGERPRINT_FIELD])
            if data.other_target and "target" in other:
                other.remove("target")
            if other:
                place = source.records.describe_location(number)
                remedy = " or set data.other_target" if other == ["target"] else ""
                raise ValueError(
                    f"{place} was not made with this {' and '.join(other)}: answer the prompts by "
                    f"{target} with outpace data{remedy}"
                )

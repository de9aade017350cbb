"""Names in docstrings and comments: what is in backquotes, or ends with `.py`, exists."""

import builtins
import re

from source import MODULES, ROOT

FOREIGN = {
    *("Class", "alg_temp", "confidence_eos_eot_inf", "logits_eos_inf"),  # of authors' code
    *("qwen3_next_mtp", "qwen3_5_mtp", "request_router_kwargs", "RAY_ADDRESS"),
    *("mbpp_instruct", "exact_match", "hf"),  # of lm-evaluation-harness
    *("nohup", "PATH", "MODEL", "METHOD", "RECIPE", "TARGET", "ADAPTER"),  # of commands
    *("FILE", "CLASS", "ORG", "REPO", "sha256sum"),
    *("eot_id", "eospadding", "extract", "Id", "sequence"),  # parts of texts
}
"""Names that are not in the package. Each must occur, so that none outlives its use."""

PROSE = re.compile(r'"""(?:.|\n)*?"""|(?m:(?<!\S)#.*$)')
STRING = re.compile(r'"[^"\n]*"')
MEMBER = re.compile(r"`([A-Z]\w+)\.(\w+)`")


def words(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text) if word[0].isalpha() and len(word) > 1}


def test_names_in_docstrings_and_comments_exist() -> None:
    sources = [(ROOT / path).read_text() for path in MODULES]
    prose = "\0".join(text for source in sources for text in PROSE.findall(source))
    # A string with a space is text; any other one may be the name of an option or a field.
    code = [
        STRING.sub(lambda text: "" if re.search(r"\s", text[0]) else text[0], PROSE.sub("", source))
        for source in sources
    ]
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*")]
    known = words("\0".join([*code, *files])) | {*dir(builtins)}
    quoted = words("\0".join(re.findall(r"`([^`]+)`", prose)))
    assert {word for word in quoted - known if not re.fullmatch(r"[iuf]\d+", word)} == FOREIGN
    for name in re.findall(r"[\w/]+\.py\b", prose):
        assert name[:-3] in FOREIGN or any(file.endswith(f"/{name}") for file in files), name
    classes = dict(re.findall(r"^class (\w+)((?:.*\n(?!\S))+)", "\n".join(code), re.MULTILINE))
    for owner, member in MEMBER.findall(prose):
        assert owner not in classes or member in words(classes[owner]), f"{owner}.{member}"

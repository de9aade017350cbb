"""Limits on the work of a chat template, which is a program from an untrusted file.

They count steps and characters, never time. A step is a node of the syntax tree in the body of a
loop or macro that begins. Characters are those of all values that the template makes and of all
that it writes. Both limits grow with the conversation, far above what published templates need.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MIN_STEPS, MIN_CHARACTERS = 2 * 10**6, 2**25
"""Limits for a short conversation: two seconds, and at most 128 MiB."""

STEPS_PER_PAIR, STEPS_PER_OBJECT, PASSES = 32, 1000, 64
"""Steps for each pair of messages and for each list or dict in the input, and how often a template
may make its whole input in addition to once per message."""

ITEM_CHARACTERS = 16
"""Characters whose memory an item of a list takes."""

BIG_INTEGER, BIT_CHARACTERS = 1024, 64
"""Bits from which integers count, and characters of each: their products take long."""

BIG_VALUE = 2**16
"""Characters that a value may have beyond the input before steps cost more."""


TEXTS, LISTS, OWNERS = (str, bytes), (list, tuple, dict), (str, bytes, int)


class Budget:
    """Work that one rendering may still do.

    Attributes:
        steps: Number of steps left.
        characters: Number of characters left.
        price: Steps that one step costs: more with values much larger than the input, since some
            expressions, such as comparisons, take time in proportion to a value.
        weights: Weight of each list and dict by identity, with the object, which must stay alive.
    """

    def __init__(self, values: Any, messages: int) -> None:
        self.values, self.messages = values, messages
        self.weights: dict[int, tuple[int, Any]] = {}
        self.price, self.base = 1, BIG_VALUE
        self.steps = self.most_steps = MIN_STEPS
        self.characters = self.most_characters = MIN_CHARACTERS

    def extend(self) -> None:
        """Raise the limits to those of this input, which is weighed once, if they are reached."""
        if self.values is None:
            return
        before, self.weights = self.weights, {}
        weight = self.weigh(self.values)
        steps = STEPS_PER_OBJECT * len(self.weights) + STEPS_PER_PAIR * self.messages**2
        characters = (self.messages + PASSES) * weight
        self.values, self.base = None, self.base + weight
        self.weights |= before
        self.steps, self.most_steps = self.steps + steps, self.most_steps + steps
        self.characters += characters
        self.most_characters += characters

    def weigh(self, value: Any) -> int:
        """Return the characters in a value, and in those within it as often as it has them."""
        if isinstance(value, TEXTS):
            return len(value)
        if isinstance(value, LISTS):
            if (known := self.weights.get(id(value))) is not None:
                return known[0]
            weight = ITEM_CHARACTERS * len(value)
            for each in (*value, *value.values()) if isinstance(value, dict) else value:
                weight += len(each) if type(each) is str else self.weigh(each)
            self.weights[id(value)] = weight, value
            return weight
        if isinstance(value, range):  # a search compares with every number
            return 4 * ITEM_CHARACTERS * len(value)
        if isinstance(value, int) and (bits := value.bit_length()) > BIG_INTEGER:
            return BIT_CHARACTERS * bits
        return 1

    def collect(self, value: Any) -> Any:
        """Return a lazy sequence, such as that of the filter `map`, as a list."""
        is_lazy = hasattr(value, "__next__") or isinstance(value, range)
        return self.keep(list(value)) if is_lazy else value

    def spend(self, steps: int) -> bool:
        """Take steps."""
        self.steps -= steps * self.price
        if self.steps < 0:
            self.extend()
            if self.steps < 0:
                raise TemplateError(f"it takes more than {self.most_steps} steps")
        return True

    def expect(self, characters: float) -> None:
        """Fail before a value with this many characters is made, if they are too many."""
        if characters > self.characters:
            self.extend()
            if characters > self.characters:
                raise TemplateError(f"it makes more than {self.most_characters} characters")

    def keep(self, value: Any) -> Any:
        """Count the characters of a new value, and return it."""
        if type(value) is str:
            weight = size = len(value)
        else:
            weight = self.weigh(value)
            size = ITEM_CHARACTERS * len(value) if isinstance(value, (*LISTS, range)) else weight
        self.expect(weight)
        self.characters -= size
        if weight >= self.base:
            self.extend()
            self.price = max(self.price, 1 + weight // self.base)
        return value


class LimitedContext(Context):
    """Variables of one rendering, with its budget."""

    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> LimitedContext:
        """Return a context with further variables and the same budget."""
        context = super().derived(locals)
        assert isinstance(context, LimitedContext)
        context.budget = self.budget
        return context


SPEND, KEEP = "spend steps", "keep value"
"""Filters that templates cannot name, since a name has no blanks."""


VISITORS: dict[type[nodes.Node], str] = {
    **dict.fromkeys((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block), "visit_body"),
    **dict.fromkeys((nodes.Add, nodes.Concat), "visit_sum"),
    **dict.fromkeys((nodes.List, nodes.Tuple, nodes.Dict, nodes.Getitem), "visit_display"),
    nodes.Output: "visit_output",
    nodes.Name: "visit_name",
}
"""Methods of `BudgetInserter` by kind of node."""


class BudgetInserter(NodeTransformer):
    """Inserts the filters that count into a syntax tree."""

    def get_visitor(self, node: nodes.Node) -> Callable[..., Any] | None:
        """Return the method for a kind of nodes, or None."""
        name = VISITORS.get(type(node))
        return None if name is None else getattr(self, name)

    def visit_body(self, node: Any) -> nodes.Node:
        """Let the body of a loop or macro spend its nodes whenever it begins."""
        spend = count_node(node)
        node = self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(spend, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(spend, node.test, lineno=node.lineno)
        return node

    def visit_sum(self, node: Any) -> nodes.Node:
        """Count the value of a sum, and of its parts if there are many."""
        return insert_filter(self.visit_terms(node)[0], KEEP)

    def visit_output(self, node: nodes.Output) -> nodes.Node:
        """Leave a sum that is written to `write_value`."""
        node.nodes = [self.visit_terms(each)[0] for each in node.nodes]
        return node

    def visit_terms(self, node: Any) -> tuple[Any, int]:
        """Return a sum and its number of terms that are not constants."""
        if not isinstance(node, nodes.Add | nodes.Concat):
            return self.visit(node), not isinstance(node, nodes.Const)
        given = node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right]
        terms, counts = zip(*map(self.visit_terms, given), strict=True)
        if isinstance(node, nodes.Concat):
            node.nodes = [*terms]
        else:
            node.left, node.right = terms
        return (insert_filter(node, KEEP), 1) if sum(counts) > MAX_TERMS else (node, sum(counts))

    def visit_display(self, node: Any) -> nodes.Node:
        """Count a list, tuple, dict or slice; tuples are also targets of assignments."""
        node = self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") != "load"
        if is_target or not node.find((nodes.Name, nodes.Call)):
            return node
        is_item = isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice)
        return node if is_item else insert_filter(node, KEEP)

    def visit_name(self, node: nodes.Name) -> nodes.Node:
        """Count the tuple and dict of a macro's further arguments."""
        return insert_filter(node, KEEP) if node.name in ("varargs", "kwargs") else node


MAX_TERMS = 4
"""Number of variable terms from which parts of a sum are counted separately."""


def insert_filter(node: nodes.Expr, name: str) -> nodes.Filter:
    """Return a filter of an expression."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def count_node(node: nodes.Node) -> nodes.Filter:
    """Return an expression that spends the nodes in a node."""
    texts = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
    steps = sum(1 for _ in node.find_all(nodes.Node)) + texts // ITEM_CHARACTERS
    return insert_filter(nodes.Const(steps, lineno=node.lineno), SPEND)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which a rendering has a budget."""

    context_class = LimitedContext
    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(
        self,
        *,
        filters: Mapping[str, Callable[..., Any]],
        functions: Mapping[str, Callable[..., Any]],
        extensions: Sequence[type[Extension]],
    ) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=write_value
        )
        given = {name: each for name, each in self.filters.items() if name not in HTML_FILTERS}
        self.filters = {
            name: limit_filter(name, function) for name, function in {**given, **filters}.items()
        }
        self.filters |= {SPEND: spend_steps, KEEP: keep_value}
        self.globals |= functions
        del self.globals["lipsum"]

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(BudgetInserter().visit(source), *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product, a power or a remainder, after its size is checked."""
        assert isinstance(context, LimitedContext)
        budget, numbers = context.budget, isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers:
            budget.expect(BIT_CHARACTERS * left.bit_length() * abs(right))
        elif operator == "*" and not numbers:
            budget.expect(bound_product(budget, left, right))
        elif operator == "%" and isinstance(left, str | bytes):
            budget.expect(bound_format(budget, left, right))
        return budget.keep(super().call_binop(context, operator, left, right))

    def call(  # type: ignore[override]
        self, context: LimitedContext, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function or method, after the size of its result is checked."""
        budget = context.budget
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, OWNERS) and (bound := BOUNDS.get(method.__name__)):
            args = tuple(map(budget.collect, args))
            named = (each for name, each in kwargs.items() if name[0] != "_")
            budget.expect(bound(budget, owner, *args, *named))
        return budget.keep(super().call(context, function, *args, **kwargs))


FILTER_STEPS = 4
"""Steps of a filter, in addition to one per item."""

HTML_FILTERS = {"urlize", "xmlattr", "striptags", "wordwrap", "pprint"}
"""Filters for pages and their source, which take more than linear time."""

FIRST_ARGUMENTS: dict[str, Callable[[Context], tuple[Any, ...]]] = {
    "context": lambda context: (context,),
    "eval_context": lambda context: (context.eval_ctx,),
    "environment": lambda context: (context.environment,),
}
"""First arguments of filters by the name of Jinja's mark on them."""


def limit_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose result is counted, and checked before if it may be large."""
    if function is len:
        return function
    mark = getattr(function, "jinja_pass_arg", None)
    first = (lambda context: ()) if mark is None else FIRST_ARGUMENTS[mark.name]
    bound = BOUNDS.get(name)

    @pass_context
    def limited(context: LimitedContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        if type(value) is not str:
            value = budget.collect(value)
        budget.spend(FILTER_STEPS + (len(value) if isinstance(value, LISTS) else 0))
        if bound is not None:
            budget.expect(bound(budget, value, *args, *kwargs.values()))
        return budget.keep(function(*first(context), value, *args, **kwargs))

    return limited


@pass_context
def spend_steps(context: LimitedContext, steps: int) -> bool:
    """Take steps."""
    return context.budget.spend(steps)


@pass_context
def keep_value(context: LimitedContext, value: Any) -> Any:
    """Count a new value."""
    return context.budget.keep(value)


@pass_context
def write_value(context: LimitedContext, value: Any) -> str:
    """Count a value that is written."""
    text = value if type(value) is str else str(value)
    budget = context.budget
    budget.expect(len(text))
    budget.characters -= len(text)
    return text


def bound_product(budget: Budget, *values: Any) -> float:
    """Return the product of weights, where an integer counts as its value; none has no bound."""
    if len(values) == 1:
        return 0
    sizes = (abs(each) if isinstance(each, int) else budget.weigh(each) for each in values)
    return math.prod(max(1, each) for each in sizes)


def bound_items(budget: Budget, value: Any, *_: Any) -> float:
    """Return the characters of a list of all characters."""
    return ITEM_CHARACTERS * budget.weigh(value)


def bound_join(budget: Budget, *values: Any) -> float:
    """Return the characters of items with a text between each two."""
    counts = (len(each) for each in values if hasattr(each, "__len__"))
    return sum(map(budget.weigh, values)) + math.prod(max(1, each) for each in counts)


def bound_replace(budget: Budget, value: Any, *others: Any) -> float:
    """Return the characters of a text in which one is replaced by another."""
    old, new, *_ = map(str, (*others, "", ""))
    return budget.weigh(value) + str(value).count(old) * len(new)


def bound_round(budget: Budget, _: Any, *others: Any) -> float:
    """Return the characters of a power of ten."""
    return bound_product(budget, BIG_VALUE, *others)


def bound_sum(budget: Budget, value: Any, *others: Any) -> float:
    """Return the characters of all partial sums, of which only those of lists are large."""
    is_list = any(isinstance(each, list | tuple) for each in others)
    return bound_product(budget, value, value) if is_list else 0


def bound_format(budget: Budget, form: Any, *values: Any) -> float:
    """Return the characters of a format filled with values."""
    form = form.decode("latin-1") if isinstance(form, bytes) else str(form)
    if VARIABLE_WIDTH.search(form.replace("{{", "")):
        raise TemplateError("a format takes a width from its arguments")
    widths = (int(digits[:20]) for digits in re.findall(r"[0-9]+", form))
    fields = form.count("%") + form.count("{")
    return len(form) + fields * (max(widths, default=0) + sum(map(budget.weigh, values)))


VARIABLE_WIDTH = re.compile(r"%(\([^)]*\))?[-#0 +0-9.]*\*|\{[^{}]*\{")

Bound = Callable[..., float]

BOUNDS: dict[str, Bound] = {
    "join": bound_join,
    "replace": bound_replace,
    "format": bound_format,
    "format_map": bound_format,
    "round": bound_round,
    "sum": bound_sum,
    **dict.fromkeys(("split", "rsplit", "splitlines", "list", "sort"), bound_items),
    **dict.fromkeys(
        ("center", "ljust", "rjust", "zfill", "expandtabs", "translate"), bound_product
    ),
    **dict.fromkeys(("to_bytes", "indent", "tojson", "batch", "slice"), bound_product),
}
"""Bounds of the characters that filters and methods make from a value and their arguments."""

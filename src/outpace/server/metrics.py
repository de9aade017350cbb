"""What a server counts, for Prometheus; every server has a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from outpace.api.output import Output
from outpace.engine.runner import Usage
from outpace.server.models import Model

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
TOKENS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
BY = ("model", "method")


class Metrics:
    """Counters and histograms of one server; gauges are read when somebody asks."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self.registry = own = CollectorRegistry()
        own.register(Engines(models))

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"outpace_{name}", about, labels, registry=own)

        def histogram(name: str, about: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(f"outpace_{name}", about, labels, registry=own, buckets=[*buckets])

        self.requests = counter("requests", "Requests that ended", *BY, "result")
        self.prompt = counter("prompt_tokens", "Tokens of prompts", *BY)
        self.output = counter("output_tokens", "Committed tokens of answers", *BY)
        self.forwards = counter("forwards", "Forwards of requests", *BY, "role")
        self.proposed = counter("proposed_tokens", "Tokens that a second model checked", *BY)
        self.kept = counter("kept_tokens", "Those of them that were kept", *BY)
        self.first = histogram("first_text_seconds", "Time to the first text", SECONDS, *BY)
        self.gaps = histogram("gap_seconds", "Time between texts of a stream", SECONDS, *BY)
        self.whole = histogram("request_seconds", "Time to the end of the answer", SECONDS, *BY)
        self.rate = histogram("tokens_per_forward", "Tokens per forward", TOKENS, *BY)
        self.lag = histogram("loop_lag_seconds", "How late the event loop is", SECONDS)

    def text(self) -> bytes:
        """All of it, in Prometheus' format."""
        return generate_latest(self.registry)

    def answered(self, labels: tuple[str, str], output: Output) -> None:
        """Count a whole answer."""
        self.output.labels(*labels).inc(output.chosen)
        if output.forwards:
            self.rate.labels(*labels).observe(output.tokens_per_forward)
        counts: dict[str, int] = {}
        for step in output.steps:
            counts[step.model] = counts.get(step.model, 0) + 1
        for role, count in counts.items():
            self.forwards.labels(*labels, role).inc(count)
        proposed, kept = checked(output)
        if proposed:
            self.proposed.labels(*labels).inc(proposed)
            self.kept.labels(*labels).inc(kept)


def checked(output: Output) -> tuple[int, int]:
    """Tokens that a second model was asked about, and how many of them became output.

    The judge is the verifier where there is one, and the target where there is a draft. It is fed
    known tokens and, behind them, proposed ones; the first token that it commits is its own.
    """
    roles = {step.model for step in output.steps}
    judge = "verifier" if "verifier" in roles else "target" if "draft" in roles else None
    proposed = kept = 0
    length = output.prompt_tokens
    for step in output.steps:
        if step.model == judge and (asked := step.start + step.rows - length) > 0:
            proposed += asked
            kept += max(step.kept - 1, 0)
        length += step.kept
    return proposed, kept


class Clock:
    """When a request came, and when its texts went out."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.first: float | None = None
        self.last = self.began
        self.gaps: list[float] = []

    def tick(self) -> None:
        """Text has come."""
        now = perf_counter()
        if self.first is None:
            self.first = now - self.began
        else:
            self.gaps.append(now - self.last)
        self.last = now

    def tell(self, metrics: Metrics, labels: tuple[str, str]) -> None:
        """Count what was measured, once the request is over."""
        if self.first is not None:
            metrics.first.labels(*labels).observe(self.first)
        observe = metrics.gaps.labels(*labels).observe
        for gap in self.gaps:
            observe(gap)
        metrics.whole.labels(*labels).observe(perf_counter() - self.began)


class Engines:
    """What engines hold at the moment."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self.models = models

    def collect(self) -> Iterator[Metric]:
        """The figures of all models."""
        waiting = GaugeMetricFamily("outpace_waiting", "Requests in the queue", labels=["model"])
        running = GaugeMetricFamily("outpace_running", "Requests that run", labels=["model"])
        by = ["model", "role"]
        used = GaugeMetricFamily("outpace_cache_pages_used", "Pages that requests hold", labels=by)
        total = GaugeMetricFamily("outpace_cache_pages", "Pages that there are", labels=by)
        spared = CounterMetricFamily(
            "outpace_prefix_rows_spared", "Rows that the prefix cache has spared", labels=by
        )
        for name, model in self.models.items():
            waiting.add_metric([name], model.engine.waiting)
            running.add_metric([name], model.engine.running)
            for role, each in grouped(model).items():
                used.add_metric([name, role], sum(usage.held for usage in each))
                total.add_metric([name, role], sum(usage.pages for usage in each))
                found = [usage.spared for usage in each if usage.spared is not None]
                if found:
                    spared.add_metric([name, role], sum(found))
        yield from (waiting, running, used, total, spared)


def grouped(model: Model) -> dict[str, list[Usage]]:
    """What the models of an engine hold, by their roles."""
    groups: dict[str, list[Usage]] = {}
    for usage in model.engine.usage:
        groups.setdefault(model.roles[usage.name], []).append(usage)
    return groups

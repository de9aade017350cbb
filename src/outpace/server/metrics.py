"""Prometheus metrics of a server, in a separate registry for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from outpace.api.output import Output
from outpace.engine.runner import CacheUsage
from outpace.server.models import HostedModel

SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
TOKENS_BUCKETS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
DRAFT_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)
METHOD_LABELS = ("model", "method")


class ServerMetrics:
    """Counters and histograms of one server; gauges are read when metrics are collected."""

    def __init__(self, models: Mapping[str, HostedModel]) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(EngineCollector(models))

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"outpace_{name}", about, labels, registry=registry)

        def histogram(name: str, about: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(
                f"outpace_{name}", about, labels, registry=registry, buckets=[*buckets]
            )

        self.requests = counter("requests", "Completed requests", *METHOD_LABELS, "result")
        self.prompt = counter("prompt_tokens", "Prompt tokens", *METHOD_LABELS)
        self.cached = counter(
            "cached_tokens", "Prompt tokens found in the prefix cache", *METHOD_LABELS
        )
        self.output = counter("output_tokens", "Committed output tokens", *METHOD_LABELS)
        self.forwards = counter("forwards", "Forwards", *METHOD_LABELS, "role")
        self.proposed = counter(
            "proposed_tokens", "Draft tokens that were verified", *METHOD_LABELS
        )
        self.accepted = counter(
            "kept_tokens", "Verified draft tokens that were accepted", *METHOD_LABELS
        )
        self.lengths = histogram(
            "accepted_tokens",
            "Draft tokens accepted per verification",
            DRAFT_BUCKETS,
            *METHOD_LABELS,
        )
        self.first = histogram(
            "first_text_seconds", "Time to the first text", SECONDS_BUCKETS, *METHOD_LABELS
        )
        self.gaps = histogram(
            "gap_seconds", "Time between texts of a stream", SECONDS_BUCKETS, *METHOD_LABELS
        )
        self.duration = histogram(
            "request_seconds", "Time to the end of the answer", SECONDS_BUCKETS, *METHOD_LABELS
        )
        self.rate = histogram(
            "tokens_per_forward", "Tokens per forward", TOKENS_BUCKETS, *METHOD_LABELS
        )
        self.lag = histogram("loop_lag_seconds", "Lag of the event loop", SECONDS_BUCKETS)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def count_answer(self, labels: tuple[str, str], output: Output) -> None:
        self.output.labels(*labels).inc(output.chosen)
        if output.forwards:
            self.rate.labels(*labels).observe(output.tokens_per_forward)
        counts: dict[str, int] = {}
        for step in output.steps:
            counts[step.model] = counts.get(step.model, 0) + 1
        for role, count in counts.items():
            self.forwards.labels(*labels, role).inc(count)
        for proposed, accepted in output.verifications:
            self.proposed.labels(*labels).inc(proposed)
            self.accepted.labels(*labels).inc(accepted)
            self.lengths.labels(*labels).observe(accepted)


class RequestTimer:
    """Times of a request: its start, and when text was sent."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.first: float | None = None
        self.last = self.began
        self.gaps: list[float] = []

    def record_text(self) -> None:
        now = perf_counter()
        if self.first is None:
            self.first = now - self.began
        else:
            self.gaps.append(now - self.last)
        self.last = now

    def report_metrics(self, metrics: ServerMetrics, labels: tuple[str, str]) -> None:
        if self.first is not None:
            metrics.first.labels(*labels).observe(self.first)
        observe = metrics.gaps.labels(*labels).observe
        for gap in self.gaps:
            observe(gap)
        metrics.duration.labels(*labels).observe(perf_counter() - self.began)


class EngineCollector:
    """Prometheus collector of the engines' current state."""

    def __init__(self, models: Mapping[str, HostedModel]) -> None:
        self.models = models

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("outpace_waiting", "Waiting requests", labels=["model"])
        running = GaugeMetricFamily("outpace_running", "Running requests", labels=["model"])
        loaded = GaugeMetricFamily("outpace_loaded", "Whether it is loaded", labels=["model"])
        labels = ["model", "role"]
        used = GaugeMetricFamily("outpace_cache_pages_used", "Cache pages in use", labels=labels)
        total = GaugeMetricFamily("outpace_cache_pages", "Cache pages in total", labels=labels)
        fitting = GaugeMetricFamily("outpace_cache_tokens", "Tokens that fit", labels=labels)
        size = GaugeMetricFamily("outpace_cache_bytes", "Memory of the cache", labels=labels)
        spared = CounterMetricFamily(
            "outpace_prefix_rows_spared", "Rows skipped by the prefix cache", labels=labels
        )
        engines = {name: each for name, each in self.models.items() if each.adapter is None}
        for name, model in engines.items():
            waiting.add_metric([name], model.engine.waiting)
            running.add_metric([name], model.engine.running)
            loaded.add_metric([name], model.engine.is_loaded)
            groups: dict[str, list[CacheUsage]] = {}
            for usage in model.engine.cache_usage:
                groups.setdefault(model.roles[usage.name], []).append(usage)
            for role, usages in groups.items():
                used.add_metric([name, role], sum(usage.held_pages for usage in usages))
                total.add_metric([name, role], sum(usage.total_pages for usage in usages))
                fitting.add_metric([name, role], sum(usage.tokens for usage in usages))
                size.add_metric([name, role], sum(usage.total_bytes for usage in usages))
                skipped = [usage.skipped_rows for usage in usages if usage.skipped_rows is not None]
                if skipped:
                    spared.add_metric([name, role], sum(skipped))
        yield from (waiting, running, loaded, used, total, fitting, size, spared)

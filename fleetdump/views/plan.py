"""A run before it begins: what it takes, by length and by host; and what the tokeniser makes of the data."""

from __future__ import annotations

from rich.table import Table

from fleetdump.agent.runmessages import PreviewResult
from fleetdump.tasks.plan import Bucket, Estimate, HostNeed
from fleetdump.views.console import duration, err, out, quoted, size

BAR = 40
SHOWN_REJECTS = 3


def show_preview(host: str, result: PreviewResult) -> None:
    """Template, spans and warnings of a sample of the data, on stderr."""
    methods = ", ".join(f"{method} {count}" for method, count in sorted(result.methods.items())) or "nothing"
    err.print(f"{len(result.lengths)} rows tokenised on {host}: masks by {methods}", markup=False)
    err.print(f"  chat template {result.template_sha256[:12]}, tokenizer {result.tokenizer_sha256[:12]}", markup=False)
    for sample in result.shown:
        spans = " | ".join(repr(span) for span in sample.spans)
        text = f"  {sample.id}: {sample.supervised} of {sample.tokens} tokens supervised: {spans}"
        err.print(text, markup=False)
    for row in result.rejected[:SHOWN_REJECTS]:
        err.print(f"  {row.id} would be rejected ({row.reason}): {row.detail}", markup=False)
    if len(result.rejected) > SHOWN_REJECTS:
        err.print(f"  and {len(result.rejected) - SHOWN_REJECTS} more of these rows", markup=False)
    for warning in warnings(result):
        err.print(f"  warning: {warning}", markup=False)


def _have(number: int) -> str:
    return "has" if number == 1 else "have"


def warnings(result: PreviewResult) -> list[str]:
    """What is odd about the loss masks, in words."""
    found = []
    if result.tokens and result.supervised in (0, result.tokens) and set(result.methods) != {"text"}:
        found.append(f"{'no' if not result.supervised else 'every'} token is supervised")
    if result.unsupervised_samples:
        found.append(
            f"{result.unsupervised_samples} of these samples {_have(result.unsupervised_samples)} no supervised token"
        )
    if result.all_supervised_samples:
        found.append(f"in {result.all_supervised_samples} of these conversations every token is supervised")
    return found


def show_estimate(plan: Estimate) -> None:
    """Totals, histogram and hosts, on stdout."""
    about = "" if plan.exact else "about "
    out.print(f"{plan.samples} samples, {about}{plan.tokens:,} tokens", markup=False)
    for text in _left_out(plan):
        out.print(f"  {text}", markup=False)
    out.print(
        f"{size(plan.bytes)} ({plan.bytes / 1e9:.1f} GB) in all, {plan.bytes_per_token:,} B a token", markup=False
    )
    out.print(_histogram(plan.histogram))
    out.print(_hosts(plan.hosts))
    if plan.seconds:
        out.print(f"about {duration(plan.seconds)}", markup=False)
    else:
        out.print("how long: --measure runs a short burst, --tokens-per-second N takes your figure", markup=False)


def _left_out(plan: Estimate) -> list[str]:
    texts = []
    if plan.broken:
        reasons = ", ".join(f"{reason} {count}" for reason, count in plan.broken_by_reason.items())
        texts.append(f"{plan.broken} broken rows left out: {reasons}")
    if plan.dropped:
        texts.append(f"{plan.dropped} samples too long, left out")
    if plan.cut:
        texts.append(f"{plan.cut} samples cut at the limit")
    return texts


def _histogram(buckets: list[Bucket]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, justify in (("tokens up to", "right"), ("samples", "right"), ("of all tokens", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    most = max((bucket.samples for bucket in buckets), default=0)
    total = sum(bucket.tokens for bucket in buckets)
    for bucket in buckets:
        bar = "█" * round(BAR * bucket.samples / most)
        share = f"{100 * bucket.tokens / total:.0f} %"
        table.add_row(f"{bucket.up_to:,}" if bucket.up_to else "more", f"{bucket.samples:,}", share, bar)
    return table


def _hosts(needs: list[HostNeed]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("host", "servers", "samples", "tokens", "writes", "free", "time", ""):
        table.add_column(name, justify="left" if name in ("host", "") else "right")
    for need in needs:
        table.add_row(
            quoted(need.host),
            str(need.servers),
            f"{need.samples:,}",
            f"{need.tokens:,}",
            size(need.bytes),
            size(need.free_bytes),
            duration(need.seconds) if need.seconds else "?",
            "" if need.fits else "[red]does not fit[/]",
        )
    return table

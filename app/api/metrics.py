"""GET /metrics: counters and gauges in the text that Prometheus reads.

| family                         | source                            | labels            |
| ------------------------------ | --------------------------------- | ----------------- |
| those of `SERVING`             | `InferenceService.counters`       | none              |
| those of `STAGES`              | the same                          | none (in the name) |
| those of `CONNECTIONS`         | `InferenceService.connections`    | endpoint          |
| commands, round trips          | the same                          | endpoint, and command or le |
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from app.api.context import ApiDep
from app.api.docs import LOOKING, answers
from app.api.state import check_enabled
from app.engine.connection import ConnectionStats

router = APIRouter(tags=["state"])

MEDIA_TYPE = "text/plain; version=0.0.4"
PREFIX = "tandem_"

#: What the engine counts, by name.
SERVING: Mapping[str, str] = {
    "blocks": "blocks of the KV cache",
    "blocks_allocated_total": "blocks that were given to a sequence",
    "blocks_cached": "blocks that hold a prefix nobody uses now",
    "blocks_free": "blocks that hold nothing",
    "blocks_held": "blocks that sequences use now",
    "blocks_moved_total": "blocks that were copied to another place",
    "cached_tokens_total": "prompt tokens that were found in the cache",
    "decode_rows_total": "rows of ubatches that went on with an answer",
    "device_losses_total": "times that a device was lost",
    "preemptions_total": "sequences that had to give their blocks back before their end",
    "programs_prepared_total": "programs that were prepared for shapes not met before",
    "prompt_rows_total": "rows of ubatches that read a prompt",
    "prompt_tokens_total": "tokens of the prompts that were begun",
    "requests_abort_total": "requests whose caller went away or asked to stop",
    "requests_failed_total": "requests that ended by another error than the loss of a device",
    "requests_in_flight": "requests that were admitted and have not ended",
    "requests_length_total": "requests that ended at max_tokens or at the end of the context",
    "requests_lost_total": "requests that ended because a device was lost",
    "requests_rejected_total": "requests that were refused: too long, or too many",
    "requests_running": "requests that have a slot",
    "requests_stop_total": "requests that ended by themselves or at a stop string",
    "requests_total": "requests that were admitted",
    "requests_waiting": "requests that wait for a slot",
    "snapshots": "snapshots of recurrent state that are kept",
    "tokens_predicted_total": "tokens that were drawn",
    "ubatches_in_flight": "ubatches that are being computed",
    "ubatches_total": "ubatches that were begun",
}

#: What is counted for each stage, by what follows `stage_<number>_`.
STAGES: Mapping[str, str] = {
    "bubble_ratio": "share of idleness in the seconds of computing, transfer and idleness",
    "compute_seconds_total": "seconds of computing",
    "idle_seconds_total": "seconds without anything to do while ubatches were under way",
    "transfer_seconds_total": "seconds in which the stage's input was on its way",
    "input_bytes_total": "bytes that the stage was given",
    "pushed_bytes_total": "bytes that another stage's device sent to it directly",
}
_STAGE = re.compile(r"stage_(\d+)_(\w+)")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name without the prefix, kind and meaning."""

    name: str
    kind: str
    help: str


#: What follows the family's name, the labels, the value.
Sample = tuple[str, Mapping[str, str], float]

#: What is added up over the connections to one endpoint.
CONNECTIONS: tuple[tuple[Family, Callable[[ConnectionStats], float]], ...] = (
    (Family("worker_connections", "gauge", "connections that carry work to a worker and stand"), lambda c: c.is_up),
    (Family("worker_sent_bytes_total", "counter", "bytes sent to a worker"), lambda c: c.sent_bytes),
    (Family("worker_received_bytes_total", "counter", "bytes received from a worker"), lambda c: c.received_bytes),
    (Family("worker_commands_queued", "gauge", "commands that are not written yet"), lambda c: c.queued),
    (Family("worker_commands_in_flight", "gauge", "commands that wait for their answer"), lambda c: c.in_flight),
)
COMMANDS = Family("worker_commands_total", "counter", "commands given to a worker, by kind")
ROUND_TRIPS = Family("worker_round_trip_seconds", "histogram", "seconds from a command's departure to its answer")

#: Which of the powers of two, in microseconds, are told: 16 us, 64 us, ... 67 s.
TOLD_POWERS = range(4, 27, 2)


@router.get("/metrics", response_class=PlainTextResponse, **answers(None, (*LOOKING, 501)))
async def metrics(api: ApiDep) -> Response:
    """Counters and gauges as Prometheus reads them."""
    check_enabled(api.options.enable_metrics, "metrics")
    lines = [*counter_lines(api.service.counters()), *connection_lines(api.service.connections())]
    return PlainTextResponse("\n".join([*lines, ""]), media_type=MEDIA_TYPE)


def counter_lines(counters: Mapping[str, float]) -> Iterator[str]:
    """What the engine counts."""
    for name, value in sorted(counters.items()):
        kind = "counter" if name.endswith("_total") else "gauge"
        yield from family_lines(Family(name, kind, help_of(name)), [("", {}, value)])


def help_of(name: str) -> str:
    """What a name means; the name itself where nothing is known of it."""
    if match := _STAGE.fullmatch(name):
        return f"{STAGES.get(match[2], match[2])} (stage {match[1]})"
    return SERVING.get(name, name)


def connection_lines(connections: Sequence[ConnectionStats]) -> Iterator[str]:
    """What went to workers and came back, added up for each endpoint; nothing where there are none."""
    if not connections:
        return
    by_endpoint: dict[str, list[ConnectionStats]] = {}
    for stats in connections:
        by_endpoint.setdefault(stats.endpoint, []).append(stats)
    for family, value in CONNECTIONS:
        sums = ((endpoint, sum(map(value, some))) for endpoint, some in by_endpoint.items())
        yield from family_lines(family, [("", {"endpoint": endpoint}, total) for endpoint, total in sums])
    for family, samples_of in ((COMMANDS, commands_of), (ROUND_TRIPS, round_trips_of)):
        yield from family_lines(
            family, [sample for endpoint, some in by_endpoint.items() for sample in samples_of(endpoint, some)]
        )


def commands_of(endpoint: str, connections: Sequence[ConnectionStats]) -> Iterator[Sample]:
    commands: Counter[str] = Counter()
    for stats in connections:
        commands.update(stats.commands)
    for command, n in sorted(commands.items()):
        yield "", {"endpoint": endpoint, "command": command}, n


def round_trips_of(endpoint: str, connections: Sequence[ConnectionStats]) -> Iterator[Sample]:
    """Cumulative buckets, as histograms have them."""
    for power in TOLD_POWERS:
        n = sum(sum(stats.round_trips[: power + 1]) for stats in connections)
        yield "_bucket", {"endpoint": endpoint, "le": f"{2**power / 1e6:g}"}, n
    n = sum(sum(stats.round_trips) for stats in connections)
    yield "_bucket", {"endpoint": endpoint, "le": "+Inf"}, n
    yield "_sum", {"endpoint": endpoint}, sum(stats.round_trip_s for stats in connections)
    yield "_count", {"endpoint": endpoint}, n


def family_lines(family: Family, samples: Iterable[Sample]) -> Iterator[str]:
    """One family with its samples in the text format."""
    name = PREFIX + family.name
    yield f"# HELP {name} {escaped(family.help)}"
    yield f"# TYPE {name} {family.kind}"
    for suffix, labels, value in samples:
        told = ",".join(f'{key}="{escaped(text, quotes=True)}"' for key, text in labels.items())
        yield f"{name}{suffix}{f'{{{told}}}' if told else ''} {value:.17g}"


def escaped(text: str, *, quotes: bool = False) -> str:
    """Text as help lines hold it, and with `quotes` as values of labels do."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text

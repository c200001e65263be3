"""From an endpoint to its devices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from app.engine.device import DeviceCaps
from app.errors import AccessDenied, DeviceError, DeviceLost, RemoteProtocolError
from app.rpc.device import RpcDevice
from app.rpc.dispatcher import Dispatcher
from app.rpc.endpoint import Dial, Timeouts, tcp_dial
from app.rpc.handshake import dial_and_greet
from app.rpc.heartbeat import Heartbeat
from app.rpc.link import Link
from app.rpc.messages import Describe, DeviceCount, GetAlignment, GetMaxSize
from app.rpc.token import Token

#: More devices than any machine has; bounds what a peer can make us open.
MAX_DEVICES = 256

#: A longer name of a worker's process is cut.
MAX_IDENTITY = 64

#: How the causes of a loss begin that a Tandem worker gave before it hung up.
_WORKER_SAYS = "the worker says: "

#: Weights longer than this are offered by their hash before they are sent. Stock workers keep only such large ones.
OFFERS_ABOVE_BYTES_STOCK = 10 << 20
OFFERS_ABOVE_BYTES_TANDEM = 4 << 10


def connect(
    endpoint: str,
    *,
    first_index: int = 0,
    timeouts: Timeouts | None = None,
    dial: Dial | None = None,
    token: Token | None = None,
) -> list[RpcDevice]:
    """The devices of one worker, named RPC<n>[endpoint] from `first_index` on. Blocks.

    A stock worker serves one client, so all its devices share one connection; a Tandem worker gets one per device, so
    that they overlap, and one for heartbeats. `dial` replaces TCP; `token` is shown to workers that have one.
    Raises DeviceLost, DeviceError, AccessDenied, RemoteProtocolError, VersionMismatch.
    """
    timeouts = timeouts or Timeouts()
    dial = dial or tcp_dial(endpoint, timeouts)

    def open_one(*, is_first: bool) -> Dispatcher:
        sock, peer = dial_and_greet(dial, endpoint, timeouts, token, warns=is_first)
        return Dispatcher(sock, peer, endpoint, timeouts)

    first = open_one(is_first=True)
    opened = [first]
    try:
        count = _count(first)
        if not 0 < count <= MAX_DEVICES:
            raise DeviceError(f"worker {endpoint} announces {count} devices, but must have 1 to {MAX_DEVICES}")
        if first.peer.is_tandem:
            opened += [open_one(is_first=False) for _ in range(count)]
            links = [Link(dispatcher, 1) for dispatcher in opened[:count]]
        else:
            links = [Link(first, count)] * count
        devices = _devices(links, _describe(first, count), first_index)
    except BaseException:
        for dispatcher in opened:
            dispatcher.close()
        raise
    if first.peer.is_tandem:
        every_s, patience_s = timeouts.heartbeat_s, timeouts.patience_s
        heartbeat = Heartbeat(opened[count], opened[:count], every_s=every_s, patience_s=patience_s)
        for link in links:
            link.heartbeat = heartbeat
    return devices


def _count(first: Dispatcher) -> int:
    """What a worker says to the first question. Raises AccessDenied where it says that it answers none of us."""
    try:
        return int(first.ask(DeviceCount()).result().value)
    except DeviceLost as error:
        if error.cause.startswith(_WORKER_SAYS):  # nothing was lost: most likely it has a token, and we showed none
            raise AccessDenied(first.endpoint, error.cause) from error
        raise


def _devices(links: Sequence[Link], told: _Description, first_index: int) -> list[RpcDevice]:
    devices = []
    for index, link in enumerate(links):
        name = f"RPC{first_index + index}[{link.endpoint}]"
        caps = _caps(link, index, told.devices[index])
        link.pushes, link.selects_rows = told.pushes, told.selects_rows
        link.takes_turns, link.builds_masks = told.takes_turns, told.builds_masks
        link.identity = told.identity
        devices.append(RpcDevice(name, link, index, caps, offers_above_bytes=told.offers_above_bytes))
    return devices


def _caps(link: Link, index: int, described: dict[str, str]) -> DeviceCaps:
    alignment = int(link.call(GetAlignment(index)).value)
    if alignment <= 0 or alignment & (alignment - 1):
        raise RemoteProtocolError(f"worker {link.endpoint} announces an alignment of {alignment} bytes")
    return DeviceCaps(
        kind="rpc",
        kernel_variant=described["kernel_variant"],
        alignment_bytes=alignment,
        max_buffer_bytes=int(link.call(GetMaxSize(index)).value),
        description=described["description"],
    )


@dataclass(frozen=True, slots=True)
class _Description:
    """What a worker says of its devices, and from which size on weights are worth offering by their hash."""

    devices: list[dict[str, str]]
    offers_above_bytes: int | None
    pushes: bool = False
    selects_rows: bool = False
    takes_turns: bool = False
    builds_masks: bool = False
    identity: str = ""


def _describe(dispatcher: Dispatcher, count: int) -> _Description:
    """A stock worker tells nothing; its version stands for its kernels, and it keeps large weights, if any."""
    peer = dispatcher.peer
    if not peer.is_tandem:
        version = f"{peer.version[0]}.{peer.version[1]}.{peer.patch}"
        device = {"kernel_variant": f"stock-{version}", "description": f"stock worker, protocol {version}"}
        return _Description([device] * count, OFFERS_ABOVE_BYTES_STOCK)
    try:
        told = json.loads(bytes(dispatcher.ask(Describe()).result()))
        devices = [{key: str(device[key]) for key in ("kernel_variant", "description")} for device in told["devices"]]
        keeps_weights = bool(told["keeps_weights"])
        identity = str(told.get("identity", ""))[:MAX_IDENTITY]
        can = {what: bool(told.get(what)) for what in ("pushes", "selects_rows", "takes_turns", "builds_masks")}
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteProtocolError(f"worker {dispatcher.endpoint} describes its devices unreadably: {error}") from error
    if len(devices) != count:
        raise RemoteProtocolError(f"worker {dispatcher.endpoint} describes {len(devices)} devices, not {count}")
    offers_above_bytes = OFFERS_ABOVE_BYTES_TANDEM if keeps_weights else None
    return _Description(devices, offers_above_bytes, identity=identity, **can)

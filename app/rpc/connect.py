"""From an endpoint to its devices."""

from __future__ import annotations

import json

from app.engine.device import DeviceCaps
from app.errors import DeviceError, RemoteProtocolError
from app.rpc.device import RpcDevice
from app.rpc.dispatcher import Dispatcher
from app.rpc.endpoint import Dial, Timeouts, tcp_dial
from app.rpc.handshake import dial_and_greet
from app.rpc.link import Link
from app.rpc.messages import Describe, DeviceCount, GetAlignment, GetMaxSize

#: More devices than any machine has; bounds what a peer can make us open.
MAX_DEVICES = 256


def connect(
    endpoint: str, *, first_index: int = 0, timeouts: Timeouts | None = None, dial: Dial | None = None
) -> list[RpcDevice]:
    """The devices of one worker, named RPC<n>[endpoint] from `first_index` on. Blocks.

    A stock worker serves one client, so all its devices share one connection; a Tandem worker gets one per device, so
    that they overlap. `dial` replaces TCP. Raises DeviceLost, DeviceError, RemoteProtocolError, VersionMismatch.
    """
    timeouts = timeouts or Timeouts()
    dial = dial or tcp_dial(endpoint, timeouts)
    first = _open(dial, endpoint, timeouts)
    opened = [first]
    try:
        count = int(first.ask(DeviceCount()).result().value)
        if not 0 < count <= MAX_DEVICES:
            raise DeviceError(f"worker {endpoint} announces {count} devices; start it with at least one")
        if first.peer.is_tandem:
            opened += [_open(dial, endpoint, timeouts) for _ in range(count - 1)]
            links = [Link(dispatcher, 1) for dispatcher in opened]
        else:
            links = [Link(first, count)] * count
        described = _described(first, count)
        devices = []
        for index, link in enumerate(links):
            name = f"RPC{first_index + index}[{endpoint}]"
            devices.append(RpcDevice(name, link, index, _caps(link, index, described[index])))
    except BaseException:
        for dispatcher in opened:
            dispatcher.close()
        raise
    return devices


def _open(dial: Dial, endpoint: str, timeouts: Timeouts) -> Dispatcher:
    sock, peer = dial_and_greet(dial, endpoint, timeouts)
    return Dispatcher(sock, peer, endpoint, timeouts)


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


def _described(dispatcher: Dispatcher, count: int) -> list[dict[str, str]]:
    """Kernel variant and description per device. A stock worker tells neither; its version stands for its kernels."""
    peer = dispatcher.peer
    if not peer.is_tandem:
        version = f"{peer.version[0]}.{peer.version[1]}.{peer.patch}"
        return [{"kernel_variant": f"stock-{version}", "description": f"stock worker, protocol {version}"}] * count
    try:
        devices = json.loads(bytes(dispatcher.ask(Describe()).result()))["devices"]
        described = [{key: str(device[key]) for key in ("kernel_variant", "description")} for device in devices]
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteProtocolError(f"worker {dispatcher.endpoint} describes its devices unreadably: {error}") from error
    if len(described) != count:
        raise RemoteProtocolError(f"worker {dispatcher.endpoint} describes {len(described)} devices, not {count}")
    return described

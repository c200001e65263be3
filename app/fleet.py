"""The devices a command works with: local ones by name, remote ones behind their endpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.engine.device import Device
from app.engine.devices.numpy import NumpyDevice
from app.errors import ConfigError, DeviceError, ProtocolError, TandemError
from app.rpc.connect import connect
from app.rpc.device import RpcDevice
from app.rpc.token import Token

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """How local devices are opened. None: one thread per core, no limit, the best kernels."""

    threads: int | None = None
    memory_limit_bytes: int | None = None
    cpu_variant: str | None = None
    cpus: tuple[int, ...] = ()  # those the native device may run on; none named: all
    pin: bool = False


def _cpu(options: LocalOptions) -> Device:
    """The native CPU device, or the reference device where the native part was not built."""
    try:
        from app.engine.devices.cpu import CpuDevice
    except ImportError as error:  # a wheel of Python alone
        if options.cpu_variant is not None:
            raise ConfigError(
                f"the native CPU kernels are not there ({error}), so none is called {options.cpu_variant!r}; "
                "leave out --cpu-variant, or install Tandem where there is a C++ compiler"
            ) from error
        log.warning("the native CPU kernels are not there (%s); running on numpy, which is many times slower", error)
        return _numpy(options, "CPU")
    return CpuDevice(
        "CPU",
        options.threads,
        options.memory_limit_bytes,
        pin=options.pin,
        variant=options.cpu_variant,
        cpus=options.cpus,
    )


def _numpy(options: LocalOptions, name: str = "NUMPY") -> Device:
    if options.cpus or options.pin:
        raise ConfigError("the numpy device binds no threads; leave out --cpu-range, --cpu-mask and --cpu-strict")
    n_threads = options.threads or os.cpu_count() or 1
    return NumpyDevice(name, n_threads=n_threads, memory_limit_bytes=options.memory_limit_bytes)


ANY = LocalOptions()
LOCAL_DEVICES: dict[str, Callable[[LocalOptions], Device]] = {"CPU": _cpu, "NUMPY": _numpy}


def open_local(names: Sequence[str] = (), options: LocalOptions = ANY) -> list[Device]:
    """Local devices by name; none named: the best there is. Raises ConfigError for a name that is not known."""
    devices = []
    for name in names or ("CPU",):
        if name.upper() not in LOCAL_DEVICES:
            raise ConfigError(f"no local device is called {name!r}; there are {', '.join(LOCAL_DEVICES)}")
        devices.append(LOCAL_DEVICES[name.upper()](options))
    return devices


def open_devices(
    names: Sequence[str], rpc: Sequence[str], options: LocalOptions = ANY, token: Token | None = None
) -> list[Device]:
    """Devices in layer order. Names are those of local devices and RPC0, RPC1, ... for what the endpoints offer.

    None named: every remote device if there are endpoints, else the best local one. What is opened and not used is
    closed again; a worker of which nothing is used is told in the log. `token` is shown to workers. Raises ConfigError,
    VersionMismatch, DeviceLost, AccessDenied.
    """
    remote: list[RpcDevice] = []
    try:
        for endpoint in rpc:
            remote.extend(connect(endpoint, first_index=len(remote), token=token))
            _check_met_once(remote)
        if not names:
            return list(remote) or open_local((), options)
        return _chosen(names, remote, options)
    except BaseException:
        close_all(remote)
        raise


def open_remote(rpc: Sequence[str], token: Token | None = None) -> tuple[list[Device], list[TandemError]]:
    """The devices of the workers that answer, and why the others do not. Raises ConfigError."""
    remote: list[RpcDevice] = []
    errors: list[TandemError] = []
    try:
        for endpoint in rpc:
            try:
                remote.extend(connect(endpoint, first_index=len(remote), token=token))
            except (DeviceError, ProtocolError) as error:
                errors.append(error)
            _check_met_once(remote)
    except BaseException:
        close_all(remote)
        raise
    return list(remote), errors


def _check_met_once(remote: Sequence[RpcDevice]) -> None:
    """Raises ConfigError for a worker behind two endpoints: its memory would be counted twice."""
    met: dict[str, str] = {}
    for link in (device.link for device in remote):
        endpoint = met.setdefault(link.identity, link.endpoint) if link.identity else link.endpoint
        if endpoint != link.endpoint:
            raise ConfigError(f"{endpoint} and {link.endpoint} are one and the same worker; name it once")


def _chosen(names: Sequence[str], remote: Sequence[RpcDevice], options: LocalOptions) -> list[Device]:
    by_name: dict[str, Device] = {f"RPC{number}": device for number, device in enumerate(remote)}
    if len(set(map(str.upper, names))) != len(names):
        raise ConfigError(f"--device {','.join(names)} names a device twice")
    known = (*LOCAL_DEVICES, *by_name)
    unknown = [name for name in names if name.upper() not in known]
    if unknown:
        raise ConfigError(f"no device is called {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [
        by_name.pop(name.upper()) if name.upper() in by_name else open_local((name,), options)[0] for name in names
    ]
    close_all(list(by_name.values()))
    used = {device.link.endpoint for device in remote if device in chosen}
    for endpoint in dict.fromkeys(device.link.endpoint for device in remote):
        if endpoint not in used:
            log.warning("worker %s is not used: --device %s names none of its devices", endpoint, ",".join(names))
    return chosen


def reopen(lost: Sequence[Device], token: Token | None = None) -> list[Device]:
    """Connect again to the workers behind lost devices. All devices of a worker are opened together, since a stock
    worker serves one client. Raises DeviceError while one of them is not back or has fewer devices than before.
    """
    opened: dict[str, list[RpcDevice]] = {}
    used: list[Device] = []
    try:
        for device in lost:
            if not isinstance(device, RpcDevice):
                raise DeviceError(f"local device {device.name} was lost and cannot be opened again; restart the server")
            endpoint = device.link.endpoint
            if endpoint not in opened:
                opened[endpoint] = connect(endpoint, token=token)
            if device.index >= len(opened[endpoint]):
                raise DeviceError(f"worker {endpoint} came back without its device {device.index}")
            again = opened[endpoint][device.index]
            again.name = device.name
            used.append(again)
    except BaseException:
        close_all([device for devices in opened.values() for device in devices])
        raise
    close_all([device for devices in opened.values() for device in devices if device not in used])
    return used


def close_all(devices: Sequence[Device]) -> None:
    """Close devices; one that fails to does not keep the others open."""
    for device in devices:
        try:
            device.close()
        except Exception as error:  # closing is the last thing asked of a device; say what went wrong and go on
            log.warning("closing %s failed: %s", device.name, error)

"""Checks of the URLs from which data may be read, and a web client that refuses unsafe redirects.

Data paths often come from another user, in a list of corpora, a blend, or a RETRO project.
Therefore a URL must be that of a store or a web server; fsspec also has protocols that run code,
read any local file, or wrap each other. A web server must not redirect this machine to a host that
only this machine can reach: a cloud's metadata service, which gives out credentials, or, from
outside, a host in its own network.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

PROTOCOLS = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "http", "https")
WEB = ("http", "https")
_METADATA = ("metadata", "metadata.google.internal", "metadata.goog", "instance-data")
_METADATA_ADDRESSES = (
    "100.100.100.200", "fd00:ec2::254", "fd20:ce::254", "168.63.129.16", "192.0.0.192",
)  # fmt: skip
"""Addresses of metadata services that are not link-local."""
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")


def check_url(url: str) -> None:
    """Raise ValueError for a URL of anything but a store or web server, or of a metadata
    service."""
    protocol = url.partition("://")[0]
    if protocol not in PROTOCOLS or "::" in url:
        raise ValueError(
            f"{url}: data can be read from files and from the URLs of stores and web servers "
            f"({', '.join(f'{name}://' for name in PROTOCOLS)}), not through another protocol; "
            "copy or mount them, and give their path"
        )
    if protocol in WEB and (reason := _refusal(host_of(url), public=False)):
        raise ValueError(f"{url} {reason}")


def host_of(url: str) -> str:
    """Return the host in a web server's URL. Raises ValueError if the URL has no host, or uses
    characters that a client might normalize to digits or to the name of a metadata service."""
    host = urlsplit(url).hostname
    if not host:
        raise ValueError(f"{url} names no host")
    if not _HOST.fullmatch(host):
        raise ValueError(
            f"{url} names a host with other characters than a-z, 0-9, '-', '_' and '.'; write the "
            "name as it is in the network's directory (xn--...)"
        )
    return host.rstrip(".").lower()


def web_client(url: str, longest: int) -> Callable[..., Awaitable[Any]]:
    """Return a function with which fsspec creates aiohttp's session, for a URL that
    :func:`check_url` has accepted.

    A request fails in any of these cases: the server, or the target of a redirect, has the address
    of a metadata service; a server outside this machine's network redirects into it; a redirect
    leads from https to http; or a response has no length, or more than ``longest`` bytes.
    """
    import aiohttp
    import yarl
    from aiohttp.abc import AbstractResolver

    host = host_of(url)
    public = all(_is_public(address) for address in _addresses(host))

    class Resolver(AbstractResolver):
        def __init__(self) -> None:
            self._inner = aiohttp.DefaultResolver()

        async def resolve(self, name: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
            addresses = await self._inner.resolve(name, port, family)
            for each in addresses:
                reason = _refusal(each["host"], public and name != host)
                if reason:  # aiohttp shows only the second argument of its error
                    raise OSError(errno.EHOSTUNREACH, f"{each['host']} {reason}")
            return addresses

        async def close(self) -> None:
            await self._inner.close()

    async def redirected(session: Any, context: Any, request: Any) -> None:
        headers = request.response.headers
        try:  # parse as aiohttp does, which may find another host than urlsplit
            location = yarl.URL(headers.get("Location") or headers.get("URI", ""))
            target = str(request.url.join(location))
        except ValueError as error:
            raise OSError(f"{request.url} leads to an address that is none: {error}") from None
        if urlsplit(str(request.url)).scheme == "https" and urlsplit(target).scheme != "https":
            raise OSError(f"{request.url} leads to {target}, without encryption")
        if reason := _refusal(host_of(target), public):
            raise OSError(f"{request.url} leads to {target}, which {reason}")

    async def answered(session: Any, context: Any, request: Any) -> None:
        if request.method == "GET" and request.response.status < 300:
            size = request.response.headers.get("Content-Length", "")
            if not size.isdecimal() or int(size) > longest:
                request.response.close()
                raise OSError(
                    f"{request.url} answers with {size or 'an unknown number of'} bytes where at "
                    f"most {longest:,} were asked for: its server does not support ranges"
                )

    async def client(**options: Any) -> Any:
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(redirected)
        trace.on_request_end.append(answered)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=Resolver()),
            trace_configs=[trace],
            auto_decompress=False,
            **options,
        )

    return client


def _refusal(host: str, public: bool) -> str:
    """Return why a host name or address is refused, or "". With ``public``, addresses in this
    machine's network are refused too."""
    address = _address(host)
    if host in _METADATA or (address is not None and _is_metadata(address)):
        return "is the metadata service of a machine, which is not read"
    if public and address is not None and not _is_public(address):
        return "is in this machine's network, and the server that leads there is not"
    return ""


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _address(host: str) -> _Address | None:
    """Parse a host as an IP address, including old notations (``0xa9fea9fe``, ``2852039166``).
    Return None if it is a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except (OSError, UnicodeError):
            return None
    mapped = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    return mapped or address


def _addresses(host: str) -> list[_Address]:
    try:
        addresses = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []  # the request itself will report the error
    return [each for entry in addresses if (each := _address(str(entry[4][0]))) is not None]


def _is_metadata(address: _Address) -> bool:
    return address.is_link_local or str(address) in _METADATA_ADDRESSES


def _is_public(address: _Address) -> bool:
    return address.is_global

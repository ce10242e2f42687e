"""Whether a process that listened somewhere is gone for certain. No Ray.

Where nothing listens on a port, the kernel of that host refuses a connection: so a process that
listened there has ended. No answer says nothing: the host may be off, cut off, or slow. A process
that is stopped (SIGSTOP) still listens: its kernel accepts connections.

A firewall that rejects connections says so by ICMP, mostly: that is no such refusal, and nothing
that lasts for less than ``TWICE_S`` is.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

ANSWER_S = 1.0
TWICE_S = 1.0  # between two looks: both must find the same
_IP_RECVERR = 11  # linux/in.h
_IPV6_RECVERR = 25  # linux/in6.h

Address = tuple[str, int]


async def refuses(address: Address, answer_s: float = ANSWER_S) -> bool:
    """Whether the host answers that nothing listens there.

    Args:
        address: Host and port; the host as a number.
        answer_s: What it has for that; then it is False.

    Example:
        >>> with socket.create_server(("127.0.0.1", 0)) as listener:
        ...     address = listener.getsockname()
        ...     asyncio.run(refuses(address))
        False
        >>> asyncio.run(refuses(address))
        True
    """
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
            else:
                sock.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
            connecting = asyncio.get_running_loop().sock_connect(sock, (host, port))
            try:
                await asyncio.wait_for(connecting, answer_s)
            except ConnectionRefusedError:
                return not _is_by_icmp(sock)
    except (OSError, asyncio.TimeoutError):  # no way there, no descriptor here, no answer
        pass
    return False


def _is_by_icmp(sock: socket.socket) -> bool:
    """Whether something on the way has refused, and not the host's TCP (ip(7), IP_RECVERR)."""
    try:
        sock.recvmsg(1, 512, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


async def all_refuse(addresses: Iterable[Address], answer_s: float = ANSWER_S) -> bool:
    """Whether that is so of each of them; of none it is not.

    Args:
        addresses: Where something listened.
        answer_s: See ``refuses``.
    """
    answers = await asyncio.gather(*(refuses(each, answer_s) for each in addresses))
    return bool(answers) and all(answers)

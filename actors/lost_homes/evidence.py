"""Whether a process that listened somewhere is gone for certain. No Ray.

Where nothing listens on a port, the kernel of that host refuses a connection: so a process that
listened there has ended. No answer says nothing: the host may be off, cut off, or slow. A process
that is stopped (SIGSTOP) still listens: its kernel accepts connections.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

ANSWER_S = 1.0

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
            connecting = asyncio.get_running_loop().sock_connect(sock, (host, port))
            await asyncio.wait_for(connecting, answer_s)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):  # no way there, no descriptor here, no answer
        pass
    return False


async def all_refuse(addresses: Iterable[Address], answer_s: float = ANSWER_S) -> bool:
    """Whether that is so of each of them; of none it is not.

    Args:
        addresses: Where something listened.
        answer_s: See ``refuses``.
    """
    answers = await asyncio.gather(*(refuses(each, answer_s) for each in addresses))
    return bool(answers) and all(answers)

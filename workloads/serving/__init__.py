"""An embedding service on a session that outlives its driver: rows by id over HTTP, by Ray Serve.

In: requests with row ids, commits of other processes. Out: rows, and the update that they are of.

    python -m clamor_ray.workloads.serving --demo
    serve run clamor_ray.workloads.serving:app session=embeddings

`app` is what Serve's config files name. What a client needs (`bodies.py`, `table.py`,
`client_rules.py`, `locustfile.py`) imports neither Ray nor the library.
"""

from __future__ import annotations

from typing import Any


def app(args: dict[str, Any]) -> Any:
    """Serve's builder of the application: see `deployment.AppOptions` for what `args` may hold.

    Serve calls it in a task of its own, where there is no session: replicas attach, each by itself.
    """
    from .deployment import application, options_of

    return application(options_of(args))

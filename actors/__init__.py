"""In: calls of sessions, page servers and the engine. Out: decisions.

Ray actors, and the Ray-free cores that decide for them. A room for each: `window/`, `commits/`,
`lineage/`, `lost_homes/`, `registry/`, `page_server/`, `store/`, `allreduce/`, `process/`. Read
first `registry/registry_core.py` (pure decisions) and `page_server/server_core.py` (asyncio, no
Ray), then the facades `registry/registry.py` and `page_server/page_server.py`.
"""

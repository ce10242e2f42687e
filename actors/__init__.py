"""Ray actors of clamor_ray, and the Ray-free cores that decide for them.

Reading order: ``messages`` (what travels), ``registry_core`` and ``handshake`` (pure decisions),
``server_core`` (asyncio, no Ray), then the two facades ``registry`` and ``page_server``.
"""

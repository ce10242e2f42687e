/* arena.h - what shim.c needs of an arena beyond pagecache.h.
 *
 * Owner: arena.c. Locks: the registry's rwlock, then one arena's mutex; nothing else is taken
 * under them. What an arena knows about its blocks lies outside of it, in ordinary memory.
 */
#ifndef PC_ARENA_H
#define PC_ARENA_H

#include "pagecache.h"

#include <stdbool.h>

/* Whose pointer it is. Arenas in the global address space may be long gone: nobody else's
 * malloc ever gives out an address there. */
enum pc__owner {
    PC__OWNER_REAL,   /* the process's malloc */
    PC__OWNER_LOST,   /* an arena that is no more: free is nothing, nothing can be copied */
    PC__OWNER_ARENA   /* one that exists, open or closed */
};

bool pc__arena_is_open(const pc_arena *arena);
/* With OWNER_ARENA: the arena, held against pc_arena_drop until pc__arena_release. */
enum pc__owner pc__arena_hold(const void *pointer, pc_arena **out);
void pc__arena_release(void);

#endif

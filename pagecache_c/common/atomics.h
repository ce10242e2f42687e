/* atomics.h - the only place that spells memory orders.
 *
 * Counters are relaxed: nobody orders other data by them. Flags and pointers that publish data
 * use pc__publish (release), which pairs with pc__observe (acquire) of the same object; each use
 * names the data that travels with it.
 */
#ifndef PC_ATOMICS_H
#define PC_ATOMICS_H

#include <stdatomic.h>
#include <stdint.h>

#define pc__publish(object, value) atomic_store_explicit((object), (value), memory_order_release)
#define pc__observe(object) atomic_load_explicit((object), memory_order_acquire)

#define pc__count_add(object, n) \
    ((void)atomic_fetch_add_explicit((object), (uint64_t)(n), memory_order_relaxed))
#define pc__count_sub(object, n) \
    ((void)atomic_fetch_sub_explicit((object), (uint64_t)(n), memory_order_relaxed))
#define pc__count_get(object) atomic_load_explicit((object), memory_order_relaxed)

/* Reference counts: taking one is relaxed (the taker already holds one), dropping one is
 * acquire-release so that the last holder sees everybody's writes before it frees. */
#define pc__ref_take(object) \
    ((void)atomic_fetch_add_explicit((object), 1u, memory_order_relaxed))
#define pc__ref_drop(object) \
    (atomic_fetch_sub_explicit((object), 1u, memory_order_acq_rel) == 1u)

#endif

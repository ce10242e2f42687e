/* kept_table.h - what a keeper holds, or a page server has given it: records by inode, oldest first.
 *
 * Owns its records, and not their descriptors. Each new variable looks its record up several times, and
 * there may be tens of thousands: so no call walks over all of them. No locks: the caller has one. */
#ifndef PC_KEPT_TABLE_H
#define PC_KEPT_TABLE_H

#include "common/list.h"
#include "engine/keeper/keeper.h"

#include <stdlib.h>

struct pc__kept_record {
    struct pc__link link;        /* by age */
    struct pc__kept_record *hash_next;
    struct pc__kept what;
    uint64_t sequence;           /* strictly increasing with age */
    int fd;
    const void *unsent;          /* the page server's newest message that says this, while it waits */
};

struct pc__kept_table {
    struct pc__link records;     /* oldest first */
    struct pc__kept_record **buckets; /* a power of two of them; none before the first record */
    size_t n_buckets, n;
    uint64_t last_sequence;
    uint64_t n_compared;         /* records that a search, or a list, has looked at; for tests */
};

#define PC__KEPT_FEWEST_BUCKETS 64u

static inline void pc__kept_init(struct pc__kept_table *table)
{
    *table = (struct pc__kept_table){0};
    pc__link_init(&table->records);
}

static inline struct pc__kept_record **pc__kept_bucket(struct pc__kept_record **buckets, size_t n, uint64_t inode)
{
    return &buckets[(inode * 0x9e3779b97f4a7c15ull >> 32) & (n - 1)];
}

static inline struct pc__kept_record *pc__kept_find(struct pc__kept_table *table, uint64_t inode)
{
    if (!table->n)
        return NULL;
    struct pc__kept_record *record = *pc__kept_bucket(table->buckets, table->n_buckets, inode);
    for (; record; record = record->hash_next) {
        table->n_compared++;
        if (record->what.inode == inode)
            return record;
    }
    return NULL;
}

/* Without memory the chains grow longer instead; false: there are no buckets at all. */
static inline bool pc__kept_grow(struct pc__kept_table *table)
{
    if (table->n < table->n_buckets)
        return true;
    const size_t n_buckets = table->n_buckets ? 2 * table->n_buckets : PC__KEPT_FEWEST_BUCKETS;
    struct pc__kept_record **buckets = calloc(n_buckets, sizeof *buckets);
    if (!buckets)
        return table->n_buckets != 0;
    pc__each(link, &table->records)
    {
        struct pc__kept_record *record = pc__of(link, struct pc__kept_record, link);
        struct pc__kept_record **bucket = pc__kept_bucket(buckets, n_buckets, record->what.inode);
        record->hash_next = *bucket;
        *bucket = record;
    }
    free(table->buckets);
    table->buckets = buckets;
    table->n_buckets = n_buckets;
    return true;
}

/* There is none of this inode yet. NULL: no memory. */
static inline struct pc__kept_record *pc__kept_add(struct pc__kept_table *table, const struct pc__kept *what,
                                              int fd)
{
    struct pc__kept_record *record = pc__kept_grow(table) ? malloc(sizeof *record) : NULL;
    if (!record)
        return NULL;
    struct pc__kept_record **bucket = pc__kept_bucket(table->buckets, table->n_buckets, what->inode);
    *record = (struct pc__kept_record){
        .hash_next = *bucket, .what = *what, .sequence = ++table->last_sequence, .fd = fd};
    *bucket = record;
    pc__link_push(&table->records, &record->link);
    table->n++;
    return record;
}

static inline void pc__kept_remove(struct pc__kept_table *table, struct pc__kept_record *record)
{
    struct pc__kept_record **at =
        pc__kept_bucket(table->buckets, table->n_buckets, record->what.inode);
    while (*at != record)
        at = &(*at)->hash_next;
    *at = record->hash_next;
    pc__link_remove(&record->link);
    free(record);
    table->n--;
}

static inline void pc__kept_free(struct pc__kept_table *table)
{
    pc__each(link, &table->records)
        free(pc__of(link, struct pc__kept_record, link));
    free(table->buckets);
    pc__kept_init(table);
}

#endif

/* list.h - doubly linked lists whose links lie in what they link. No locks. */
#ifndef PC_LIST_H
#define PC_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct pc__link {
    struct pc__link *next, *prev;
};
static inline void pc__link_init(struct pc__link *head)
{
    head->next = head->prev = head;
}
static inline bool pc__link_empty(const struct pc__link *head)
{
    return head->next == head;
}
static inline void pc__link_push(struct pc__link *head, struct pc__link *link)
{
    link->prev = head->prev;
    link->next = head;
    head->prev->next = link;
    head->prev = link;
}
static inline void pc__link_remove(struct pc__link *link)
{
    link->prev->next = link->next;
    link->next->prev = link->prev;
    link->next = link->prev = link;
}
#define pc__of(link, type, member) ((type *)(void *)((char *)(link) - offsetof(type, member)))
#define pc__each(link, head) \
    for (struct pc__link *link = (head)->next, *link##_next = link->next; link != (head); \
         link = link##_next, link##_next = link->next)

#endif

/* control.c - the processes of this node: hello, leases, prefetches, and their end.
 *
 * Entered by the loop that owns the client. When a client's socket closes, for whatever reason,
 * its leases, waiters, jobs and unsealed regions go, then its descriptors: nothing of a dead
 * process stays. Never blocks: a client that does not read its replies is cut off.
 */
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define PACKETS_PER_EVENT 32
#define HELLO_TIMEOUT_NS 5000000000ull
#define ACCEPT_PAUSE_NS 100000000ull
#define ADVICE_UNREAD_BYTES (16 << 10) /* some twenty messages; a socket holds about 200 KiB */

/* ---------------------------------------------------------------- sending */

void pc__client_send(struct pc__client *client, enum pc__ctl_type type, uint32_t request_id,
                     int status, const void *body, size_t body_bytes, int fd)
{
    struct pc__ctl_header header = {.body_bytes = (uint32_t)body_bytes,
                                    .type = (uint16_t)type,
                                    .request_id = request_id,
                                    .status = status};
    struct iovec gather[2] = {{&header, sizeof header}, {(void *)(uintptr_t)body, body_bytes}};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = gather, .msg_iovlen = body_bytes ? 2 : 1};
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *at = CMSG_FIRSTHDR(&message);
        at->cmsg_level = SOL_SOCKET;
        at->cmsg_type = SCM_RIGHTS;
        at->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(at), &fd, sizeof fd);
    }
    /* A full socket: the client's watch thread does not read, so it is as good as dead. The loop
     * that owns it sees the end of file. */
    if (sendmsg(client->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        shutdown(client->fd, SHUT_RDWR);
}

void pc__client_reply(struct pc__client *client, const struct pc__ctl_message *message, int status)
{
    pc__client_send(client, PC__CTL_REPLY, message->header.request_id, status, NULL, 0, -1);
}

/* --------------------------------------------------------------- mappings */

/* Index of the first mapping that ends after address. */
static size_t mapping_after(const struct pc__client *client, uint64_t address)
{
    size_t low = 0, high = client->n_mappings;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        const struct pc__mapping *m = &client->mappings[mid];
        if (m->address + m->length_bytes > address)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

struct pc__mapping *pc__client_mapping_at(struct pc__client *client, uint64_t address)
{
    size_t i = mapping_after(client, address);
    return i < client->n_mappings && client->mappings[i].address <= address ? &client->mappings[i]
                                                                            : NULL;
}

struct pc__mapping *pc__client_mapping(struct pc__client *client, uint64_t id)
{
    for (size_t i = 0; i < client->n_mappings; i++)
        if (client->mappings[i].id == id)
            return &client->mappings[i];
    return NULL;
}

static int add_mapping(struct pc__client *client, const struct pc__ctl_open *open,
                       struct pc__region *region, struct pc__generation *generation)
{
    size_t at = mapping_after(client, open->address);
    if (open->address % PC_BLOCK_BYTES || open->length_bytes > UINT64_MAX - open->address ||
        (at < client->n_mappings &&
         client->mappings[at].address < open->address + open->length_bytes) ||
        pc__client_mapping(client, open->mapping_id))
        return pc__fail(PC_ERR_EXISTS, "a mapping overlaps another of the same process");
    if (client->n_mappings == client->mappings_capacity) {
        size_t capacity = client->mappings_capacity ? client->mappings_capacity * 2 : 8;
        struct pc__mapping *grown = realloc(client->mappings, capacity * sizeof *grown);
        if (!grown)
            return pc__fail(PC_ERR_NO_MEMORY, "a mapping record");
        client->mappings = grown;
        client->mappings_capacity = capacity;
    }
    struct pc__window_user *user = NULL;
    if (client->page && !generation->complete &&
        !(user = pc__windows_add(generation, client->window_owner, open->address,
                                 open->length_bytes)))
        return pc__fail(PC_ERR_NO_MEMORY, "a mapping record");
    memmove(&client->mappings[at + 1], &client->mappings[at],
            (client->n_mappings - at) * sizeof client->mappings[0]);
    client->mappings[at] = (struct pc__mapping){.id = open->mapping_id,
                                                .address = open->address,
                                                .length_bytes = open->length_bytes,
                                                .version = open->version,
                                                .is_private = open->flags & PC_MAP_PRIVATE,
                                                .exact_reads =
                                                    open->flags & PC_MAP_EXACT_READS &&
                                                    client->trap != PC_TRAP_SIGSEGV,
                                                .page_shift = pc__map_page_shift(open->flags),
                                                .region = region,
                                                .window_user = user,
                                                .generation = pc__generation_take(generation)};
    client->n_mappings++;
    pc__ref_take(&region->refs);
    return PC_OK;
}

/* For nobody to have its base mapped. */
static bool home_waits(const struct pc__home *home)
{
    return home->overlay.memfd >= 0 || !pc__link_empty(&home->pending) || pc__home_read_holes(home);
}

static void drop_mapping(struct pc__client *client, struct pc__mapping *mapping)
{
    struct pc_engine *engine = client->loop->engine;
    struct pc__region *region = mapping->region;
    struct pc__generation *generation = mapping->generation;
    uint64_t id = mapping->id;
    size_t at = (size_t)(mapping - client->mappings);
    pthread_mutex_lock(&region->lock);
    pc__each(link, &generation->waiters)
    {
        struct pc__waiter *waiter = pc__of(link, struct pc__waiter, link);
        if (waiter->client == client && waiter->mapping_id == id) {
            pc__count_sub(&engine->count.faults_waiting, 1);
            pc__link_remove(&waiter->link);
            free(waiter);
        }
    }
    pc__each(job_link, &generation->jobs)
    {
        struct pc__job *job = pc__of(job_link, struct pc__job, link);
        if (job->client == client && job->mapping_id == id) {
            if (job->part)
                pc__part_blocks_done(job->part, PC_ERR_CLOSED);
            else if (!client->closed) /* else it asks the next server, if there is one */
                pc__client_send(client, PC__CTL_REPLY, job->request_id, PC_ERR_CLOSED, NULL, 0,
                                -1);
            pc__link_remove(&job->link);
            free(job);
        }
    }
    if (client->closed)
        pc__windows_left(mapping->window_user);
    else
        pc__windows_drop(mapping->window_user);
    pc__recorder_free(mapping->recorder);
    region->mappings--;
    if (mapping->follows && generation->version == mapping->version)
        generation->followers--;
    if (--generation->mappings == generation->followers) {
        pc__generations_trim(engine, region);
        if (generation->complete && region->home && home_waits(region->home))
            pc__worker_queue(engine, region);
    }
    pc__cache_leased(engine, generation);
    pthread_mutex_unlock(&region->lock);
    pc__generation_put(engine, generation);
    if (client->stray_address >= mapping->address &&
        client->stray_address - mapping->address < mapping->length_bytes)
        client->stray_by_ns = 0;
    memmove(mapping, mapping + 1, (client->n_mappings - at - 1) * sizeof *mapping);
    client->n_mappings--;
    pc__count_sub(&engine->count.mappings, 1);
    pc__region_lease_dropped(engine, region);
    pc__region_put(engine, region);
}

/* ------------------------------------------------------------------ leases */

/* Under region.lock. Whether the memory is what the client has mapped. A base that is being changed
 * is still that to those who follow it, and the worker has it there in a moment; from others, who
 * come too late, it was taken. */
static int attach_ready(struct pc_engine *engine, struct pc__region *region,
                        const struct pc__generation *generation, const struct pc__ctl_open *open)
{
    const struct pc__home *home = generation->complete ? region->home : NULL;
    bool fits = generation->version == open->version ||
                generation->version == open->version + open->follows;
    if (!fits || !home || !home->base_changes)
        return fits ? PC_OK : PC_ERR_EXPIRED;
    bool comes = open->follows && generation->version == open->version &&
                 (home->overlay.memfd < 0 ? !pc__link_empty(&home->pending)
                                          : home->applied == open->version + 1);
    if (!comes)
        return PC_ERR_EXPIRED;
    if (!home->held_up) /* else the last reader queues it */
        pc__worker_queue(engine, region);
    return PC__WAIT;
}

/* Under region.lock. PC__WAIT: *ask says for what. */
static int open_ready(struct pc__client *client, struct pc__region *region,
                      const struct pc__ctl_open *open, bool attach, bool caught_up,
                      struct pc__ctl_opened *opened, int *fd, struct pc__ask *ask)
{
    struct pc_engine *engine = client->loop->engine;
    struct pc__generation *generation = NULL;
    *ask = (struct pc__ask){.kind = PC_EVENT_NEED_REGION};
    if (region->state == PC__REGION_UNKNOWN)
        return PC__WAIT;
    if (region->state != PC__REGION_READY && !(attach && region->state == PC__REGION_RETIRED))
        return PC_ERR_NO_REGION;
    if (!region->homes) /* retired before it was defined */
        return PC_ERR_NO_REGION;
    if (open->length_bytes != region->length_bytes)
        return PC_ERR_RANGE;
    if (region->lost && !attach) /* who has it reads what is here of it */
        return region->lost;
    int rc = PC_OK;
    if (attach) {
        generation = pc__generation_by_inode(region, open->inode);
        rc = generation ? attach_ready(engine, region, generation, open) : PC_ERR_NO_GENERATION;
        ask->kind = PC_EVENT_NONE;
    } else {
        rc = pc__generation_for(engine, region, open->version, caught_up, &generation, ask);
    }
    if (!rc)
        rc = add_mapping(client, open, region, generation);
    if (rc)
        return rc;
    region->version = open->version > region->version ? open->version : region->version;
    region->mappings++;
    generation->mappings++;
    pc__cache_leased(engine, generation);
    if (open->follows)
        (void)pc__mapping_follows(pc__client_mapping(client, open->mapping_id));
    pc__count_add(&engine->count.mappings, 1);
    opened->inode = generation->inode;
    opened->needs_trap = !generation->complete;
    *fd = generation->memfd;
    return PC_OK;
}

/* Under region.lock: the open waits. False: for want of memory it cannot. */
/* Its CLOSE came while it waited. */
static bool was_given_up(struct pc__client *client, uint64_t mapping_id)
{
    for (size_t i = 0; i < client->n_given_up; i++)
        if (client->given_up[i] == mapping_id) {
            client->given_up[i] = client->given_up[--client->n_given_up];
            return true;
        }
    return false;
}

static int note_given_up(struct pc__client *client, uint64_t mapping_id)
{
    if (client->n_given_up == client->given_up_capacity) {
        size_t capacity = client->given_up_capacity ? client->given_up_capacity * 2 : 8;
        uint64_t *grown = realloc(client->given_up, capacity * sizeof *grown);
        if (!grown)
            return pc__fail(PC_ERR_NO_MEMORY, "a mapping that was given up");
        client->given_up = grown;
        client->given_up_capacity = capacity;
    }
    client->given_up[client->n_given_up++] = mapping_id;
    return PC_OK;
}

static bool wait_for(struct pc__client *client, struct pc__region *region, uint32_t request_id,
                     const struct pc__ctl_open *open, bool attach)
{
    struct pc__pending *pending = calloc(1, sizeof *pending);
    if (!pending)
        return false;
    *pending = (struct pc__pending){.loop = client->loop,
                                    .client_id = client->id,
                                    .request_id = request_id,
                                    .attach = attach,
                                    .question = region->published_questions + 1,
                                    .open = *open};
    pc__link_push(&region->pending, &pending->link);
    client->n_opening++;
    return true;
}

/* Under region.lock: whether the question is to be put; it is not if it is out. */
static bool to_ask(struct pc__region *region, const struct pc__ask *ask)
{
    bool *out = ask->kind == PC_EVENT_NEED_REGION      ? &region->asked_region
                : ask->kind == PC_EVENT_NEED_CHANGES   ? &region->asked_changes
                : ask->kind == PC_EVENT_NEED_PUBLISHED ? &region->asked_published
                                                       : NULL;
    bool put = out && !*out;
    if (put)
        *out = true;
    if (put && ask->kind == PC_EVENT_NEED_PUBLISHED)
        region->published_questions++;
    return put;
}

/* Whether the client reads what it is told. One that is stopped, or gets no time, would have its
 * socket filled, and be given up, by advice that it can do without. */
static bool listens(const struct pc__client *client)
{
    int unread_bytes = 0;
    return !ioctl(client->fd, SIOCOUTQ, &unread_bytes) && unread_bytes < ADVICE_UNREAD_BYTES;
}

static void let_go(struct pc__loop *loop, struct pc__mail *mail)
{
    const struct pc__ctl_region body = {.region = mail->a};
    pc__each(link, &loop->clients)
    {
        struct pc__client *client = pc__of(link, struct pc__client, link);
        bool maps = false;
        for (size_t i = 0; i < client->n_mappings && !maps; i++)
            maps = client->mappings[i].region->id == mail->a && !client->mappings[i].is_private;
        if (maps && !client->closed && client->trap != PC_TRAP_SIGSEGV && listens(client))
            pc__client_send(client, PC__CTL_LET_GO, 0, PC_OK, &body, sizeof body, -1);
    }
}

static void ended(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)mail;
    pc__each(link, &loop->clients)
    {
        struct pc__client *client = pc__of(link, struct pc__client, link);
        if (!client->closed)
            pc__client_send(client, PC__CTL_ENDED, 0, PC_OK, NULL, 0, -1);
    }
}

void pc__clients_ended(struct pc_engine *engine)
{
    for (int i = 0; i < engine->n_loops; i++) {
        const struct pc__mail mail = {.run = ended};
        /* For want of memory: they ask the registry when nobody answers. */
        (void)pc__loop_post(&engine->loops[i], &mail);
    }
}

void pc__clients_let_go(struct pc_engine *engine, uint64_t region)
{
    for (int i = 0; i < engine->n_loops; i++) {
        const struct pc__mail mail = {.run = let_go, .a = region};
        /* For want of memory: they close it by themselves in a moment. */
        (void)pc__loop_post(&engine->loops[i], &mail);
    }
}

static void put_question(struct pc_engine *engine, uint64_t region, const struct pc__ask *ask)
{
    /* Somebody wants a newer version: by the time of the answer they have closed the older ones. */
    if (ask->kind != PC_EVENT_NEED_REGION)
        pc__clients_let_go(engine, region);
    const struct pc_event event = {.kind = (int)ask->kind,
                                   .region = region,
                                   .from_version = ask->from_version,
                                   .version = ask->version};
    if (pc__engine_ask(engine, &event))
        return;
    if (ask->kind == PC_EVENT_NEED_REGION)
        (void)pc_engine_refuse_region(engine, region, PC_ERR_NO_MEMORY);
    else if (ask->kind == PC_EVENT_NEED_PUBLISHED)
        (void)pc_engine_caught_up(engine, region, PC_ERR_NO_MEMORY);
    else
        (void)pc_engine_set_changes(engine, region, ask->from_version, ask->version, NULL, 0,
                                    PC_ERR_NO_MEMORY);
}

/* False: the region left the table between the look-up and the lock: it is a new one now. */
static bool finish_open(struct pc__client *client, struct pc__region *region, uint32_t request_id,
                        const struct pc__ctl_open *open, bool attach, bool caught_up)
{
    struct pc_engine *engine = client->loop->engine;
    struct pc__ctl_opened opened = {0};
    struct pc__ask ask;
    int fd = -1;
    bool put = false;
    pthread_mutex_lock(&region->lock);
    if (region->forgotten) {
        pthread_mutex_unlock(&region->lock);
        return false;
    }
    int rc = open_ready(client, region, open, attach, caught_up, &opened, &fd, &ask);
    if (rc == PC__WAIT) {
        if (!wait_for(client, region, request_id, open, attach))
            rc = PC_ERR_NO_MEMORY;
        else
            put = to_ask(region, &ask);
    }
    pthread_mutex_unlock(&region->lock);
    if (put)
        put_question(engine, open->region, &ask);
    if (rc == PC__WAIT)
        return true;
    if (attach && !rc) {
        pc__count_add(&engine->count.reattached, 1);
        /* Threads that the last server left waiting ask us. */
        pc__fault_attached(client, open->address, open->length_bytes);
    }
    pc__client_send(client, PC__CTL_REPLY, request_id, rc, rc ? NULL : &opened,
                    rc ? 0 : sizeof opened, attach ? -1 : fd);
    return true;
}

void pc__client_retry_open(struct pc__loop *loop, struct pc__mail *mail)
{
    struct pc__pending *pending = mail->pointer;
    pc__each(link, &loop->clients)
    {
        struct pc__client *client = pc__of(link, struct pc__client, link);
        if (client->id != pending->client_id || client->closed)
            continue;
        if (pending->stages) {
            pc__client_staged(client, pending->request_id, pending->open.region);
            break;
        }
        client->n_opening -= client->n_opening > 0;
        const bool given_up = was_given_up(client, pending->open.mapping_id);
        if (!client->n_opening)
            client->n_given_up = 0;
        if (given_up)
            break; /* who asked has said that it does not wait, and may have asked anew since */
        struct pc__region *region = pc__region_get(loop->engine, pending->open.region);
        bool done = region && !mail->error &&
                    finish_open(client, region, pending->request_id, &pending->open,
                                pending->attach, pending->asked_published);
        if (!done)
            pc__client_send(client, PC__CTL_REPLY, pending->request_id,
                            mail->error ? mail->error : PC_ERR_NO_REGION, NULL, 0, -1);
        if (region)
            pc__region_put(loop->engine, region);
        break;
    }
    free(pending);
}

static void on_open(struct pc__client *client, const struct pc__ctl_message *message, bool attach)
{
    struct pc_engine *engine = client->loop->engine;
    struct pc__ctl_open open;
    memcpy(&open, message->body, sizeof open);
    bool done = false;
    while (!done) {
        struct pc__region *region = pc__region_get_or_add(engine, open.region);
        if (!region) {
            pc__client_reply(client, message, PC_ERR_NO_MEMORY);
            return;
        }
        done = finish_open(client, region, message->header.request_id, &open, attach, false);
        pc__region_put(engine, region);
    }
}

static int on_close(struct pc__client *client, const struct pc__ctl_message *message)
{
    struct pc__ctl_open open;
    memcpy(&open, message->body, sizeof open);
    struct pc__mapping *mapping = pc__client_mapping(client, open.mapping_id);
    if (mapping)
        drop_mapping(client, mapping);
    else if (client->n_opening)
        return note_given_up(client, open.mapping_id); /* else it would be open for ever */
    return PC_OK;
}

/* ---------------------------------------------------------- hello and end */

static void close_client(struct pc__client *client)
{
    struct pc__loop *loop = client->loop;
    if (client->closed)
        return;
    client->closed = true;
    while (client->n_mappings)
        drop_mapping(client, &client->mappings[client->n_mappings - 1]);
    pc__client_gathers_end(client);
    pc__client_abandon_all(client);
    if (client->stages)
        pc__layers_orphan(loop->engine, client->id);
    pc__watch_remove(loop, client->watch);
    pc__watch_remove(loop, client->trap_watch);
    close(client->fd);
    if (client->uffd >= 0)
        close(client->uffd);
    if (client->slots_event >= 0)
        close(client->slots_event);
    pc__windows_owner_put(client->window_owner);
    pc__count_sub(&loop->engine->count.clients, 1);
    pc__link_remove(&client->link);
    free(client->mappings);
    free(client->given_up);
    free(client);
}

static int take_control_page(struct pc__client *client, int page_fd, int event_fd)
{
    struct stat st;
    if (fstat(page_fd, &st) || st.st_size != (off_t)sizeof *client->page)
        return pc__fail(PC_ERR_PROTOCOL, "a control page of the wrong size");
    /* A client that could shrink it could kill us with SIGBUS. The server before us has sealed it
     * already, where the client comes from there; sealed seals cannot be added to. */
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    int has = fcntl(page_fd, F_GET_SEALS);
    if (has < 0 || ((has & seals) != seals && fcntl(page_fd, F_ADD_SEALS, seals)))
        return pc__fail_errno("sealing the size of a control page");
    void *page = mmap(NULL, sizeof *client->page, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd, 0);
    if (page == MAP_FAILED)
        return pc__fail_errno("mmap of a control page");
    struct ucred who = {0};
    socklen_t bytes = sizeof who;
    (void)getsockopt(client->fd, SOL_SOCKET, SO_PEERCRED, &who, &bytes);
    client->window_owner = pc__windows_owner(page, who.pid);
    if (!client->window_owner) {
        munmap(page, sizeof *client->page);
        return pc__fail(PC_ERR_NO_MEMORY, "a control page");
    }
    client->page = page;
    client->slots_event = event_fd;
    if (client->page->magic != PC__CONTROL_MAGIC)
        return pc__fail(PC_ERR_PROTOCOL, "a control page without its magic");
    if (!atomic_load(&client->page->head)) /* else it has used more, perhaps, under the last server */
        atomic_store(&client->page->limit, client->loop->engine->window_limit);
    int flags = fcntl(event_fd, F_GETFL);
    if (flags < 0 || fcntl(event_fd, F_SETFL, flags | O_NONBLOCK))
        return pc__fail_errno("F_SETFL on an eventfd");
    client->trap_watch =
        pc__watch_add(client->loop, PC__WATCH_SLOTS, event_fd, 0, client, EPOLLIN);
    return client->trap_watch ? PC_OK : PC_ERR_SYSTEM;
}

/* Takes the descriptors it uses out of fds[] (sets them to -1). Negative: close the client. */
static int on_hello(struct pc__client *client, const struct pc__ctl_message *message, int *fds,
                    int n_fds)
{
    struct pc_engine *engine = client->loop->engine;
    struct pc__ctl_hello hello, mine = {.wire_version = PC__WIRE_VERSION,
                                        .server_id = engine->server_id};
    memcpy(&hello, message->body, sizeof hello);
    memcpy(mine.library_version, engine->library_version, sizeof mine.library_version);
    int rc = PC_OK;
    if (hello.wire_version != PC__WIRE_VERSION ||
        strncmp(hello.library_version, mine.library_version, sizeof mine.library_version) != 0) {
        hello.library_version[sizeof hello.library_version - 1] = '\0';
        rc = pc__fail(PC_ERR_VERSION_MISMATCH, "it is of version %s (wire %u), this page server of %s "
                      "(wire %u)", hello.library_version, (unsigned)hello.wire_version,
                      mine.library_version, (unsigned)mine.wire_version);
    } else if ((hello.trap == PC_TRAP_UFFD_FULL || hello.trap == PC_TRAP_UFFD_USER) && n_fds == 1) {
        client->uffd = fds[0];
        fds[0] = -1;
        int flags = fcntl(client->uffd, F_GETFL);
        client->trap_watch =
            flags < 0 || fcntl(client->uffd, F_SETFL, flags | O_NONBLOCK)
                ? NULL
                : pc__watch_add(client->loop, PC__WATCH_UFFD, client->uffd, 0, client, EPOLLIN);
        rc = client->trap_watch ? PC_OK : PC_ERR_PROTOCOL;
    } else if (hello.trap == PC_TRAP_SIGSEGV && n_fds == 2) {
        rc = take_control_page(client, fds[0], fds[1]);
        if (client->slots_event >= 0)
            fds[1] = -1;
    } else {
        rc = pc__fail(PC_ERR_PROTOCOL, "a hello without its descriptors");
    }
    client->trap = (int)hello.trap;
    client->said_hello = !rc;
    pc__client_send(client, PC__CTL_REPLY, message->header.request_id, rc, &mine, sizeof mine, -1);
    return rc;
}

static int handle(struct pc__client *client, const struct pc__ctl_message *message, int *fds,
                  int n_fds)
{
    bool may_bring = message->header.type == PC__CTL_STAGE ||
                     message->header.type == PC__CTL_GATHER;
    if (message->header.type != PC__CTL_HELLO && (!client->said_hello || (n_fds && !may_bring)))
        return pc__fail(PC_ERR_PROTOCOL, "a message before hello, or with descriptors");
    switch (message->header.type) {
    case PC__CTL_HELLO:
        if (client->said_hello)
            return pc__fail(PC_ERR_PROTOCOL, "a second hello");
        return on_hello(client, message, fds, n_fds);
    case PC__CTL_CREATE:
        pc__client_create(client, message);
        return PC_OK;
    case PC__CTL_SEAL:
        pc__client_seal(client, message);
        return PC_OK;
    case PC__CTL_ABANDON:
        pc__client_abandon(client, message);
        return PC_OK;
    case PC__CTL_OPEN:
        on_open(client, message, false);
        return PC_OK;
    case PC__CTL_ATTACH:
        on_open(client, message, true);
        return PC_OK;
    case PC__CTL_CLOSE:
        return on_close(client, message);
    case PC__CTL_PREFETCH:
        pc__client_prefetch(client, message);
        return PC_OK;
    case PC__CTL_READS:
        pc__client_reads(client, message);
        return PC_OK;
    case PC__CTL_EVICTED:
        pc__client_evicted(client, message);
        return PC_OK;
    case PC__CTL_STAGE:
        pc__client_stage(client, message, fds, n_fds);
        return PC_OK;
    case PC__CTL_RESOLVE:
        pc__client_resolve(client, message);
        return PC_OK;
    case PC__CTL_GATHER:
        pc__client_gather(client, message, n_fds, fds);
        return PC_OK;
    case PC__CTL_PING:
        pc__client_reply(client, message, PC_OK);
        return PC_OK;
    default:
        return pc__fail(PC_ERR_PROTOCOL, "a message that only servers send");
    }
}

/* One packet. 1: handled; 0: none there; negative: the client is to be closed. */
static int receive(struct pc__client *client)
{
    uint8_t packet[PC__CTL_MAX_BYTES];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(PC__CTL_MAX_FDS * sizeof(int))];
    } control;
    struct iovec into = {packet, sizeof packet};
    struct msghdr header = {.msg_iov = &into,
                            .msg_iovlen = 1,
                            .msg_control = control.bytes,
                            .msg_controllen = sizeof control.bytes};
    ssize_t got = recvmsg(client->fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    int fds[PC__CTL_MAX_FDS] = {-1, -1}, n_fds = 0;
    for (struct cmsghdr *at = got > 0 ? CMSG_FIRSTHDR(&header) : NULL; at;
         at = CMSG_NXTHDR(&header, at)) {
        if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(at) + i * sizeof fd, sizeof fd);
            if (n_fds < PC__CTL_MAX_FDS)
                fds[n_fds++] = fd;
            else
                close(fd);
        }
    }
    int rc;
    struct pc__ctl_message message;
    pc__forget_message(); /* what is said of this packet is of this packet */
    if (got <= 0)
        rc = PC_ERR_CLOSED;
    else if (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
        rc = pc__fail(PC_ERR_PROTOCOL, "a packet over the limit");
    else if (!(rc = pc__ctl_parse(packet, (size_t)got, &message)))
        rc = handle(client, &message, fds, n_fds);
    for (int i = 0; i < n_fds; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    return rc ? rc : 1;
}

/* 0: the kernel does not say. */
static pid_t pid_of(int fd)
{
    struct ucred who = {0};
    socklen_t bytes = sizeof who;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &bytes) ? 0 : who.pid;
}

void pc__client_event(struct pc__loop *loop, struct pc__client *client, uint32_t events)
{
    (void)events;
    for (int i = 0; i < PACKETS_PER_EVENT; i++) {
        int rc = receive(client);
        if (rc == 0)
            return;
        if (rc < 0) {
            if (rc != PC_ERR_CLOSED) {
                const char *cause = pc_last_message();
                pc__count_add(&loop->engine->count.bad_messages, 1);
                pc__engine_event(loop->engine, PC_EVENT_LOG, rc, 0, 0,
                                 "closed a local connection of process %d: %s%s%s",
                                 (int)pid_of(client->fd), pc_strerror(rc), *cause ? ": " : "", cause);
            }
            close_client(client);
            return;
        }
    }
}

static void add_client(struct pc__loop *loop, struct pc__mail *mail)
{
    struct pc__client *client = loop->stopping ? NULL : calloc(1, sizeof *client);
    if (client) {
        *client = (struct pc__client){.loop = loop,
                                      .id = mail->a,
                                      .fd = mail->fd,
                                      .uffd = -1,
                                      .slots_event = -1,
                                      .hello_by_ns = pc__now_ns() + HELLO_TIMEOUT_NS};
        pc__link_init(&client->gathers);
        pc__link_init(&client->areas);
        client->watch = pc__watch_add(loop, PC__WATCH_CLIENT, mail->fd, 0, client, EPOLLIN);
    }
    if (!client || !client->watch) {
        free(client);
        close(mail->fd);
        return;
    }
    pc__link_push(&loop->clients, &client->link);
    pc__count_add(&loop->engine->count.clients, 1);
}

/* Who asks stays in the backlog, which epoll would report again and again: look away meanwhile. */
static void pause_accepting(struct pc__loop *loop, int error)
{
    pc__watch_change(loop, loop->listen_watch, 0);
    loop->accept_again_ns = pc__now_ns() + ACCEPT_PAUSE_NS;
    if (!loop->accept_fails)
        pc__engine_event(loop->engine, PC_EVENT_LOG, PC_ERR_DESCRIPTORS, 0, 0,
                         "cannot accept local connections for now: %s", strerror(error));
    loop->accept_fails = true;
}

void pc__client_accept(struct pc__loop *loop, int listen_fd)
{
    struct pc_engine *engine = loop->engine;
    int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
            pause_accepting(loop, errno);
        return;
    }
    loop->accept_fails = false;
    struct ucred who;
    socklen_t bytes = sizeof who;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &bytes) || who.uid != geteuid()) {
        pc__count_add(&engine->count.bad_messages, 1);
        pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_DENIED, 0, 0,
                         "refused a local connection of user %u", (unsigned)who.uid);
        close(fd);
        return;
    }
    pthread_mutex_lock(&engine->lock);
    struct pc__mail mail = {.run = add_client, .a = ++engine->next_client_id, .fd = fd};
    struct pc__loop *to = &engine->loops[engine->next_loop++ % (unsigned)engine->n_loops];
    pthread_mutex_unlock(&engine->lock);
    if (to == loop)
        add_client(loop, &mail);
    else if (pc__loop_post(to, &mail))
        close(fd);
}

uint64_t pc__clients_deadline(struct pc__loop *loop)
{
    uint64_t earliest = loop->accept_again_ns ? loop->accept_again_ns : UINT64_MAX;
    pc__each(link, &loop->clients)
    {
        struct pc__client *client = pc__of(link, struct pc__client, link);
        if (!client->said_hello && client->hello_by_ns < earliest)
            earliest = client->hello_by_ns;
        if (client->stray_by_ns && client->stray_by_ns < earliest)
            earliest = client->stray_by_ns;
        if (client->areas_by_ns && client->areas_by_ns < earliest)
            earliest = client->areas_by_ns;
    }
    return earliest;
}

void pc__clients_check(struct pc__loop *loop, uint64_t now_ns)
{
    if (loop->accept_again_ns && loop->accept_again_ns <= now_ns) {
        loop->accept_again_ns = 0;
        pc__watch_change(loop, loop->listen_watch, EPOLLIN);
    }
    pc__each(link, &loop->clients)
    {
        struct pc__client *client = pc__of(link, struct pc__client, link);
        pc__fault_check_stray(client, now_ns);
        pc__client_check_areas(client, now_ns);
        if (client->said_hello || client->hello_by_ns > now_ns)
            continue;
        pc__count_add(&loop->engine->count.bad_messages, 1);
        pc__engine_event(loop->engine, PC_EVENT_LOG, PC_ERR_TIMEOUT, 0, 0,
                         "closed a local connection that never said hello");
        close_client(client);
    }
}

void pc__clients_close(struct pc__loop *loop)
{
    while (!pc__link_empty(&loop->clients))
        close_client(pc__of(loop->clients.next, struct pc__client, link));
}

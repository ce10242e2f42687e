/* fake_server.h - a small page server for the client's tests: one process, one thread, a known
 * pattern for bytes, and faults of its own on request. It shares its memfds with the test, as
 * servers share them through the keeper. */
#ifndef PC_TESTS_FAKE_SERVER_H
#define PC_TESTS_FAKE_SERVER_H

#include "common/wire.h"
#include "os/file_id.h"
#include "pagecache.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define FAKE_REGIONS 8
#define FAKE_CLIENTS 4
#define FAKE_MAPPINGS 4096

struct fake_region {
    uint64_t id, version, base, length;
    int memfd;
    bool needs_trap, is_made;
    uint32_t page_blocks; /* filled around a fault */
    uint64_t content;     /* whose pattern it has; 0: its id's */
};

/* Shared with the test (MAP_SHARED): what the server is to do, and what it did. */
struct fake {
    char name[64];
    struct fake_region regions[FAKE_REGIONS];
    /* Orders. */
    _Atomic int stall_hello, stall_open, stall_prefetch, stall_faults, die_at_fault, fail_faults;
    _Atomic int lie_inode, lie_length, lie_no_fd, garbage_reply, refuse_attach, lie_slot;
    _Atomic int other_version, die_at_prefetch, die_at_open, open_delay_ms, late_open_ms;
    _Atomic int refuse_seal, die_at_seal, die_after_seal, seal_delay_ms, refuse_stage, die_at_stage;
    _Atomic uint64_t staged_at; /* 0: 0x77 */
    _Atomic int stall_last_words, many_fails;
    _Atomic int stall_stage, absent_at_home, end_session, end_at_fault;
    /* Deeds. */
    _Atomic int hellos, opens, attaches, closes, faults, prefetches, prefetched_runs, reports;
    _Atomic int reported_runs, live_mappings, pings, creates, seals, abandons, stages, resolves;
    _Atomic int made_state; /* of the region that is made: enum fake_made */
    _Atomic int last_words;
    struct pc__ctl_last_words words; /* the last of them */
    _Atomic uint64_t resolved_commit, resolved_region, resolved_version;
    /* The last layer: a copy of the file, its seals, and what the parser says. */
    int layer_memfd;
    _Atomic int layer_seals, layer_parsed;
    _Atomic uint64_t layer_bytes, layer_commit, layer_region;
};

enum fake_made { FAKE_ABSENT, FAKE_CREATED, FAKE_SEALED };

struct fake_client {
    int fd, uffd, event_fd;
    struct pc__control_page *page;
    struct pc__ctl_open mappings[FAKE_MAPPINGS];
    size_t n_mappings;
};

static inline uint64_t pattern(uint64_t region, uint64_t word)
{
    return (region << 48 | word) * 0x9e3779b97f4a7c15ull | 1; /* never 0 */
}

static inline bool fake_has(const struct fake_region *region, uint64_t block)
{
    off_t at = (off_t)(block << PC_BLOCK_SHIFT);
    return lseek(region->memfd, at, SEEK_DATA) == at;
}

/* As servers insert: one page, whole, whatever pages the machine makes of what is written. False: the
 * kernel has no userfaultfd for us. */
static inline bool fake_insert(const struct fake_region *region, uint64_t block, const void *words)
{
    struct uffdio_api api = {.api = UFFD_API};
    const int user_mode_only = 1; /* UFFD_USER_MODE_ONLY */
    int uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | user_mode_only);
    if (uffd < 0)
        return false;
    void *map = ioctl(uffd, UFFDIO_API, &api)
                    ? MAP_FAILED
                    : mmap(NULL, PC_BLOCK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
                           region->memfd, (off_t)(block << PC_BLOCK_SHIFT));
    struct uffdio_register range = {
        .range = {.start = (uint64_t)(uintptr_t)map, .len = PC_BLOCK_BYTES},
        .mode = UFFDIO_REGISTER_MODE_MISSING};
    struct uffdio_copy copy = {.dst = (uint64_t)(uintptr_t)map,
                               .src = (uint64_t)(uintptr_t)words,
                               .len = PC_BLOCK_BYTES};
    bool is_in = map != MAP_FAILED && !ioctl(uffd, UFFDIO_REGISTER, &range) &&
                 (!ioctl(uffd, UFFDIO_COPY, &copy) || errno == EEXIST);
    if (map != MAP_FAILED)
        munmap(map, PC_BLOCK_BYTES);
    close(uffd);
    return is_in;
}

static inline void fake_fill(const struct fake_region *region, uint64_t block)
{
    uint64_t words[512];
    if (fake_has(region, block))
        return;
    for (uint64_t i = 0; i < 512; i++)
        words[i] = pattern(region->content ? region->content : region->id, block * 512 + i);
    if (fake_insert(region, block, words))
        return;
    if (pwrite(region->memfd, words, sizeof words, (off_t)(block << PC_BLOCK_SHIFT)) !=
        (ssize_t)sizeof words)
        _exit(3);
}

static inline void fake_send(struct fake_client *client, uint16_t type, uint32_t request_id,
                             int32_t status, const void *body, size_t body_bytes, int fd)
{
    struct pc__ctl_header packet = {.body_bytes = (uint32_t)body_bytes, .type = type,
                                    .request_id = request_id, .status = status};
    struct iovec from[2] = {{&packet, sizeof packet}, {(void *)(uintptr_t)body, body_bytes}};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    struct msghdr header = {.msg_iov = from, .msg_iovlen = 2};
    if (fd >= 0) {
        header.msg_control = control.bytes;
        header.msg_controllen = sizeof control.bytes;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    (void)!sendmsg(client->fd, &header, MSG_NOSIGNAL);
}

/* Of that version; of any, if it is 0. */
static inline struct fake_region *fake_region(struct fake *fake, uint64_t id, uint64_t version)
{
    for (size_t i = 0; i < FAKE_REGIONS; i++) {
        struct fake_region *region = &fake->regions[i];
        if (region->id == id && id != 0 && (version == 0 || region->version == version))
            return region;
    }
    return NULL;
}

static inline struct pc__ctl_open *fake_mapping(struct fake_client *client, uint64_t id,
                                                uint64_t address)
{
    for (size_t i = 0; i < client->n_mappings; i++) {
        struct pc__ctl_open *open = &client->mappings[i];
        if (id ? open->mapping_id == id
               : address >= open->address && address < open->address + open->length_bytes)
            return open;
    }
    return NULL;
}

static inline void fake_wake(struct fake_client *client, uint64_t address, uint64_t length)
{
    struct uffdio_range range = {.start = address, .len = length};
    if (client->uffd >= 0)
        (void)ioctl(client->uffd, UFFDIO_WAKE, &range);
}

/* Fills the page around; says which range of the mapping is resident now. False: no answer. */
static inline bool fake_fault(struct fake *fake, struct fake_client *client, uint64_t address,
                              uint64_t *first, uint64_t *n_bytes)
{
    struct pc__ctl_open *open = fake_mapping(client, 0, address);
    if (!open)
        return false; /* not attached (yet): ATTACH wakes it */
    fake->faults++;
    if (fake->die_at_fault && --fake->die_at_fault == 0)
        _exit(0);
    if (fake->end_at_fault)
        fake->end_session = 1;
    if (fake->stall_faults || fake->end_session)
        return false;
    struct fake_region *region = fake_region(fake, open->region, open->version);
    uint64_t block = (address - open->address) >> PC_BLOCK_SHIFT;
    if (fake->fail_faults) {
        struct pc__ctl_fail fail = {.region = region->id, .version = region->version,
                                    .block = block, .server_id = 0x77,
                                    .error = PC_ERR_HOME_LOST, .cause = "the fake says so"};
        for (int i = 0; i <= fake->many_fails; i++)
            fake_send(client, PC__CTL_FAIL, 0, 0, &fail, sizeof fail, -1);
        return false;
    }
    uint64_t begin = block / region->page_blocks * region->page_blocks;
    uint64_t end = begin + region->page_blocks, n_blocks = region->length >> PC_BLOCK_SHIFT;
    end = end < n_blocks ? end : n_blocks;
    for (uint64_t at = begin; at < end; at++)
        fake_fill(region, at);
    *first = open->address + (begin << PC_BLOCK_SHIFT);
    *n_bytes = (end - begin) << PC_BLOCK_SHIFT;
    return true;
}

static inline void fake_read_uffd(struct fake *fake, struct fake_client *client)
{
    struct uffd_msg message;
    uint64_t first, n_bytes;
    while (read(client->uffd, &message, sizeof message) == (ssize_t)sizeof message)
        if (message.event == UFFD_EVENT_PAGEFAULT &&
            fake_fault(fake, client, message.arg.pagefault.address, &first, &n_bytes))
            fake_wake(client, first, n_bytes);
}

static inline void fake_read_slots(struct fake *fake, struct fake_client *client, bool all)
{
    uint64_t count;
    (void)!read(client->event_fd, &count, sizeof count);
    for (size_t i = 0; i < PC__SLOTS; i++) {
        struct pc__slot *slot = &client->page->slots[i];
        uint32_t state = slot->state;
        if (state != PC__SLOT_REQUESTED && !(all && state == PC__SLOT_SERVING))
            continue;
        slot->state = PC__SLOT_SERVING;
        slot->status = 0;
        if (!fake_fault(fake, client, slot->address, &slot->first_address, &slot->n_bytes))
            continue;
        if (fake->lie_slot)
            slot->first_address += 1u << 30;
        slot->state = PC__SLOT_DONE;
        (void)syscall(SYS_futex, &slot->state, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

static inline void fake_hello(struct fake *fake, struct fake_client *client,
                              const struct pc__ctl_message *message, const int *fds, int n_fds)
{
    struct pc__ctl_hello hello;
    memcpy(&hello, message->body, sizeof hello);
    fake->hellos++;
    if (n_fds == 1) {
        client->uffd = fds[0];
    } else if (n_fds == 2) {
        client->event_fd = fds[1];
        client->page = mmap(NULL, sizeof *client->page, PROT_READ | PROT_WRITE, MAP_SHARED,
                            fds[0], 0);
        if (client->page == MAP_FAILED || client->page->magic != PC__CONTROL_MAGIC)
            _exit(4);
    }
    hello.trap = 0;
    hello.sender_id = 0x77;
    if (fake->other_version)
        strcpy(hello.library_version, "9.9.9");
    if (!fake->stall_hello)
        fake_send(client, PC__CTL_REPLY, message->header.request_id,
                  fake->other_version ? PC_ERR_VERSION_MISMATCH : 0, &hello, sizeof hello, -1);
}

static inline void fake_open(struct fake *fake, struct fake_client *client,
                             const struct pc__ctl_message *message, bool attach)
{
    struct pc__ctl_open open;
    memcpy(&open, message->body, sizeof open);
    uint32_t id = message->header.request_id;
    struct fake_region *region = fake_region(fake, open.region, open.version);
    struct stat st;
    *(attach ? &fake->attaches : &fake->opens) += 1;
    if (!attach && fake->die_at_open)
        _exit(0);
    if (!attach && fake->stall_open)
        return;
    if (!attach && fake->open_delay_ms)
        usleep((useconds_t)fake->open_delay_ms * 1000);
    if (fake->garbage_reply) {
        (void)!send(client->fd, "nonsense", 8, MSG_NOSIGNAL);
        fake->garbage_reply = 0;
        return;
    }
    if (region && region->is_made && fake->made_state != FAKE_SEALED)
        region = NULL;
    if (!region || fstat(region->memfd, &st)) {
        fake_send(client, PC__CTL_REPLY, id, PC_ERR_NO_REGION, NULL, 0, -1);
        return;
    }
    if (attach && (fake->refuse_attach || open.inode != pc__file_id(&st))) {
        fake_send(client, PC__CTL_REPLY, id, PC_ERR_NO_GENERATION, NULL, 0, -1);
        return;
    }
    client->mappings[client->n_mappings++] = open;
    fake->live_mappings++;
    if (attach) {
        fake_wake(client, open.address, open.length_bytes);
        if (client->page)
            fake_read_slots(fake, client, true);
        fake_send(client, PC__CTL_REPLY, id, 0, NULL, 0, -1);
        return;
    }
    struct pc__ctl_opened opened = {.inode = pc__file_id(&st) + (fake->lie_inode ? 1 : 0),
                                    .needs_trap = region->needs_trap || fake->absent_at_home};
    int fd = region->memfd, other = -1;
    if (fake->lie_length) {
        fd = other = memfd_create("short", MFD_CLOEXEC);
        if (fstat(fd, &st))
            _exit(5);
        opened.inode = pc__file_id(&st);
    }
    fake_send(client, PC__CTL_REPLY, id, 0, &opened, sizeof opened, fake->lie_no_fd ? -1 : fd);
    if (other >= 0)
        close(other);
}

static inline void fake_runs(struct fake *fake, struct fake_client *client,
                             const struct pc__ctl_message *message)
{
    static struct pc_run runs[PC__CTL_MAX_RUNS];
    struct pc__ctl_runs head;
    int n = pc__ctl_parse_runs(message, &head, runs, PC__CTL_MAX_RUNS);
    if (n < 0)
        _exit(6);
    if (message->header.type == PC__CTL_READS) {
        fake->reports++;
        fake->reported_runs += n;
        return;
    }
    fake->prefetches++;
    fake->prefetched_runs += n;
    if (fake->die_at_prefetch && --fake->die_at_prefetch == 0)
        _exit(0);
    if (fake->stall_prefetch)
        return;
    struct pc__ctl_open *open = fake_mapping(client, head.mapping_id, 0);
    struct fake_region *region = open ? fake_region(fake, open->region, open->version) : NULL;
    for (int i = 0; i < n && region; i++)
        for (uint64_t k = 0; k < runs[i].n_blocks; k++)
            fake_fill(region, runs[i].first_block + k);
    fake_send(client, PC__CTL_REPLY, message->header.request_id, region ? 0 : PC_ERR_NO_REGION,
              NULL, 0, -1);
}

static inline void fake_close(struct fake *fake, struct fake_client *client,
                              const struct pc__ctl_message *message)
{
    struct pc__ctl_open open;
    memcpy(&open, message->body, sizeof open);
    fake->closes++;
    struct pc__ctl_open *mapping = fake_mapping(client, open.mapping_id, 0);
    if (mapping) {
        *mapping = client->mappings[--client->n_mappings];
        fake->live_mappings--;
    }
}

/* One region at a time is made; a server that restarts has forgotten what was not sealed. */
static inline void fake_create(struct fake *fake, struct fake_client *client,
                               const struct pc__ctl_message *message)
{
    struct pc__ctl_region body;
    memcpy(&body, message->body, sizeof body);
    struct fake_region *region = fake_region(fake, body.region, 0);
    int status = region ? 0 : PC_ERR_NO_REGION, fd = -1;
    switch (message->header.type) {
    case PC__CTL_CREATE:
        fake->creates++;
        if (region && region->length != body.length_bytes)
            status = PC_ERR_NO_REGION;
        if (!status) {
            fd = region->memfd;
            fake->made_state = FAKE_CREATED;
        }
        break;
    case PC__CTL_SEAL:
        fake->seals++;
        if (fake->die_at_seal && --fake->die_at_seal == 0)
            _exit(0);
        if (fake->refuse_seal)
            status = fake->refuse_seal;
        else if (fake->made_state != FAKE_CREATED)
            status = PC_ERR_NO_REGION;
        if (!status)
            fake->made_state = FAKE_SEALED;
        if (fake->die_after_seal && --fake->die_after_seal == 0)
            _exit(0);
        usleep((useconds_t)fake->seal_delay_ms * 1000);
        break;
    default:
        fake->abandons++;
        if (fake->made_state == FAKE_CREATED)
            fake->made_state = FAKE_ABSENT;
    }
    fake_send(client, PC__CTL_REPLY, message->header.request_id, status, NULL, 0, fd);
}

static inline void fake_stage(struct fake *fake, struct fake_client *client,
                              const struct pc__ctl_message *message, const int *fds, int n_fds)
{
    struct pc__ctl_stage stage;
    struct pc__layer_head head;
    const struct pc_run *runs;
    struct stat st;
    memcpy(&stage, message->body, sizeof stage);
    if (message->header.type == PC__CTL_RESOLVE) {
        fake->resolved_commit = stage.commit_id;
        fake->resolved_region = stage.region;
        fake->resolved_version = stage.version;
        fake->resolves++;
        return;
    }
    fake->stages++;
    if (n_fds != 1 || fstat(fds[0], &st) || (uint64_t)st.st_size != stage.layer_bytes)
        _exit(9);
    if (fake->die_at_stage && --fake->die_at_stage == 0)
        _exit(0);
    void *bytes = mmap(NULL, stage.layer_bytes, PROT_READ, MAP_SHARED, fds[0], 0);
    if (bytes == MAP_FAILED || ftruncate(fake->layer_memfd, st.st_size))
        _exit(9);
    fake->layer_parsed = pc__layer_parse(bytes, stage.layer_bytes, stage.layer_bytes, 0, &head,
                                         &runs);
    for (uint64_t done = 0; done < stage.layer_bytes;) {
        ssize_t n = pwrite(fake->layer_memfd, (char *)bytes + done, stage.layer_bytes - done,
                           (off_t)done);
        if (n <= 0)
            _exit(9);
        done += (uint64_t)n;
    }
    munmap(bytes, stage.layer_bytes);
    fake->layer_seals = fcntl(fds[0], F_GET_SEALS);
    fake->layer_bytes = stage.layer_bytes;
    fake->layer_commit = stage.commit_id;
    fake->layer_region = stage.region;
    close(fds[0]);
    const struct pc__ctl_staged staged = {fake->staged_at ? fake->staged_at : 0x77};
    if (!fake->stall_stage)
        fake_send(client, PC__CTL_REPLY, message->header.request_id, fake->refuse_stage, &staged,
                  fake->refuse_stage ? 0 : sizeof staged, -1);
}

/* False: the client left. */
static inline bool fake_receive(struct fake *fake, struct fake_client *client)
{
    static unsigned char bytes[PC__CTL_MAX_BYTES];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct iovec into = {bytes, sizeof bytes};
    struct msghdr header = {.msg_iov = &into, .msg_iovlen = 1, .msg_control = control.bytes,
                            .msg_controllen = sizeof control.bytes};
    ssize_t got = recvmsg(client->fd, &header, MSG_CMSG_CLOEXEC);
    if (got <= 0)
        return false;
    int fds[2] = {-1, -1}, n_fds = 0;
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    if (rights) {
        n_fds = (int)((rights->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds, CMSG_DATA(rights), (size_t)n_fds * sizeof(int));
    }
    struct pc__ctl_message message;
    if (pc__ctl_parse(bytes, (size_t)got, &message))
        _exit(7); /* the client sent nonsense */
    switch (message.header.type) {
    case PC__CTL_HELLO: fake_hello(fake, client, &message, fds, n_fds); break;
    case PC__CTL_OPEN: fake_open(fake, client, &message, false); break;
    case PC__CTL_ATTACH: fake_open(fake, client, &message, true); break;
    case PC__CTL_CLOSE: fake_close(fake, client, &message); break;
    case PC__CTL_PREFETCH:
    case PC__CTL_READS: fake_runs(fake, client, &message); break;
    case PC__CTL_STAGE:
    case PC__CTL_RESOLVE: fake_stage(fake, client, &message, fds, n_fds); break;
    case PC__CTL_ATTACHED: break;
    case PC__CTL_LEFT: fake_send(client, PC__CTL_REPLY, message.header.request_id, 0, NULL, 0, -1); break;
    case PC__CTL_LAST_WORDS:
        memcpy(&fake->words, message.body, sizeof fake->words);
        fake->last_words++;
        if (!fake->stall_last_words)
            fake_send(client, PC__CTL_REPLY, message.header.request_id, 0, NULL, 0, -1);
        break;
    case PC__CTL_PING:
        fake->pings++;
        fake_send(client, PC__CTL_REPLY, message.header.request_id, 0, NULL, 0, -1);
        break;
    default: fake_create(fake, client, &message); break;
    }
    return true;
}

static inline void fake_drop(struct fake *fake, struct fake_client *client)
{
    fake->live_mappings -= (int)client->n_mappings;
    close(client->fd);
    if (client->uffd >= 0)
        close(client->uffd);
    client->fd = -1;
}

/* Serves until it dies. ready is written to once it listens; go, if not -1, is waited for. */
static inline _Noreturn void fake_serve(struct fake *fake, int ready, int go, pid_t parent)
{
    static struct fake_client clients[FAKE_CLIENTS];
    char byte = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(0); /* it died before we asked to be told */
    if (go >= 0 && read(go, &byte, 1) != 1)
        _exit(0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, fake->name, strlen(fake->name));
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
                                   strlen(fake->name));
    while (bind(listener, (struct sockaddr *)&address, length)) {
        if (errno != EADDRINUSE)
            _exit(8);
        usleep(1000); /* the one before us is still dying */
    }
    if (listen(listener, 16))
        _exit(8);
    for (size_t i = 0; i < FAKE_CLIENTS; i++)
        clients[i].fd = -1;
    if (fake->made_state == FAKE_CREATED)
        fake->made_state = FAKE_ABSENT;
    (void)!write(ready, &byte, 1);
    for (;;) {
        struct pollfd fds[1 + 2 * FAKE_CLIENTS] = {{.fd = listener, .events = POLLIN}};
        for (size_t i = 0; i < FAKE_CLIENTS; i++) {
            struct fake_client *client = &clients[i];
            int trap = client->fd < 0 ? -1 : client->uffd >= 0 ? client->uffd : client->event_fd;
            fds[1 + 2 * i] = (struct pollfd){.fd = client->fd, .events = POLLIN};
            fds[2 + 2 * i] = (struct pollfd){.fd = trap, .events = POLLIN};
        }
        int n_ready = poll(fds, 1 + 2 * FAKE_CLIENTS, 20);
        for (size_t i = 0; i < FAKE_CLIENTS && fake->end_session; i++)
            if (clients[i].fd >= 0)
                fake_send(&clients[i], PC__CTL_ENDED, 0, 0, NULL, 0, -1);
        if (fake->end_session)
            _exit(0);
        if (n_ready < 0)
            continue;
        for (size_t i = 0; i < FAKE_CLIENTS; i++) {
            struct fake_client *client = &clients[i];
            if (fds[1 + 2 * i].revents && !fake_receive(fake, client)) {
                fake_drop(fake, client);
                continue;
            }
            if (fds[2 + 2 * i].revents & POLLIN) {
                if (client->uffd >= 0)
                    fake_read_uffd(fake, client);
                else
                    fake_read_slots(fake, client, false);
            }
        }
        for (size_t i = 0; i < FAKE_CLIENTS && fds[0].revents; i++)
            if (clients[i].fd < 0) {
                memset(&clients[i], 0, sizeof clients[i]);
                clients[i].uffd = clients[i].event_fd = -1;
                clients[i].fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
                break;
            }
    }
}

#endif

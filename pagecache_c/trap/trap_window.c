/* trap_window.c - the SIGSEGV trap in ordinary code: control page, arming, opening what a
 * prefetch brought. The handler is in trap_sigsegv.c. Also: the choice among the traps.
 *
 * Threads: any. Locks: none of its own; the window's runs are taken as the handler takes them.
 */
#include "common/error.h"
#include "trap/trap.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define LOOK_BYTES (8ull << 20) /* looked at with one mincore() */
#define LIMITED_BYTES (256ull << 10)
#define LOOK_BLOCKS (LOOK_BYTES / PC_BLOCK_BYTES)

static void *pointer(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

static int fail_protect(uint64_t address, uint64_t n_bytes)
{
    return pc__fail_errno("mprotect of %#llx, %llu bytes (ENOMEM: see vm.max_map_count)",
                          (unsigned long long)address, (unsigned long long)n_bytes);
}

static int hello_fds(const struct pc__trap *trap, int fds[PC__CTL_MAX_FDS])
{
    fds[0] = trap->control_fd;
    fds[1] = trap->sig->event_fd;
    return 2;
}

static int arm(struct pc__trap *trap, const struct pc__trapped *mapping)
{
    (void)trap;
    if (mapping->needs_trap)
        return PC_OK; /* no access is the trap */
    if (mprotect(pointer(mapping->address), mapping->length_bytes, pc__trap_open_prot(mapping)))
        return fail_protect(mapping->address, mapping->length_bytes);
    return PC_OK;
}

/* After this no run of the window names the mapping, so that nobody protects what comes to lie
 * there later. */
static void forget(struct pc__trap *trap, const struct pc__trapped *mapping)
{
    struct pc__sig *sig = trap->sig;
    uint64_t begin = mapping->address, end = begin + mapping->length_bytes;
    if (!mapping->needs_trap)
        return;
    for (size_t i = 0; i < PC__WINDOW_RUNS; i++) {
        struct pc__window_run *run = &sig->page->window[i];
        /* A thread that holds the run either works on this mapping, which its user has just
         * given up, or is about to name something else. */
        for (unsigned tries = 0; tries < 1000; tries++) {
            uint64_t address = atomic_load(&run->address);
            if (address < begin || address >= end)
                break;
            if (atomic_exchange(&sig->busy[i], 1u)) {
                sched_yield();
                continue;
            }
            address = atomic_load(&run->address);
            if (address >= begin && address < end)
                atomic_store(&run->address, 0u);
            pc__window_done(sig, (uint32_t)i);
        }
    }
}

static int open_resident(struct pc__sig *sig, uint64_t mapping_begin, uint64_t begin, uint64_t end,
                         int prot)
{
    /* Where the number of runs is limited, so is what one holds: to what a fault opens. */
    uint64_t most = atomic_load(&sig->page->limit) ? LIMITED_BYTES : LOOK_BYTES;
    unsigned char resident[LOOK_BLOCKS];
    while (begin < end) {
        uint64_t n_bytes = end - begin < most ? end - begin : most;
        size_t n = (size_t)(n_bytes / PC_BLOCK_BYTES), first = 0;
        uint32_t run = pc__window_take(sig, begin, n_bytes);
        uint64_t evicting = atomic_load(&sig->page->evicting); /* in this order; see wire.h */
        int rc = mincore(pointer(begin), n_bytes, resident)
                     ? pc__fail_errno("mincore of %#llx", (unsigned long long)begin)
                     : PC_OK;
        if (!rc)
            pc__window_hide(evicting, mapping_begin, begin, resident, n);
        while (!rc && first < n && !(resident[first] & 1))
            first++;
        size_t past = first;
        while (!rc && past < n && resident[past] & 1)
            past++;
        uint64_t address = begin + first * PC_BLOCK_BYTES;
        uint64_t length = (past - first) * PC_BLOCK_BYTES;
        if (!rc && length) {
            pc__window_narrow(sig, run, address, length);
            if (mprotect(pointer(address), length, prot))
                rc = fail_protect(address, length);
        }
        if (rc || !length)
            atomic_store(&sig->page->window[run].address, 0u);
        pc__window_done(sig, run);
        if (rc)
            return rc;
        begin += past * PC_BLOCK_BYTES;
    }
    return PC_OK;
}

static int opened(struct pc__trap *trap, const struct pc__trapped *mapping,
                  const struct pc_run *runs, size_t n_runs)
{
    if (!mapping->needs_trap)
        return PC_OK;
    for (size_t i = 0; i < n_runs; i++) {
        uint64_t begin = mapping->address + (runs[i].first_block << PC_BLOCK_SHIFT);
        uint64_t end = begin + (runs[i].n_blocks << PC_BLOCK_SHIFT);
        int rc = open_resident(trap->sig, mapping->address, begin, end, pc__trap_open_prot(mapping));
        if (rc)
            return rc;
    }
    return PC_OK;
}

/* Exact: one block is opened a fault, and fault-around does not leave what is opened; so nothing
 * may be open at the start. Runs of the window that name it still only protect it once more. */
static int reads_begin(struct pc__trap *trap, const struct pc__trapped *mapping)
{
    (void)trap;
    if (mapping->needs_trap && mapping->flags & PC_MAP_EXACT_READS &&
        mprotect(pointer(mapping->address), mapping->length_bytes, PROT_NONE))
        return fail_protect(mapping->address, mapping->length_bytes);
    return PC_OK;
}

static void lost(struct pc__trap *trap, uint64_t since_ns)
{
    atomic_store(&trap->sig->lost_since_ns, since_ns);
}

static void wake(struct pc__trap *trap, const struct pc__trapped *mapping)
{
    (void)trap;
    (void)mapping; /* stopped threads look at the clock themselves */
}

static int stuck_fd(const struct pc__trap *trap)
{
    (void)trap;
    return -1;
}

static bool stuck_at(struct pc__trap *trap, uint64_t *address)
{
    (void)trap;
    (void)address;
    return false;
}

static void close_sigsegv(struct pc__trap *trap, bool in_child)
{
    struct pc__sig *sig = trap->sig;
    const struct timespec step = {.tv_nsec = 1000000};
    /* In a child the other threads, and so their handlers, do not exist. */
    for (unsigned i = 0; !in_child && atomic_load(&sig->inside) && i < 1000; i++)
        nanosleep(&step, NULL);
    bool is_free = in_child || !atomic_load(&sig->inside);
    close(trap->control_fd);
    close(sig->event_fd);
    if (is_free) { /* else a thread still waits in there: its memory stays */
        if (!in_child)
            atomic_store(&sig->page->over, 1u);
        munmap(sig->page, sizeof *sig->page);
        free(sig);
    }
    trap->sig = NULL;
    trap->ops = NULL;
}

static const struct pc__trap_ops ops = {
    .hello_fds = hello_fds, .arm = arm, .forget = forget, .opened = opened,
    .reads_begin = reads_begin, .lost = lost, .wake = wake, .stuck_fd = stuck_fd,
    .stuck_at = stuck_at, .close = close_sigsegv,
};

int pc__trap_open_sigsegv(uint64_t patience_ns, struct pc__trap *out)
{
    int rc;
    struct pc__control_page *page = MAP_FAILED;
    int event_fd = -1;
    int control_fd = memfd_create("clamor-control", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    struct pc__sig *sig = calloc(1, sizeof *sig);
    /* Sealed, so that neither side can take the page from under the other. */
    if (control_fd < 0 || ftruncate(control_fd, (off_t)sizeof *page) ||
        fcntl(control_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) {
        rc = pc__fail_errno("memfd of the control page");
        goto out;
    }
    page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, control_fd, 0);
    if (page == MAP_FAILED) {
        rc = pc__fail_errno("mmap of the control page");
        goto out;
    }
    event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_fd < 0) {
        rc = pc__fail_errno("eventfd");
        goto out;
    }
    if (!sig) {
        rc = pc__fail(PC_ERR_NO_MEMORY, "the SIGSEGV trap");
        goto out;
    }
    page->magic = PC__CONTROL_MAGIC;
    sig->page = page;
    sig->event_fd = event_fd;
    sig->patience_ns = patience_ns;
    out->ops = &ops;
    out->kind = PC_TRAP_SIGSEGV;
    out->uffd = -1;
    out->control_fd = control_fd;
    out->sig = sig;
    return PC_OK;
out:
    if (event_fd >= 0)
        close(event_fd);
    if (page != MAP_FAILED)
        munmap(page, sizeof *page);
    if (control_fd >= 0)
        close(control_fd);
    free(sig);
    return rc;
}

int pc__trap_open_prot(const struct pc__trapped *mapping)
{
    return mapping->flags & PC_MAP_PRIVATE ? PROT_READ | PROT_WRITE : PROT_READ;
}

int pc__trap_open(int wanted, uint64_t patience_ns, struct pc__trap *out)
{
    memset(out, 0, sizeof *out);
    out->uffd = out->control_fd = -1;
    switch (wanted) {
    case PC_TRAP_UFFD:
    case PC_TRAP_UFFD_FULL:
    case PC_TRAP_UFFD_USER:
        return pc__trap_open_uffd(wanted, out);
    case PC_TRAP_SIGSEGV:
        return pc__trap_open_sigsegv(patience_ns, out);
    case PC_TRAP_AUTO: {
        int rc = pc__trap_open_uffd(wanted, out);
        return rc == PC_ERR_NO_TRAP ? pc__trap_open_sigsegv(patience_ns, out) : rc;
    }
    default:
        return pc__fail(PC_ERR_NO_TRAP, "%d is no trap", wanted);
    }
}

/* trap_sigsegv.c - the signal path: what a thread does when it touches a block that it may not.
 *
 * Runs in a SIGSEGV handler, on the thread that faulted, at any instruction of any program. So:
 * async-signal-safe calls only, no allocation, no stdio, no mutex, errno saved and restored; an
 * nm test holds this object to a list of symbols.
 *
 * The handler is on the alternate stack where the thread has one, with SIGSEGV blocked and other
 * signals not (a stopped thread can still be interrupted). Faults that are not ours go to the
 * action that was there before. After fork the child keeps the handler; its ranges are guards
 * until the child has attached anew.
 *
 * Window: a block is readable only while a run of the window names it. Order that makes it so:
 *   open     take a run (busy), name the blocks, look what is being evicted and whether the others
 *            are resident, unprotect those, done;
 *   replace  take a run (busy), protect what it named, then name something else.
 * busy is an atomic exchange, so naming and unprotecting of one run never interleave with its
 * replacement; two runs may name one block, and then the first to go protects it too early, which
 * costs a fault and nothing else.
 *
 * Relies on: mincore() of a mapping without access shows the page cache of its file.
 */
#include "common/error.h"
#include "common/signal_log.h"
#include "trap/trap.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define OPEN_BYTES (256u << 10)           /* opened at once around a resident block, at most */
#define OPEN_BLOCKS (OPEN_BYTES / PC_BLOCK_BYTES)
#define SLOT_STEP_NS 200000000l           /* between two looks at whether the server is lost */
#define SLOT_PATIENCE_NS 600000000000ull  /* a server that is there and never answers */
#define PREVIOUS_MAX 1024u /* Ray installs its own at every ray.init() of a process */

static struct sigaction previous[PREVIOUS_MAX]; /* [n_previous - 1] is the one to chain to */
static _Atomic uint32_t n_previous;             /* published after the entry is filled */
static _Atomic uint32_t n_sent;                 /* SIGSEGVs that somebody sent */

/* Left in siginfo.si_errno, which the kernel leaves 0: how many of previous[] have had the fault. */
#define CHAIN_MARK 0x43500000

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void *pointer(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

static _Noreturn void die(const struct pc__range_view *range, uint64_t address, const char *cause)
{
    struct pc__siglog line = {.used = 0};
    pc__siglog_text(&line, "clamor: ");
    pc__siglog_block(&line, range->region, range->version,
                  (address - range->begin) >> PC_BLOCK_SHIFT);
    pc__siglog_text(&line, " (address ");
    pc__siglog_hex(&line, address);
    pc__siglog_text(&line, ") cannot be read: ");
    pc__siglog_text(&line, cause);
    pc__siglog_text(&line, "; this process ends");
    pc__siglog_and_exit(&line);
}

/* ------------------------------------------------------------------ window */

static _Noreturn void die_protecting(uint64_t address)
{
    struct pc__siglog line = {.used = 0};
    pc__siglog_text(&line, "clamor: mprotect at ");
    pc__siglog_hex(&line, address);
    pc__siglog_text(&line, " failed, errno ");
    pc__siglog_number(&line, (uint64_t)errno);
    pc__siglog_text(&line, " (12: this process has too many mappings, see vm.max_map_count); "
                        "this process ends");
    pc__siglog_and_exit(&line);
}

uint32_t pc__window_take(struct pc__sig *sig, uint64_t address, uint64_t n_bytes)
{
    uint32_t limit = atomic_load(&sig->page->limit), index, tries = 0;
    if (!limit || limit > PC__WINDOW_RUNS)
        limit = PC__WINDOW_RUNS;
    for (;;) {
        index = (uint32_t)(atomic_fetch_add(&sig->page->head, 1u) % limit);
        if (!atomic_exchange(&sig->busy[index], 1u))
            break;
        if (++tries % limit == 0)
            (void)poll(NULL, 0, 1); /* each is a stopped thread's */
    }
    struct pc__window_run *run = &sig->page->window[index];
    uint64_t old = atomic_load(&run->address);
    if (old && mprotect(pointer(old), atomic_load(&run->n_bytes), PROT_NONE))
        die_protecting(old);
    atomic_store(&run->address, 0u);
    atomic_store(&run->n_bytes, n_bytes);
    atomic_store(&run->address, address);
    return index;
}

/* After window_take: what is being evicted is taken for absent; see struct pc__control_page. */
void pc__window_hide(uint64_t evicting, uint64_t mapping_begin, uint64_t begin,
                     unsigned char *resident, size_t n)
{
    uint64_t low = mapping_begin + (evicting - 1) * PC__CHUNK_BYTES;
    for (size_t i = 0; evicting && i < n; i++) {
        uint64_t address = begin + i * PC_BLOCK_BYTES;
        if (address >= low && address - low < PC__CHUNK_BYTES)
            resident[i] = 0;
    }
}

/* A server that reads address, n_bytes and address again, and starts over if the address changed,
 * sees a run that holds the narrowed one. */
void pc__window_narrow(struct pc__sig *sig, uint32_t index, uint64_t address, uint64_t n_bytes)
{
    atomic_store(&sig->page->window[index].address, address);
    atomic_store(&sig->page->window[index].n_bytes, n_bytes);
}

void pc__window_done(struct pc__sig *sig, uint32_t index)
{
    atomic_store(&sig->busy[index], 0u);
}

/* ------------------------------------------------------------------- slots */

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    const struct timespec step = {.tv_nsec = SLOT_STEP_NS};
    (void)syscall(SYS_futex, word, FUTEX_WAIT, value, &step, NULL, 0); /* any outcome: look again */
}

static void check_patience(const struct pc__range_view *range, uint64_t address, uint64_t begun_ns)
{
    uint64_t now = now_ns(), since = atomic_load(&range->sig->lost_since_ns);
    if (atomic_load(&range->sig->ended))
        die(range, address, pc_strerror(PC_ERR_ENDED));
    if (since && now > since && now - since > range->sig->patience_ns)
        die(range, address, "the page server of this node is gone and did not come back in time");
    if (now - begun_ns > SLOT_PATIENCE_NS)
        die(range, address, "the page server of this node does not answer");
}

static struct pc__slot *claim(const struct pc__range_view *range, uint64_t address,
                              uint64_t begun_ns)
{
    for (;;) {
        for (size_t i = 0; i < PC__SLOTS; i++) {
            struct pc__slot *slot = &range->sig->page->slots[i];
            uint32_t state = PC__SLOT_FREE;
            if (atomic_compare_exchange_strong(&slot->state, &state, PC__SLOT_CLAIMED))
                return slot;
        }
        (void)poll(NULL, 0, 1); /* more threads fault than there are slots */
        check_patience(range, address, begun_ns);
    }
}

/* Asks the server; returns when the block is resident, with the run that is. */
static void ask(const struct pc__range_view *range, uint64_t address, uint64_t *first,
                uint64_t *n_bytes)
{
    uint64_t begun_ns = now_ns();
    struct pc__slot *slot = claim(range, address, begun_ns);
    slot->address = address;
    atomic_store(&slot->state, PC__SLOT_REQUESTED); /* carries the address */
    const uint64_t one = 1;
    while (write(range->sig->event_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
    uint32_t state;
    while ((state = atomic_load(&slot->state)) != PC__SLOT_DONE) { /* carries the answer */
        check_patience(range, address, begun_ns);
        futex_wait(&slot->state, state);
    }
    int32_t status = slot->status;
    *first = slot->first_address;
    *n_bytes = slot->n_bytes;
    atomic_store(&slot->state, PC__SLOT_FREE);
    if (status < 0)
        die(range, address, pc_strerror(status));
    if (*first % PC_BLOCK_BYTES || *n_bytes % PC_BLOCK_BYTES || *first > address ||
        *n_bytes > UINT64_MAX - *first || address >= *first + *n_bytes)
        die(range, address, "the page server's answer makes no sense");
}

/* ------------------------------------------------------------------- fault */

/* Narrows [*begin, *end) to what is resident around address. False: the block is absent. */
static bool resident_around(uint64_t address, uint64_t *begin, uint64_t *end,
                            const unsigned char *resident)
{
    size_t n = (size_t)((*end - *begin) / PC_BLOCK_BYTES);
    size_t at = (size_t)((address - *begin) / PC_BLOCK_BYTES);
    if (!(resident[at] & 1))
        return false;
    size_t low = at, high = at + 1;
    while (low > 0 && resident[low - 1] & 1)
        low--;
    while (high < n && resident[high] & 1)
        high++;
    *end = *begin + high * PC_BLOCK_BYTES;
    *begin += low * PC_BLOCK_BYTES;
    return true;
}

static void open_around(const struct pc__range_view *range, uint64_t address)
{
    struct pc__sig *sig = range->sig;
    uint64_t unit = range->flags & PC_MAP_EXACT_READS ? PC_BLOCK_BYTES : OPEN_BYTES;
    uint64_t begin = address & ~(unit - 1), end = begin + unit;
    if (begin < range->begin)
        begin = range->begin;
    if (end > range->end)
        end = range->end;
    uint32_t run = pc__window_take(sig, begin, end - begin);
    uint64_t evicting = atomic_load(&sig->page->evicting); /* after the run is named, before the look */
    unsigned char resident[OPEN_BLOCKS];
    if (mincore(pointer(begin), end - begin, resident)) {
        atomic_store(&sig->page->window[run].address, 0u); /* being unmapped: fault again, see */
        pc__window_done(sig, run);
        return;
    }
    pc__window_hide(evicting, range->begin, begin, resident, (end - begin) / PC_BLOCK_BYTES);
    if (!resident_around(address, &begin, &end, resident)) {
        /* The run has been in the window since before the server answers, so what the answer
         * names stays; it is not checked with mincore(), which knows no block of zeros that is a
         * hole, nor one that is swapped out. */
        uint64_t first, n_bytes;
        ask(range, address, &first, &n_bytes);
        if (begin < first)
            begin = first;
        if (end > first + n_bytes)
            end = first + n_bytes;
    }
    pc__window_narrow(sig, run, begin, end - begin);
    int prot = range->flags & PC_MAP_PRIVATE ? PROT_READ | PROT_WRITE : PROT_READ;
    if (mprotect(pointer(begin), end - begin, prot)) {
        struct pc__range_view again;
        if (pc__range_find(address, &again) && again.kind == PC__RANGE_TRAPPED)
            die_protecting(begin);
        atomic_store(&sig->page->window[run].address, 0u);
    }
    pc__window_done(sig, run);
}

enum access { ACCESS_READ, ACCESS_WRITE, ACCESS_FETCH };

#if defined(__aarch64__)
static enum access access_of(const ucontext_t *context)
{
    /* Records of { magic, size }, ended by a magic of 0; ESR's record holds the syndrome. */
    const unsigned char *at = (const unsigned char *)context->uc_mcontext.__reserved;
    const unsigned char *past = at + sizeof context->uc_mcontext.__reserved;
    while (past - at >= 16) {
        uint32_t magic, size;
        memcpy(&magic, at, sizeof magic);
        memcpy(&size, at + 4, sizeof size);
        if (magic == 0x45535201u) {
            uint64_t esr;
            memcpy(&esr, at + 8, sizeof esr);
            uint64_t class = esr >> 26 & 0x3f;
            if (class == 0x20 || class == 0x21)
                return ACCESS_FETCH;
            return esr & 1u << 6 ? ACCESS_WRITE : ACCESS_READ;
        }
        if (magic == 0 || size < 8)
            break;
        at += size;
    }
    return ACCESS_READ;
}
#elif defined(__x86_64__)
static enum access access_of(const ucontext_t *context)
{
    uint64_t error = (uint64_t)context->uc_mcontext.gregs[REG_ERR];
    return error & 16u ? ACCESS_FETCH : error & 2u ? ACCESS_WRITE : ACCESS_READ;
}
#else
#error "the SIGSEGV trap knows x86-64 and arm64"
#endif

static void take_default(int signal_number, const siginfo_t *info)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = SIG_DFL;
    sigaction(signal_number, &action, NULL);
    if (info->si_code <= 0)
        raise(signal_number); /* nobody will fault again: it was sent */
}

/* A handler that was installed over ours, and then ours over it, may hand the fault back to us,
 * by a call or by raising it again. The fault then goes one further down, never in a circle. */
static void chain(int signal_number, siginfo_t *info, void *context)
{
    uint32_t n = pc__observe(&n_previous), skip = 0;
    if (info->si_code <= 0)
        skip = atomic_fetch_add(&n_sent, 1u);
    else if ((info->si_errno & ~0xffff) == CHAIN_MARK)
        skip = (uint32_t)info->si_errno & 0xffffu;
    if (skip >= n) {
        take_default(signal_number, info);
        return;
    }
    const struct sigaction *action = &previous[n - 1 - skip];
    info->si_errno = (int)(CHAIN_MARK | (skip + 1));
    if (action->sa_flags & SA_SIGINFO && action->sa_sigaction)
        action->sa_sigaction(signal_number, info, context);
    else if (action->sa_handler == SIG_DFL ||
             (action->sa_handler == SIG_IGN && info->si_code > 0))
        take_default(signal_number, info); /* a fault cannot be ignored */
    else if (action->sa_handler != SIG_IGN)
        action->sa_handler(signal_number);
}

static _Noreturn void die_unmapped(uint64_t address, const struct pc__range_view *range)
{
    struct pc__siglog line = {.used = 0};
    pc__siglog_text(&line, "clamor: address ");
    pc__siglog_hex(&line, address);
    if (range) {
        pc__siglog_text(&line, " belongs to ");
        pc__siglog_block(&line, range->region, range->version,
                      (address - range->begin) >> PC_BLOCK_SHIFT);
        pc__siglog_text(&line, ", which this process has unmapped (");
        pc__siglog_text(&line, range->why == PC_ERR_ENDED ? "its session has ended)"
                                                       : "a freed variable)");
    } else {
        pc__siglog_text(&line, " is in clamor's window but not mapped in this process (a freed "
                            "variable, one of a session that has ended, or a child made by fork "
                            "without Python's hooks)");
    }
    pc__siglog_text(&line, "; this process ends");
    pc__siglog_and_exit(&line);
}

static void on_segv(int signal_number, siginfo_t *info, void *context)
{
    int saved = errno;
    uint64_t address = (uint64_t)(uintptr_t)info->si_addr;
    bool is_fault = info->si_code == SEGV_MAPERR || info->si_code == SEGV_ACCERR;
    bool in_window = address >= PC_WINDOW_BEGIN && address < PC_WINDOW_END;
    struct pc__range_view range;
    bool found = is_fault && pc__range_find(address, &range);
    if (found && range.kind == PC__RANGE_GUARD)
        die(&range, address, range.why == PC_ERR_FORKED
                ? "this process is a child of fork that did not attach to the page server, or the "
                  "mapping was a private copy of its parent"
                : pc_strerror(range.why));
    if (found && range.kind == PC__RANGE_TRAPPED && range.sig) {
        enum access access = access_of(context);
        if (access == ACCESS_READ || (access == ACCESS_WRITE && range.flags & PC_MAP_PRIVATE)) {
            atomic_fetch_add(&range.sig->inside, 1u);
            open_around(&range, address);
            atomic_fetch_sub(&range.sig->inside, 1u);
            errno = saved;
            return;
        }
    }
    if (in_window && info->si_code == SEGV_MAPERR && (!found || range.kind == PC__RANGE_GONE))
        die_unmapped(address, found ? &range : NULL);
    chain(signal_number, info, context);
    errno = saved;
}

/* Called under the lock of the list of clients. PC_ERR_SYSTEM: errno says why. */
int pc__sig_install(void)
{
    struct sigaction now, ours;
    if (sigaction(SIGSEGV, NULL, &now))
        return PC_ERR_SYSTEM;
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_segv)
        return PC_OK;
    uint32_t n = pc__observe(&n_previous);
    if (n == PREVIOUS_MAX)
        return PC_ERR_NO_TRAP; /* something keeps replacing it */
    previous[n] = now;
    pc__publish(&n_previous, n + 1); /* carries previous[n] */
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_segv;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGSEGV, &ours, NULL) ? PC_ERR_SYSTEM : PC_OK;
}

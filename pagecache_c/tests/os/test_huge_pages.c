/* test_huge_pages.c - where the machine makes shared memory of huge pages, nobody gets a wrong byte,
 * and ours is made of single ones.
 *
 * The setting is the whole machine's. A window changes it for some milliseconds: a process of its own
 * writes it, and writes the old one back when the test closes the window, or ends in any way. The
 * windows of all runs take turns by a lock on the setting's own file. Tried with Linux 6.18.44. */
#include "engine/store/apply.c"
#include "tests/support/commit.h"

#include <linux/userfaultfd.h>
#include <signal.h>
#include <sys/fanotify.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define HOME_OF_SETTINGS "/sys/kernel/mm/transparent_hugepage/"
#define WINDOW_MOST_MS 20000 /* then it closes by itself */
#define N_BLOCKS 24u
#define N(list) (sizeof(list) / sizeof(list)[0])

static const char *const settings[][2] = {
    {"shmem_enabled", "always"},
    {"shmem_enabled", "within_size"},
    {"shmem_enabled", "force"},
    {"hugepages-64kB/shmem_enabled", "always"},
};

/* ----------------------------------------------------------------- windows */

struct window {
    pid_t keeper;
    int until; /* closing it ends the window */
};

static void skip(const char *why)
{
    printf("skip: %s\n", why);
    exit(77);
}

/* The word in brackets. */
static bool current(int fd, char *out, size_t bytes)
{
    char text[128];
    ssize_t got = pread(fd, text, sizeof text - 1, 0);
    if (got <= 0)
        return false;
    text[got] = '\0';
    char *begin = strchr(text, '['), *end = begin ? strchr(begin, ']') : NULL;
    if (!end || (size_t)(end - begin) > bytes)
        return false;
    *end = '\0';
    strcpy(out, begin + 1);
    return true;
}

static bool put(int fd, const char *setting)
{
    return pwrite(fd, setting, strlen(setting), 0) == (ssize_t)strlen(setting);
}

/* Of its own session and deaf to signals that ask for an end: it outlives whoever opened the window. */
static void keep_window(int fd, const char *setting, int until, int ready)
{
    char before[64], answer = 0;
    static const int deaf_to[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGALRM};
    for (size_t i = 0; i < N(deaf_to); i++)
        signal(deaf_to[i], SIG_IGN);
    setsid();
    if (current(fd, before, sizeof before)) {
        answer = put(fd, setting) ? 'y' : 'n';
        if (write(ready, &answer, 1) == 1 && answer == 'y') {
            struct pollfd end = {.fd = until, .events = POLLIN};
            while (poll(&end, 1, WINDOW_MOST_MS) < 0 && errno == EINTR)
                continue;
        }
        if (!put(fd, before))
            dprintf(2, "the setting was %s: write it back\n", before);
    }
    _exit(0);
}

static struct window open_window(const char *name, const char *setting)
{
    char path[128], answer = 0;
    int until[2], ready[2];
    snprintf(path, sizeof path, HOME_OF_SETTINGS "%s", name);
    int fd = open(path, O_RDWR | O_CLOEXEC), turn = open(HOME_OF_SETTINGS "shmem_enabled", O_RDONLY);
    if (fd < 0 || turn < 0)
        skip("it may not change /sys/kernel/mm/transparent_hugepage: it takes root");
    uint64_t deadline = now_ns() + 60 * SECOND;
    while (flock(turn, LOCK_EX | LOCK_NB)) {
        if (now_ns() > deadline)
            skip("another run has the setting for more than 60 s");
        usleep(10000);
    }
    CHECK(!pipe2(until, O_CLOEXEC) && !pipe2(ready, O_CLOEXEC));
    pid_t keeper = fork(); /* it has the lock, too: that goes with the last of us */
    CHECK(keeper >= 0);
    if (!keeper) {
        close(until[1]);
        close(ready[0]);
        keep_window(fd, setting, until[0], ready[1]);
    }
    close(until[0]);
    close(ready[1]);
    close(fd);
    close(turn);
    ssize_t got = read(ready[0], &answer, 1);
    close(ready[0]);
    if (got != 1 || answer != 'y')
        skip("this kernel does not take the setting");
    return (struct window){keeper, until[1]};
}

static void close_window(struct window *window)
{
    int status;
    close(window->until);
    CHECK(waitpid(window->keeper, &status, 0) == window->keeper && status == 0);
}

/* ------------------------------------------------------------------- tests */

static void write_file(const char *directory, const char *name, const char *text)
{
    char path[300];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
}

/* What the files say, without the machine's. */
static void test_settings(int unused)
{
    (void)unused;
    char directory[] = "build/huge-pages-XXXXXX", sizes[64], why[PC__HUGE_PAGES_WHY_BYTES];
    CHECK(mkdtemp(directory));
    snprintf(sizes, sizeof sizes, "%s/hugepages-64kB", directory);
    struct pc__huge_pages_files held;
    CHECK(!pc__huge_pages_in(directory, why)); /* a kernel without */
    CHECK(!pc__huge_pages_open(&held, directory) && held.n == 0 && !pc__huge_pages_now(&held));
    CHECK(!pc__huge_pages_open(&held, "build/there is none") && held.n == 0);
    CHECK(!mkdir(sizes, 0700));
    write_file(sizes, "shmem_enabled", "always inherit within_size advise [never]\n");
    static const struct {
        const char *text;
        bool is_huge;
    } all[] = {
        {"[always] within_size advise never deny force\n", true},
        {"always [within_size] advise never deny force\n", true},
        {"always within_size [advise] never deny force\n", false},
        {"always within_size advise [never] deny force\n", false},
        {"always within_size advise never [deny] force\n", false},
        {"always within_size advise never deny [force]\n", true},
    };
    write_file(directory, "shmem_enabled", all[3].text);
    write_file(sizes, "shmem_enabled", all[3].text);
    CHECK(!pc__huge_pages_open(&held, directory) && held.n == 2);
    for (size_t i = 0; i < N(all); i++) {
        write_file(directory, "shmem_enabled", all[i].text);
        CHECK(pc__huge_pages_in(directory, why) == all[i].is_huge);
        CHECK(pc__huge_pages_now(&held) == all[i].is_huge);
    }
    CHECK(strstr(why, "shmem_enabled is [force]"));
    write_file(directory, "shmem_enabled", all[3].text);
    write_file(sizes, "shmem_enabled", "always [inherit] within_size advise never\n");
    CHECK(!pc__huge_pages_in(directory, why) && !pc__huge_pages_now(&held));
    write_file(sizes, "shmem_enabled", "");
    CHECK(pc__huge_pages_now(&held)); /* nobody knows */
    write_file(sizes, "shmem_enabled", "[always] inherit within_size advise never\n");
    CHECK(pc__huge_pages_now(&held));
    pc__huge_pages_close(&held);
    CHECK(pc__huge_pages_in(directory, why) && strstr(why, "hugepages-64kB/shmem_enabled"));
    char path[128];
    snprintf(path, sizeof path, "%s/shmem_enabled", sizes);
    CHECK(!unlink(path) && !rmdir(sizes));
    snprintf(path, sizeof path, "%s/shmem_enabled", directory);
    CHECK(!unlink(path) && !rmdir(directory));
}

/* How many maps of our memory there are in this process that refuse huge pages; -1: one does not. A
 * thread of a server may have made it just now, and say so next. */
static int maps_that_refuse(void)
{
    char line[512];
    bool is_ours = false;
    int n = 0;
    FILE *file = fopen("/proc/self/smaps", "re");
    CHECK(file);
    while (fgets(line, sizeof line, file)) {
        if (strstr(line, "memfd:"))
            is_ours = strstr(line, "memfd:clamor ") || strstr(line, "memfd:clamor-layer") ||
                      strstr(line, "memfd:clamor-history");
        if (strncmp(line, "VmFlags:", 8) != 0)
            continue;
        if (is_ours && n >= 0)
            n = strstr(line, " nh") ? n + 1 : -1;
        is_ours = false;
    }
    fclose(file);
    return n;
}

/* Base, overlay, layer, history and generations, by page servers and by processes of both nodes. */
static void test_all_maps(int trap)
{
    struct cluster *c = cluster_start(2, "maps");
    struct server *s = &c->servers[0];
    pc_client *home = attach(s, trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, s, home, 1, MIB, 0);
    struct pc_mapping h0 = map_at(home, &info, 0, 0), f0 = map_at(far, &info, 0, 0);
    const struct pc_run some[1] = {{3, 20}};
    CHECK(commit(c, s, home, &info, 0, some, 1) == 1);
    struct pc_mapping h1 = map_at(home, &info, 1, 0), w1 = map_at(far, &info, 1, PC_MAP_PRIVATE);
    struct pc_mapping built;
    OK(pc_client_build(home, 7, PC_WINDOW_BEGIN + ((uint64_t)7 << 28), MIB, PC_MEDIUM_MEMORY, WAIT, &built));
    SOON(maps_that_refuse() >= 9);
    OK(pc_client_unmap(home, h0.id));
    OK(pc_client_unmap(home, h1.id));
    OK(pc_client_unmap(far, f0.id));
    OK(pc_client_unmap(far, w1.id));
    pc_client_close(home);
    pc_client_close(far);
    cluster_stop(c);
}

static uint64_t allocated(int fd)
{
    struct stat st;
    CHECK(!fstat(fd, &st));
    return (uint64_t)st.st_blocks * 512 / PC_BLOCK_BYTES;
}

/* One block that is written is one block. */
static void test_single_pages(int i)
{
    static uint8_t bytes[2 * PC_BLOCK_BYTES];
    memset(bytes, 7, sizeof bytes);
    uint64_t inode;
    int put_fd = pc__memfd_make(8 * MIB, &inode), home_fd = pc__memfd_make(8 * MIB, &inode);
    int plain_fd = pc__memfd_make(8 * MIB, &inode);
    CHECK(put_fd >= 0 && home_fd >= 0 && plain_fd >= 0);
    struct window window = open_window(settings[i][0], settings[i][1]);
    CHECK(pwrite(plain_fd, bytes, PC_BLOCK_BYTES, 5 << 12) == PC_BLOCK_BYTES);
    int put = pc_copy_in(put_fd, 5 << 12, bytes, PC_BLOCK_BYTES, 1);
    int across = pc_copy_in(put_fd, (2u << 20) + 100, bytes, PC_BLOCK_BYTES, 1); /* of two blocks */
    const struct pc__store home = {.memfd = home_fd};
    int replaced = replace(&home, 700, 1, bytes, true);
    close_window(&window);
    OK(put);
    OK(across);
    OK(replaced);
    if (allocated(plain_fd) == 1) /* as of its sizes between: it goes by the length of the write */
        skip("this kernel makes a single page of one block in this setting");
    CHECK(allocated(put_fd) == 3 && allocated(home_fd) == 1);
    uint8_t seen[PC_BLOCK_BYTES];
    CHECK(pread(put_fd, seen, sizeof seen, (2 << 20) + 100) == (ssize_t)sizeof seen &&
          !memcmp(seen, bytes, sizeof seen));
    close(plain_fd);
    close(put_fd);
    close(home_fd);
}

struct slow_copy {
    int fd, rc;
    const uint8_t *source;
    uint64_t n_bytes;
};

static void *copy_slowly(void *arg)
{
    struct slow_copy *copy = arg;
    copy->rc = pc_copy_in(copy->fd, 0, copy->source, copy->n_bytes, 1);
    return NULL;
}

/* The setting changes in the middle of a copy, whose source waits for one of its pages. */
static void test_changes_meanwhile(int i)
{
    const uint64_t n_bytes = 2 * MIB + 64 * PC_BLOCK_BYTES, waits_at = MIB + 5 * PC_BLOCK_BYTES;
    uint64_t inode;
    static uint8_t page[PC_BLOCK_BYTES];
    struct uffdio_api api = {.api = UFFD_API};
    int uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api))
        skip("no userfaultfd for system calls here: it takes root");
    uint8_t *source = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(source != MAP_FAILED && !madvise(source, n_bytes, MADV_NOHUGEPAGE));
    for (uint64_t at = 0; at < n_bytes; at += PC_BLOCK_BYTES)
        if (at != waits_at)
            source[at] = 7;
    struct uffdio_register range = {
        .range = {.start = (uint64_t)(uintptr_t)source, .len = n_bytes},
        .mode = UFFDIO_REGISTER_MODE_MISSING};
    CHECK(!ioctl(uffd, UFFDIO_REGISTER, &range));
    struct slow_copy copy = {.fd = pc__memfd_make(8 * MIB, &inode), .source = source, .n_bytes = n_bytes};
    pthread_t thread;
    struct uffd_msg event;
    CHECK(copy.fd >= 0 && !pthread_create(&thread, NULL, copy_slowly, &copy));
    CHECK(read(uffd, &event, sizeof event) == (ssize_t)sizeof event);
    struct window window = open_window(settings[i][0], settings[i][1]);
    struct uffdio_copy fill = {.dst = (uint64_t)(uintptr_t)source + waits_at,
                               .src = (uint64_t)(uintptr_t)page,
                               .len = PC_BLOCK_BYTES};
    CHECK(!ioctl(uffd, UFFDIO_COPY, &fill));
    pthread_join(thread, NULL);
    close_window(&window);
    OK(copy.rc);
    CHECK(allocated(copy.fd) == n_bytes / PC_BLOCK_BYTES);
    close(copy.fd);
    close(uffd);
}

static void ask_for(int fd, uint64_t first, uint16_t n)
{
    struct {
        struct pc__data_header header;
        struct pc__data_asker asker;
        uint64_t run;
    } get = {.header = {.magic = PC__DATA_MAGIC, .type = PC__DATA_GET, .region = 1, .n_runs = 1,
                        .n_blocks = n},
             .run = pc__run_pack(first, n)};
    CHECK(send(fd, &get, sizeof get, 0) == (ssize_t)sizeof get);
}

/* A home that was made of huge pages all the same (its writer is not ours): what is on its way
 * in a socket stays what it is while the home goes on. */
static void test_reply_is_copied(int i)
{
    const uint64_t length = 4 * MIB, first = 100;
    struct cluster *c = cluster_start(1, "huge");
    struct server *s = &c->servers[0];
    pc_client *client = attach(s, PC_TRAP_UFFD);
    struct pc_region_info info = {
        .region = 1, .base_address = PC_WINDOW_BEGIN + ((uint64_t)1 << 28), .length_bytes = length};
    uint64_t *data = malloc(length);
    fill_pattern(data, 1, 0, length);
    int fd = -1, logged = s->log_events;
    OK(pc_client_create(client, 1, info.base_address, length, PC_MEDIUM_MEMORY, WAIT, &fd));
    struct window window = open_window(settings[i][0], settings[i][1]);
    ssize_t wrote = pwrite(fd, data, length, 0);
    int sealed = pc_client_seal(client, 1, WAIT);
    close_window(&window);
    CHECK(wrote == (ssize_t)length);
    OK(sealed);
    free(data);
    close(fd);
    publish(c, info, s->id);
    SOON(s->log_events == logged + 1); /* once, with the cause */
    int pair[2];
    tcp_pair(pair);
    OK(pc_engine_serve(s->engine, 0x9999, pair[1]));
    ask_for(pair[0], first, N_BLOCKS);
    struct pc__data_header header;
    SOON(stats_of(s).bytes_sent >= N_BLOCKS << PC_BLOCK_SHIFT); /* all of it is in the socket */
    const struct pc_run all = {first, N_BLOCKS};
    CHECK(commit(c, s, client, &info, 0, &all, 1) == 1);
    SOON(stats_of(s).commits_applied == 1);
    CHECK(recv(pair[0], &header, sizeof header, MSG_WAITALL) == (ssize_t)sizeof header);
    CHECK(header.status == 0 && header.n_blocks == N_BLOCKS && !header.flags);
    unsigned n_wrong = 0;
    for (uint64_t block = first; block < first + N_BLOCKS; block++) {
        static uint64_t words[512];
        CHECK(recv(pair[0], words, sizeof words, MSG_WAITALL) == (ssize_t)sizeof words);
        bool is_wrong = false;
        for (uint64_t k = 0; k < 512; k++)
            is_wrong |= words[k] != pattern(1, (block << PC_BLOCK_SHIFT) + 8 * k);
        n_wrong += is_wrong;
    }
    if (n_wrong)
        fprintf(stderr, "%s %s: %u of %u blocks are wrong\n", settings[i][0], settings[i][1], n_wrong,
                N_BLOCKS);
    CHECK(!n_wrong);
    close(pair[0]);
    pc_client_close(client);
    cluster_stop(c);
}

/* How often this process has opened the setting's file since the last call, at least: the kernel makes
 * one event of several that nobody has read. */
static int n_looks(int watch)
{
    struct fanotify_event_metadata events[64];
    ssize_t got;
    int n = 0;
    while ((got = read(watch, events, sizeof events)) > 0)
        for (struct fanotify_event_metadata *e = events; FAN_EVENT_OK(e, got);
             e = FAN_EVENT_NEXT(e, got)) {
            n += e->pid == getpid();
            if (e->fd >= 0)
                close(e->fd);
        }
    CHECK(errno == EAGAIN);
    return n;
}

/* A look at the files by name takes more system calls than all the rest of a small variable. */
static void test_small_variables_do_not_look(int unused)
{
    (void)unused;
    struct cluster *c = cluster_start(1, "looks");
    pc_client *client = attach(&c->servers[0], PC_TRAP_AUTO);
    int turn = open(HOME_OF_SETTINGS "shmem_enabled", O_RDONLY | O_CLOEXEC);
    if (turn < 0)
        skip("this kernel makes no huge pages");
    CHECK(!flock(turn, LOCK_EX)); /* no window is open meanwhile */
    int watch = fanotify_init(FAN_CLASS_NOTIF | FAN_NONBLOCK | FAN_CLOEXEC, O_RDONLY | O_CLOEXEC);
    if (watch < 0 || fanotify_mark(watch, FAN_MARK_ADD, FAN_OPEN, AT_FDCWD,
                                   HOME_OF_SETTINGS "shmem_enabled"))
        skip("it may not watch who opens a file: it takes root");
    char why[PC__HUGE_PAGES_WHY_BYTES];
    if (pc__huge_pages(why))
        skip("this machine makes huge pages: each look says so");
    CHECK(n_looks(watch) == 1); /* the watch works */
    for (uint64_t id = 1; id <= 20; id++)
        build(c, &c->servers[0], client, id, 3 * PC_BLOCK_BYTES, 0);
    CHECK(n_looks(watch) == 0);
    close(watch);
    close(turn);
    pc_client_close(client);
    cluster_stop(c);
}

/* A server that inserts by pwrite, and began in another setting, refuses; it shows no zeros. */
static void test_without_userfaultfd(int unused)
{
    (void)unused;
    no_userfaultfd = 1;
    struct cluster *c = cluster_start(2, "refuses");
    pc_client *home = attach(&c->servers[0], PC_TRAP_SIGSEGV);
    pc_client *far = attach(&c->servers[1], PC_TRAP_SIGSEGV);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 4 * MIB, 0);
    struct pc_mapping m = map_at(far, &info, 0, 0);
    const struct pc_run one = {700, 1}, other = {5, 1};
    struct window window = open_window("shmem_enabled", "always");
    int rc = pc_client_prefetch(far, m.id, &one, 1, 1, WAIT);
    close_window(&window);
    CHECK(rc == PC_ERR_HUGE_PAGES);
    OK(pc_client_prefetch(far, m.id, &other, 1, 1, WAIT)); /* the setting is as it was */
    CHECK(at(&m, 5 << 12) == pattern(1, 5 << 12) && at(&m, 701 << 12) == pattern(1, 701 << 12));
    pc_client_close(home);
    pc_client_close(far);
    cluster_stop(c);
}

int main(void)
{
    int failed = run_test("settings", test_settings, 0, 60);
    failed += run_test("all_maps", test_all_maps, PC_TRAP_UFFD, 120);
    failed += run_test("all_maps", test_all_maps, PC_TRAP_SIGSEGV, 120);
    for (int i = 0; i < (int)N(settings); i++) {
        failed += run_test("single_pages", test_single_pages, i, 120);
        failed += run_test("changes_meanwhile", test_changes_meanwhile, i, 120);
        failed += run_test("reply_is_copied", test_reply_is_copied, i, 240);
    }
    failed += run_test("small_variables_do_not_look", test_small_variables_do_not_look, 0, 120);
    failed += run_test("without_userfaultfd", test_without_userfaultfd, 0, 240);
    return failed ? 1 : 0;
}

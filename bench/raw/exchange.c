/* exchange.c - one raw TCP request-response over loopback, both ends blocking in recv.
 *
 * usage: exchange RESPONSE_BYTES EXCHANGES
 *
 * Two processes: the parent asks with 40 bytes (what a request for one run of blocks takes), the
 * child answers with a 32-byte header and RESPONSE_BYTES from a memfd, a different part of it
 * each time. The parent checks the first word of each block and prints the nanoseconds of every
 * exchange, one a line. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { REQUEST_BYTES = 40, HEADER_BYTES = 32, BLOCK_BYTES = 4096, PARTS = 1024, WARM = 200 };

static void die(const char *what)
{
    perror(what);
    _exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* 1, or 0 at the end of the stream. */
static int receive(int fd, char *to, size_t n)
{
    while (n > 0) {
        ssize_t got = recv(fd, to, n, 0);
        if (got == 0)
            return 0;
        if (got < 0)
            die("recv");
        to += got;
        n -= (size_t)got;
    }
    return 1;
}

static void send_two(int fd, char *head, size_t head_bytes, char *body, size_t body_bytes)
{
    struct iovec parts[2] = {{head, head_bytes}, {body, body_bytes}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    while (parts[0].iov_len + parts[1].iov_len > 0) {
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (sent < 0)
            die("sendmsg");
        for (int i = 0; i < 2; i++) {
            size_t taken = (size_t)sent < parts[i].iov_len ? (size_t)sent : parts[i].iov_len;
            parts[i].iov_base = (char *)parts[i].iov_base + taken;
            parts[i].iov_len -= taken;
            sent -= (ssize_t)taken;
        }
    }
}

static void serve(int fd, char *data, size_t response_bytes)
{
    char request[REQUEST_BYTES], header[HEADER_BYTES] = {0};
    while (receive(fd, request, sizeof request)) {
        uint64_t part;
        memcpy(&part, request, sizeof part);
        send_two(fd, header, sizeof header, data + part * response_bytes, response_bytes);
    }
    _exit(0);
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: exchange RESPONSE_BYTES EXCHANGES\n");
        return 2;
    }
    size_t response_bytes = strtoull(argv[1], NULL, 10);
    long exchanges = strtol(argv[2], NULL, 10);
    if (response_bytes == 0 || response_bytes % BLOCK_BYTES != 0 || exchanges < 1)
        return 2;

    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) < 0 ||
        listen(listener, 1) < 0 || getsockname(listener, (struct sockaddr *)&address, &length) < 0)
        die("listen");

    int one = 1;
    pid_t child = fork();
    if (child < 0)
        die("fork");
    if (child == 0) {
        int memory = memfd_create("exchange", 0);
        if (memory < 0 || ftruncate(memory, (off_t)(PARTS * response_bytes)) < 0)
            die("memfd");
        char *data = mmap(NULL, PARTS * response_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
        if (data == MAP_FAILED)
            die("mmap");
        for (size_t at = 0; at < PARTS * response_bytes; at += sizeof(uint64_t)) {
            uint64_t word = at * 0x9E3779B97F4A7C15u;
            memcpy(data + at, &word, sizeof word);
        }
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            die("accept");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        serve(fd, data, response_bytes);
    }

    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
        die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    char *response = malloc(HEADER_BYTES + response_bytes);
    uint64_t *ns = calloc((size_t)exchanges, sizeof *ns);
    if (response == NULL || ns == NULL)
        die("malloc");
    memset(response, 0, HEADER_BYTES + response_bytes);
    uint64_t state = 1;
    for (long i = -WARM; i < exchanges; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        uint64_t part = (state >> 33) % PARTS;
        char request[REQUEST_BYTES] = {0};
        memcpy(request, &part, sizeof part);
        uint64_t before = now_ns();
        if (send(fd, request, sizeof request, MSG_NOSIGNAL) != (ssize_t)sizeof request)
            die("send");
        if (!receive(fd, response, HEADER_BYTES + response_bytes))
            die("closed");
        if (i >= 0)
            ns[i] = now_ns() - before;
        for (size_t at = 0; at < response_bytes; at += BLOCK_BYTES) {
            uint64_t word, want = (part * response_bytes + at) * 0x9E3779B97F4A7C15u;
            memcpy(&word, response + HEADER_BYTES + at, sizeof word);
            if (word != want) {
                fprintf(stderr, "exchange: wrong data\n");
                return 1;
            }
        }
    }
    close(fd);
    int status = 0;
    if (waitpid(child, &status, 0) < 0 || status != 0)
        die("child");
    for (long i = 0; i < exchanges; i++)
        printf("%llu\n", (unsigned long long)ns[i]);
    return 0;
}

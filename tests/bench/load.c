/* A load generator that costs next to nothing: one thread, connections that ask one thing after the other.

   load PORT BODY [connections N] [seconds S] [requests N] [sessions N] [ramp PER_SECOND] [path PATH]

   BODY is a file; its sixteen @ become the request's number, so that no two requests are equal. `sessions` spreads them
   over that many by X-Session-ID. `ramp` opens so many connections a second. At the end one line of JSON.
*/
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define HEAD 16384
#define MARK "@@@@@@@@@@@@@@@@"

typedef struct {
    int fd, status, done; /* done: of the head */
    long number, since, left; /* left: bytes of the body, or of the chunk */
    size_t sent;
    enum { SIZE, DATA, AFTER, TAIL } part;
    int sized, line; /* sized: the head told how long the body is */
    char before, *head;
    size_t have;
    long events;
} Peer;

static char *request;
static size_t length, mark, session_mark;
static long asked, limit, ok, refused, broken, events, whole, sessions, deadline, quiet_until;
static unsigned *times;
static size_t timed, room;
static int poller, port, live;
static char fault[256];

static long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static void stamp(char *at, long number, int digits) {
    for (int i = digits - 1; i >= 0; i--, number /= 10) at[i] = '0' + number % 10;
}

static void shut(Peer *p) {
    close(p->fd);
    p->fd = -1;
    live--;
}

static void fail(Peer *p, const char *why) {
    broken++;
    if (!*fault) snprintf(fault, sizeof fault, "%s after %zu bytes sent, status %d", why, p->sent, p->status);
    shut(p);
}

static void put(Peer *p) {
    stamp(request + mark, p->number, 16);
    if (sessions) stamp(request + session_mark, p->number % sessions, 10);
    while (p->sent < length) {
        ssize_t n = write(p->fd, request + p->sent, length - p->sent);
        if (n < 0 && errno == EAGAIN) break;
        if (n <= 0) {
            fail(p, "write");
            return;
        }
        p->sent += n;
    }
}

static void ask(Peer *p) {
    if (asked >= limit || now_us() >= deadline) {
        shut(p);
        return;
    }
    p->number = asked++;
    p->sent = p->have = 0;
    p->done = p->status = 0;
    p->events = 0;
    p->since = now_us();
    put(p);
}

static void ended(Peer *p) {
    if (timed == room) times = realloc(times, (room = room ? room * 2 : 65536) * sizeof *times);
    times[timed++] = now_us() - p->since;
    if (p->status == 200) ok++;
    else {
        refused++;
        if (!*fault) snprintf(fault, sizeof fault, "status %d", p->status);
    }
    whole += p->events > 0;
    events += p->events;
    ask(p);
}

/* The bytes of a body; 1 where it has ended. */
static int body(Peer *p, const char *in, size_t n) {
    if (p->sized) {
        p->left -= n;
        return p->left <= 0;
    }
    for (size_t i = 0; i < n; i++) {
        char c = in[i];
        switch (p->part) {
        case SIZE:
            if (c == '\n') {
                p->part = p->left ? DATA : TAIL;
                p->line = 0;
            } else if (c != '\r') {
                p->left = p->left * 16 + (c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
            }
            break;
        case DATA:
            p->events += c == '\n' && p->before == '\n';
            p->before = c == '\n' && p->before == '\n' ? 0 : c;
            if (!--p->left) p->part = AFTER;
            break;
        case AFTER:
            if (c == '\n') p->part = SIZE;
            break;
        case TAIL: /* trailers, then an empty line */
            if (c == '\n') {
                if (!p->line) return 1;
                p->line = 0;
            } else if (c != '\r') p->line = 1;
        }
    }
    return 0;
}

static void hear(Peer *p) {
    static char in[262144];
    ssize_t n = read(p->fd, in, sizeof in);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        fail(p, "closed");
        return;
    }
    size_t from = 0;
    if (!p->done) {
        size_t take = (size_t)n < HEAD - p->have ? (size_t)n : HEAD - p->have, had = p->have;
        memcpy(p->head + had, in, take);
        p->have += take;
        char *end = memmem(p->head, p->have, "\r\n\r\n", 4);
        if (!end) {
            if (p->have == HEAD) fail(p, "a head too long");
            return;
        }
        *end = 0;
        p->status = atoi(p->head + 9);
        const char *told = strcasestr(p->head, "\r\ncontent-length:");
        p->sized = told != NULL;
        p->left = told ? atol(told + 17) : 0;
        p->part = told ? DATA : SIZE;
        p->before = 0;
        p->done = 1;
        from = end + 4 - p->head - had;
        if (told && !p->left) {
            ended(p);
            return;
        }
        if (!told && !strcasestr(p->head, "\r\ntransfer-encoding:")) {
            fail(p, "a body without an end");
            return;
        }
    }
    if (from < (size_t)n && body(p, in + from, n - from)) ended(p);
    if (n == sizeof in && p->fd >= 0) hear(p); /* told once of all that came */
}

static void join(void) {
    Peer *p = calloc(1, sizeof *p);
    p->head = malloc(HEAD + 1);
    int on = 1;
    p->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(p->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    live++;
    if (connect(p->fd, (struct sockaddr *)&at, sizeof at) && errno != EINPROGRESS) {
        fail(p, "connect");
        return;
    }
    epoll_ctl(poller, EPOLL_CTL_ADD, p->fd, &(struct epoll_event){.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = p});
    p->number = -1;
}

static void compose(const char *file, const char *path) {
    FILE *from = fopen(file, "rb");
    if (!from) {
        perror(file);
        exit(1);
    }
    fseek(from, 0, SEEK_END);
    long size = ftell(from);
    rewind(from);
    request = malloc(size + 1024);
    length = sprintf(request, "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
                              "authorization: Bearer sk-bench-0123456789\r\n", path, port);
    if (sessions) {
        length += sprintf(request + length, "x-session-id: s");
        session_mark = length;
        length += sprintf(request + length, "0000000000\r\n");
    }
    length += sprintf(request + length, "content-length: %ld\r\n\r\n", size);
    if (fread(request + length, 1, size, from) != (size_t)size) exit(1);
    fclose(from);
    char *at = memmem(request + length, size, MARK, 16);
    if (!at) {
        fprintf(stderr, "%s: no place for the number\n", file);
        exit(1);
    }
    mark = at - request;
    length += size;
}

static int by_size(const void *a, const void *b) {
    unsigned x = *(unsigned *)a, y = *(unsigned *)b;
    return x < y ? -1 : x > y;
}

static unsigned part(double share) { return timed ? times[(size_t)(share * (timed - 1))] : 0; }

int main(int argc, char **argv) {
    long connections = 1, opened = 0;
    double seconds = 1e6, ramp = 0;
    const char *path = "/v1/chat/completions";
    limit = 1L << 60;
    signal(SIGPIPE, SIG_IGN);
    if (argc < 3) return 2;
    port = atoi(argv[1]);
    for (int i = 3; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "connections")) connections = atol(argv[i + 1]);
        else if (!strcmp(argv[i], "seconds")) seconds = atof(argv[i + 1]);
        else if (!strcmp(argv[i], "requests")) limit = atol(argv[i + 1]);
        else if (!strcmp(argv[i], "sessions")) sessions = atol(argv[i + 1]);
        else if (!strcmp(argv[i], "ramp")) ramp = atof(argv[i + 1]);
        else if (!strcmp(argv[i], "path")) path = argv[i + 1];
        else return 2;
    }
    compose(argv[2], path);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(0);
    long since = now_us();
    deadline = since + (long)(seconds * 1e6);
    quiet_until = now_us();
    while (opened < connections || live) {
        long may = ramp ? (long)((now_us() - since) / 1e6 * ramp) + 1 : connections;
        while (opened < connections && opened < may && now_us() < deadline) {
            join();
            opened++;
        }
        if (now_us() >= deadline) opened = connections;
        struct epoll_event told[512];
        int n = epoll_wait(poller, told, 512, opened < connections ? 1 : 1000);
        if (n) quiet_until = now_us() + 60000000;
        if (now_us() > quiet_until) {
            broken += live;
            snprintf(fault, sizeof fault, "nothing came for 60 s");
            break;
        }
        for (int i = 0; i < n; i++) {
            Peer *p = told[i].data.ptr;
            if (p->fd >= 0 && told[i].events & EPOLLOUT) {
                if (p->number < 0) ask(p);
                else if (p->sent < length) put(p);
            }
            if (p->fd >= 0 && told[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) hear(p);
        }
    }
    double took = (now_us() - since) / 1e6;
    qsort(times, timed, sizeof *times, by_size);
    printf("{\"requests\":%zu,\"ok\":%ld,\"refused\":%ld,\"broken\":%ld,\"fault\":\"%s\",\"seconds\":%.3f,\"events\":%ld,"
           "\"streams\":%ld,\"p50_us\":%u,\"p99_us\":%u}\n", timed, ok, refused, broken, fault, took, events, whole,
           part(0.5), part(0.99));
    return 0;
}

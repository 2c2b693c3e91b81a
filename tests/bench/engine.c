/* A fake engine that costs next to nothing: one process, one thread, as many ports as are named.

   engine PORT...

   Whole answers and streams, by the request's `stream`. What it does may be changed while it is idle:

   GET /_set?hold_us=&gap_us=&chunks=   wait so long before an answer; so long between chunks; so many of them
   GET /_told                           requests answered, those that carried a seed, the most that were in it at once
*/
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

typedef struct Peer {
    int fd, listens, streams, left; /* left: chunks to send */
    char *in;
    size_t have, room;
    unsigned long born;
} Peer;

/* Who waits: the delay is the same for all, so the first to come is the first to go. */
typedef struct { Peer *peer; unsigned long born; long due; } Wait;
typedef struct { Wait *ring; size_t head, tail, room; } Queue;

static Queue held, paced;
static long hold_us, gap_us, chunks = 16, answered, seeded, inside, most;
static unsigned long births;
static int poller;
static char whole[1024], first[1024], chunk[512], last[512];
static size_t whole_len, first_len, chunk_len, last_len;

static long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static void enqueue(Queue *q, Peer *peer, long due) {
    if (q->tail - q->head == q->room) {
        size_t room = q->room ? q->room * 2 : 1024, n = q->tail - q->head;
        Wait *ring = malloc(room * sizeof *ring);
        for (size_t i = 0; i < n; i++) ring[i] = q->ring[(q->head + i) % q->room];
        free(q->ring);
        *q = (Queue){ring, 0, n, room};
    }
    q->ring[q->tail++ % q->room] = (Wait){peer, peer->born, due};
}

static void drop(Peer *peer) {
    if (peer->streams) inside--;
    close(peer->fd);
    free(peer->in);
    peer->in = NULL;
    peer->have = peer->room = 0;
    peer->streams = 0;
    peer->born = 0; /* the place in memory stays: a queue may still point to it */
}

/* A reader that takes nothing is dropped: what is sent fits into any socket's buffer. */
static int put(Peer *peer, const char *bytes, size_t n) {
    if (write(peer->fd, bytes, n) == (ssize_t)n) return 1;
    drop(peer);
    return 0;
}

static void serve(Peer *peer);

static void begin(Peer *peer) {
    answered++;
    if (peer->streams == 1) {
        inside--;
        peer->streams = 0;
        if (put(peer, whole, whole_len)) serve(peer);
        return;
    }
    peer->left = chunks;
    if (put(peer, first, first_len)) enqueue(&paced, peer, now_us() + gap_us);
}

static void pace(Peer *peer) {
    if (peer->left-- > 0) {
        if (put(peer, chunk, chunk_len)) enqueue(&paced, peer, now_us() + gap_us);
        return;
    }
    inside--;
    peer->streams = 0;
    if (put(peer, last, last_len)) serve(peer);
}

static long run(Queue *q, void (*step)(Peer *), long now) {
    while (q->head != q->tail) {
        Wait *w = &q->ring[q->head % q->room];
        if (w->due > now) return w->due;
        Peer *peer = w->peer;
        int same = peer->born == w->born;
        q->head++;
        if (same) step(peer);
    }
    return -1;
}

static long number(const char *text, const char *name, long otherwise) {
    const char *at = strstr(text, name);
    return at ? atol(at + strlen(name)) : otherwise;
}

static void say(Peer *peer, int status, const char *text) {
    char out[512];
    int n = snprintf(out, sizeof out, "HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                     status, status == 200 ? "OK" : "Not Found", strlen(text), text);
    put(peer, out, n);
}

static void asked(Peer *peer, char *head) {
    char text[256];
    if (!strncmp(head, "GET /v1/models", 14)) {
        say(peer, 200, "{\"object\":\"list\",\"data\":[{\"id\":\"fake-model\",\"object\":\"model\",\"created\":1,"
                       "\"owned_by\":\"vllm\",\"max_model_len\":1048576}]}");
    } else if (!strncmp(head, "GET /version", 12)) {
        say(peer, 200, "{\"version\":\"0.32.0\"}");
    } else if (!strncmp(head, "GET /_set", 9)) {
        *strstr(head, "\r\n") = 0;
        hold_us = number(head, "hold_us=", hold_us);
        gap_us = number(head, "gap_us=", gap_us);
        chunks = number(head, "chunks=", chunks);
        answered = seeded = most = 0;
        say(peer, 200, "{}");
    } else if (!strncmp(head, "GET /_told", 10)) {
        snprintf(text, sizeof text, "{\"answered\":%ld,\"seeded\":%ld,\"inside\":%ld,\"most\":%ld}", answered, seeded,
                 inside, most);
        say(peer, 200, text);
    } else {
        /* What generates refuses a GET there, what scores does not know it. */
        int status = !strncmp(head, "GET /health", 11) ? 200 : !strncmp(head, "GET /v1/", 8) ? 405 : 404;
        say(peer, status, "{}");
    }
}

/* One whole request, if there is one: what follows it waits for the answer's end. */
static void serve(Peer *peer) {
    if (!peer->have || peer->streams) return;
    peer->in[peer->have] = 0;
    char *end = memmem(peer->in, peer->have, "\r\n\r\n", 4);
    if (!end) return;
    size_t head = end + 4 - peer->in, body = 0;
    *end = 0;
    const char *length = strcasestr(peer->in, "\r\ncontent-length:");
    int in_chunks = !length && strcasestr(peer->in, "\r\ntransfer-encoding:");
    *end = '\r';
    if (length) body = atol(length + 17);
    if (in_chunks) {
        char *tail = memmem(end + 2, peer->have - (end + 2 - peer->in), "\r\n0\r\n\r\n", 7);
        if (!tail) return;
        body = tail + 7 - peer->in - head;
    }
    if (peer->have < head + body) return;
    int get = !strncmp(peer->in, "GET", 3);
    if (!get) {
        char *at = peer->in + head;
        seeded += memmem(at, body, "\"seed\":", 7) != NULL;
        peer->streams = 1 + (memmem(at, body, "\"stream\":true", 13) || memmem(at, body, "\"stream\": true", 14));
    } else {
        asked(peer, peer->in);
        if (!peer->in) return;
    }
    peer->have -= head + body;
    memmove(peer->in, peer->in + head + body, peer->have);
    if (get) {
        serve(peer);
        return;
    }
    if (++inside > most) most = inside;
    if (hold_us) enqueue(&held, peer, now_us() + hold_us);
    else begin(peer);
}

static void hear(Peer *peer) {
    for (;;) {
        if (peer->room - peer->have < 4096) peer->in = realloc(peer->in, (peer->room = peer->room ? peer->room * 2 : 8192) + 1);
        ssize_t n = read(peer->fd, peer->in + peer->have, peer->room - peer->have);
        if (n <= 0) {
            if (n < 0 && errno == EAGAIN) break;
            drop(peer);
            return;
        }
        peer->have += n;
        if (peer->have < peer->room) break;
    }
    serve(peer);
}

static void watch(int fd, int listens) {
    Peer *peer = calloc(1, sizeof *peer);
    peer->fd = fd;
    peer->listens = listens;
    peer->born = ++births;
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &(struct epoll_event){.events = EPOLLIN, .data.ptr = peer});
}

static size_t framed(char *out, const char *event) {
    return sprintf(out, "%zx\r\n%s\r\n", strlen(event), event);
}

static void compose(void) {
    const char *answer =
        "{\"id\":\"chatcmpl-0\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"fake-model\",\"choices\":[{\"index\":0,"
        "\"message\":{\"role\":\"assistant\",\"content\":\"the gateway hands the batch to a replica and the kernel sums in "
        "one order whatever else is there, so the token that follows is the token that followed\",\"tool_calls\":[]},"
        "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":120,\"total_tokens\":160,"
        "\"completion_tokens\":40}}";
#define EVENT(delta, reason)                                                                                           \
    "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"fake-model\","        \
    "\"choices\":[{\"index\":0,\"delta\":" delta ",\"logprobs\":null,\"finish_reason\":" reason "}]}\n\n"
    whole_len = sprintf(whole, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                        strlen(answer), answer);
    first_len = sprintf(first, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                               "transfer-encoding: chunked\r\n\r\n");
    first_len += framed(first + first_len, EVENT("{\"role\":\"assistant\",\"content\":\"\"}", "null"));
    chunk_len = framed(chunk, EVENT("{\"content\":\" token\"}", "null"));
    last_len = framed(last, EVENT("{\"content\":\"\"}", "\"stop\""));
    last_len += framed(last + last_len, "data: [DONE]\n\n");
    last_len += sprintf(last + last_len, "0\r\n\r\n");
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(0);
    compose();
    for (int i = 1; i < argc; i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[i])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        if (bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 8192)) {
            perror(argv[i]);
            return 1;
        }
        watch(fd, 1);
    }
    for (;;) {
        long now = now_us(), a = run(&held, begin, now), b = run(&paced, pace, now);
        long due = a < 0 ? b : b < 0 || a < b ? a : b, left = due - now_us();
        struct timespec pause = {left / 1000000, left % 1000000 * 1000};
        if (left < 0) pause = (struct timespec){0, 0};
        struct epoll_event told[512];
        int n = epoll_pwait2(poller, told, 512, due < 0 ? NULL : &pause, NULL);
        for (int i = 0; i < n; i++) {
            Peer *peer = told[i].data.ptr;
            if (!peer->listens) {
                hear(peer);
                continue;
            }
            int fd, on = 1;
            while ((fd = accept4(peer->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
                watch(fd, 0);
            }
        }
    }
}

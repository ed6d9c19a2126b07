// What plain sockets allow: blocks got from and put to another process over TCP, no keys, no checks, no CRC. Requests
// and responses have the sizes of KBTP's messages: 40 octets, and the block.
//
//   floor serve POOL_OCTETS SPIN_US
//   floor get|put PORT BLOCK_OCTETS OUTSTANDING FIRST_BLOCK BLOCKS MILLISECONDS SPIN_US
//
// `serve` prints {"port": N} and serves, a thread a connection, until its standard input ends. `get` and `put` connect,
// print {}, and begin when they are sent a line: they make calls of OUTSTANDING requests on blocks drawn from BLOCKS, each
// sent in one piece and waited for in full, a block at a time, and print how long each took: the same loop, with the
// same verifying outside of the timed part, as kbtp.testing.bench.workload. Either side looks for octets for SPIN_US
// before it blocks.
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { GET = 1, PUT = 2, BATCH_MAX = 256, SLOTS = 32, CALLS_MAX = 1 << 20, COMPARE_EVERY = 64 };

struct message {  // a request or a response
    uint32_t operation, length;
    uint64_t offset;
    uint8_t rest[24];
};
_Static_assert(sizeof(struct message) == 40, "the size of a KBTP request and of its completion");

static uint8_t *pool;
static uint64_t pool_octets, spin_ns;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void fail(const char *what) {
    printf("{\"error\": \"%s\"}\n", what);
    exit(1);
}

static void *memory(size_t octets) {
    void *at = mmap(NULL, octets, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (at == MAP_FAILED) fail("memory");
    return at;
}

// Drop the first `done` octets of the pieces; returns how many whole pieces are behind us.
static int advance(struct iovec *pieces, int count, size_t done) {
    int whole = 0;
    while (whole < count && done >= pieces[whole].iov_len) done -= pieces[whole++].iov_len;
    if (done) {
        pieces[whole].iov_base = (uint8_t *)pieces[whole].iov_base + done;
        pieces[whole].iov_len -= done;
    }
    return whole;
}

// What has come, as soon as something has: 0 at the end of the connection, -1 if it failed.
static ssize_t receive_some(int socket, struct iovec *pieces, int count) {
    struct msghdr header = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
    if (spin_ns) {
        uint64_t deadline = now_ns() + spin_ns;
        for (int turn = 0;; turn++) {
            ssize_t got = recvmsg(socket, &header, MSG_DONTWAIT);
            if (got >= 0 || errno != EAGAIN) return got;
            if (turn % 16 == 15 && now_ns() > deadline) break;
        }
    }
    return recvmsg(socket, &header, 0);
}

static ssize_t send_some(int socket, struct iovec *pieces, int count) {
    struct msghdr header = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
    return sendmsg(socket, &header, MSG_NOSIGNAL);
}

static bool all(ssize_t (*some)(int, struct iovec *, int), int socket, struct iovec *pieces, int count) {
    for (int whole; count; pieces += whole, count -= whole) {
        ssize_t moved = some(socket, pieces, count);
        if (moved <= 0) return false;
        whole = advance(pieces, count, (size_t)moved);
    }
    return true;
}

static void without_delay(int socket) {
    int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// Each word of the pool says where it is, so that a block that comes from elsewhere is noticed.
static uint64_t word_at(uint64_t offset) { return offset * 0x9e3779b97f4a7c15u + 1; }

// Answers as many requests as came together with one sendmsg.
static void *serve_connection(void *argument) {
    int socket = (int)(intptr_t)argument;
    static _Thread_local uint8_t requests[BATCH_MAX * sizeof(struct message)];
    static _Thread_local struct message responses[BATCH_MAX];
    struct iovec pieces[2 * BATCH_MAX];
    size_t have = 0;
    for (;;) {
        struct iovec room = {requests + have, sizeof requests - have};
        ssize_t got = receive_some(socket, &room, 1);
        if (got <= 0) break;
        have += (size_t)got;
        size_t at = 0;
        int count = 0;
        for (int answered = 0; have - at >= sizeof(struct message); answered++) {
            struct message *response = &responses[answered];
            memcpy(response, requests + at, sizeof *response);
            at += sizeof *response;
            if (response->offset > pool_octets || response->length > pool_octets - response->offset) goto out;
            pieces[count++] = (struct iovec){response, sizeof *response};
            uint8_t *block = pool + response->offset;
            if (response->operation == GET) {
                pieces[count++] = (struct iovec){block, response->length};
                continue;
            }
            size_t here = have - at < response->length ? have - at : response->length;
            memcpy(block, requests + at, here);
            at += here;
            struct iovec rest = {block + here, response->length - here};
            if (rest.iov_len && !all(receive_some, socket, &rest, 1)) goto out;
        }
        memmove(requests, requests + at, have - at);
        have -= at;
        if (count && !all(send_some, socket, pieces, count)) break;
    }
out:
    close(socket);
    return NULL;
}

static void *accept_all(void *argument) {
    int socket;
    while ((socket = accept((int)(intptr_t)argument, NULL, NULL)) >= 0) {
        without_delay(socket);
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve_connection, (void *)(intptr_t)socket)) fail("thread");
        pthread_detach(thread);
    }
    return NULL;
}

static int serve(void) {
    pool = memory(pool_octets);
    for (uint64_t offset = 0; offset + 8 <= pool_octets; offset += 8) *(uint64_t *)(pool + offset) = word_at(offset);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}, {0}};
    socklen_t length = sizeof address;
    if (bind(listener, (void *)&address, length) || listen(listener, 64)) fail("listen");
    getsockname(listener, (void *)&address, &length);
    pthread_t thread;
    if (pthread_create(&thread, NULL, accept_all, (void *)(intptr_t)listener)) fail("thread");
    printf("{\"port\": %d}\n", ntohs(address.sin_port));
    fflush(stdout);
    for (char octet; read(STDIN_FILENO, &octet, 1) > 0;) continue;
    return 0;
}

static int server, outstanding;
static uint32_t block_octets, operation;
static uint64_t first_block, blocks;
static uint8_t *slots;  // the memory that blocks are got into or put from

// One call: `outstanding` requests from or into the slots from `slot` on.
static bool exchange(const uint64_t *offsets, uint8_t *slot) {
    static struct message requests[BATCH_MAX], responses[BATCH_MAX];
    struct iovec out[2 * BATCH_MAX];
    int sent = 0;
    for (int i = 0; i < outstanding; i++) {
        requests[i] = (struct message){.operation = operation, .length = block_octets, .offset = offsets[i]};
        out[sent++] = (struct iovec){&requests[i], sizeof requests[i]};
        if (operation == PUT) out[sent++] = (struct iovec){slot + (size_t)i * block_octets, block_octets};
    }
    if (!all(send_some, server, out, sent)) return false;
    if (operation == PUT) {
        struct iovec in = {responses, (size_t)outstanding * sizeof responses[0]};
        return all(receive_some, server, &in, 1);
    }
    for (int i = 0; i < outstanding; i++, slot += block_octets) {
        struct iovec in[2] = {{&responses[i], sizeof responses[i]}, {slot, block_octets}};
        if (!all(receive_some, server, in, 2)) return false;
    }
    return true;
}

// The words of each slot, all or the first and the last: made as the pool has them, or compared and spoilt.
static bool words(const uint64_t *offsets, uint8_t *slot, bool make, bool whole) {
    for (int i = 0; i < outstanding; i++, slot += block_octets) {
        for (uint32_t at = 0; at < block_octets; at += whole ? 8 : block_octets - 8) {
            uint64_t *word = (uint64_t *)(slot + at);
            if (make) *word = word_at(offsets[i] + at);
            else if (*word != word_at(offsets[i] + at)) return false;
        }
        if (!make) memset(slot, 0, 8);
    }
    return true;
}

static void measure(uint64_t milliseconds) {
    static uint64_t calls_ns[CALLS_MAX], offsets[BATCH_MAX];
    int count = outstanding > SLOTS ? outstanding : SLOTS;
    slots = memory((size_t)count * block_octets);
    puts("{}");
    fflush(stdout);
    if (getchar() == EOF) return;
    uint8_t *slot = slots;
    size_t calls = 0, warm_up = 0;
    uint64_t measured_from = now_ns() + milliseconds * 150000, deadline = measured_from + milliseconds * 1000000;
    while (!calls || (calls < CALLS_MAX && now_ns() < deadline)) {
        uint64_t first = (uint64_t)random() % blocks, stride = blocks / (uint64_t)outstanding;  // no two the same
        for (int i = 0; i < outstanding; i++)
            offsets[i] = (first_block + (first + (uint64_t)i * stride) % blocks) * block_octets;
        bool whole = calls % COMPARE_EVERY == 0;
        slot = slots + (calls + warm_up) % (size_t)(count - outstanding + 1) * block_octets;
        if (operation == PUT) words(offsets, slot, true, whole);
        uint64_t began = now_ns();
        if (!exchange(offsets, slot)) fail("the server has gone");
        uint64_t ended = now_ns();
        if (operation == GET && !words(offsets, slot, false, whole)) fail("a block came back as another one");
        if (began < measured_from) warm_up++;
        else calls_ns[calls++] = ended - began;
    }
    size_t verified = (operation == GET ? calls : 1) * (size_t)outstanding;
    operation = GET;  // what was put last comes back
    if (!exchange(offsets, slot) || !words(offsets, slot, false, false)) fail("a block came back as another one");
    printf("{\"verified\": %zu, \"warm_up_calls\": %zu, \"calls_ns\": [", verified, warm_up);
    for (size_t i = 0; i < calls; i++) printf("%s%" PRIu64, i ? "," : "", calls_ns[i]);
    puts("]}");
}

int main(int count, char **given) {
    uint64_t numbers[7] = {0};
    for (int i = 2; i < count && i < 9; i++) numbers[i - 2] = strtoull(given[i], NULL, 10);
    pool_octets = numbers[0], spin_ns = numbers[1] * 1000;
    if (count == 4 && !strcmp(given[1], "serve")) return serve();
    operation = count != 9 ? 0 : !strcmp(given[1], "get") ? GET : !strcmp(given[1], "put") ? PUT : 0;
    block_octets = (uint32_t)numbers[1], outstanding = (int)numbers[2];
    first_block = numbers[3], blocks = numbers[4], spin_ns = numbers[6] * 1000;
    bool sane = outstanding >= 1 && outstanding <= BATCH_MAX && blocks >= numbers[2];
    if (!operation || !sane || block_octets < 16 || block_octets % 8) fail("usage: as the head of floor.c says");
    server = socket(AF_INET, SOCK_STREAM, 0);
    without_delay(server);
    struct sockaddr_in address = {AF_INET, htons((uint16_t)numbers[0]), {htonl(INADDR_LOOPBACK)}, {0}};
    if (connect(server, (void *)&address, sizeof address)) fail("nothing listens there");
    measure(numbers[5]);
    return 0;
}

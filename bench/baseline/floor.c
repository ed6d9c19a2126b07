// What plain sockets allow: blocks got from and put to another process over TCP, no keys, no checks, no CRC. Requests
// and responses have the sizes of KBTP's messages: 40 octets, and the block.
//
// A library for `bench.peers.bare_sockets`, which calls it from Python as other clients are called. A call sends all of
// its requests in one piece and receives a block at a time. Either side looks for octets for some time before it
// blocks.
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { GET = 1, PUT = 2, BATCH_MAX = 256 };

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
    uint64_t number = 0;
    while ((socket = accept((int)(intptr_t)argument, NULL, NULL)) >= 0) {
        without_delay(socket);
        struct iovec piece = {&number, sizeof number};
        void *served = (void *)(intptr_t)socket;
        pthread_t thread;
        if (!all(send_some, socket, &piece, 1) || pthread_create(&thread, NULL, serve_connection, served)) {
            close(socket);
            continue;
        }
        pthread_detach(thread);
        number++;
    }
    return NULL;
}

// Serve a pool of so many octets, a thread a connection, for as long as the process lives: the port, or -1 and errno.
int floor_serve(uint64_t octets, uint64_t spin_us) {
    pool = mmap(NULL, octets, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (pool == MAP_FAILED) return -1;
    pool_octets = octets, spin_ns = spin_us * 1000;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}, {0}};
    socklen_t length = sizeof address;
    if (bind(listener, (void *)&address, length) || listen(listener, 64)) return -1;
    if (getsockname(listener, (void *)&address, &length)) return -1;
    pthread_t thread;
    errno = pthread_create(&thread, NULL, accept_all, (void *)(intptr_t)listener);
    return errno ? -1 : ntohs(address.sin_port);
}

// A connection, or -1 and errno; `number` is how many there were before.
int floor_connect(uint16_t port, uint64_t spin_us, uint64_t *number) {
    spin_ns = spin_us * 1000;
    int server = socket(AF_INET, SOCK_STREAM, 0);
    without_delay(server);
    struct sockaddr_in address = {AF_INET, htons(port), {htonl(INADDR_LOOPBACK)}, {0}};
    struct iovec piece = {number, sizeof *number};
    if (!connect(server, (void *)&address, sizeof address) && all(receive_some, server, &piece, 1)) return server;
    int why = errno;
    close(server);
    errno = why;
    return -1;
}

// Get or put `count` blocks of `length` octets: 0, or -1 if the connection has failed.
int floor_exchange(int server, int put, int count, uint8_t *const *slots, const uint64_t *offsets, uint32_t length) {
    struct message requests[BATCH_MAX], responses[BATCH_MAX];
    struct iovec out[2 * BATCH_MAX];
    int sent = 0;
    if (count > BATCH_MAX) return -1;
    for (int i = 0; i < count; i++) {
        requests[i] = (struct message){.operation = put ? PUT : GET, .length = length, .offset = offsets[i]};
        out[sent++] = (struct iovec){&requests[i], sizeof requests[i]};
        if (put) out[sent++] = (struct iovec){slots[i], length};
    }
    if (!all(send_some, server, out, sent)) return -1;
    if (put) {
        struct iovec in = {responses, (size_t)count * sizeof responses[0]};
        return all(receive_some, server, &in, 1) ? 0 : -1;
    }
    for (int i = 0; i < count; i++) {
        struct iovec in[2] = {{&responses[i], sizeof responses[i]}, {slots[i], length}};
        if (!all(receive_some, server, in, 2)) return -1;
    }
    return 0;
}

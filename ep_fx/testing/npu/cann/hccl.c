/* A stand-in for HCCL on one host: shared memory and a barrier. Every call has ended when it returns (streams are
 * ignored). At most MAX_RANKS ranks and SLOT bytes per rank and call; no send, no receive.
 *
 * A call writes what its rank gives into that rank's slot, waits for all, reads what is for it out of the others', and
 * waits for all again. Counts that do not agree are an error, as they are a hang or garbage on the device. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 16
#define SLOT ((size_t)64 << 20)
#define LIMIT_S 40
enum { OK = 0, BAD_ARGUMENT = 1, NO_SHARED_MEMORY = 4, NOT_SUPPORTED = 5, TIMED_OUT = 9 };

typedef struct {
    _Atomic uint32_t arrived, generation;
    uint64_t offset[MAX_RANKS][MAX_RANKS], bytes[MAX_RANKS][MAX_RANKS]; /* of an all_to_all: [from][to] */
} head_t;

typedef struct {
    head_t *head;
    char *slot[MAX_RANKS];
    uint32_t rank, size;
    char name[128];
} comm_t;

static size_t head_bytes(void) { return (sizeof(head_t) + 4095) & ~(size_t)4095; }
static size_t shared_bytes(uint32_t size) { return head_bytes() + size * SLOT; }

static int barrier(comm_t *c) {
    head_t *h = c->head;
    uint32_t generation = atomic_load(&h->generation);
    if (atomic_fetch_add(&h->arrived, 1) + 1 == c->size) {
        atomic_store(&h->arrived, 0);
        atomic_fetch_add(&h->generation, 1);
        return OK;
    }
    time_t start = time(NULL);
    for (unsigned turn = 1; atomic_load(&h->generation) == generation; turn++) {
        if (turn < 100) {
            sched_yield();
            continue;
        }
        struct timespec pause = {0, 100000}; /* the ranks are more than the cores */
        nanosleep(&pause, NULL);
        if (time(NULL) - start > LIMIT_S) {
            fprintf(stderr, "hccl stand-in: rank %u of %u waited %d s for the others\n", c->rank, c->size, LIMIT_S);
            return TIMED_OUT;
        }
    }
    return OK;
}

/* groups */
int HcclGetRootInfo(void *info) {
    static _Atomic int count;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    memset(info, 0, 4108); /* sizeof(HcclRootInfo) */
    snprintf(info, 120, "/ep_fx_hccl_%d_%d_%ld", (int)getpid(), atomic_fetch_add(&count, 1), now.tv_nsec);
    int fd = shm_open(info, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (fd < 0) return NO_SHARED_MEMORY;
    int rc = ftruncate(fd, (off_t)shared_bytes(MAX_RANKS)); /* sparse */
    close(fd);
    return rc ? NO_SHARED_MEMORY : OK;
}

int HcclCommInitRootInfo(uint32_t size, const void *info, uint32_t rank, void **out) {
    if (size > MAX_RANKS || rank >= size) return BAD_ARGUMENT;
    comm_t *c = calloc(1, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", (const char *)info);
    int fd = shm_open(c->name, O_RDWR, 0600);
    if (fd < 0) return NO_SHARED_MEMORY;
    char *memory = mmap(NULL, shared_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) return NO_SHARED_MEMORY;
    c->head = (head_t *)memory;
    c->rank = rank;
    c->size = size;
    for (uint32_t i = 0; i < size; i++) c->slot[i] = memory + head_bytes() + i * SLOT;
    int rc = barrier(c);
    if (rank == 0) shm_unlink(c->name); /* every rank has it mapped */
    *out = c;
    return rc;
}

int HcclCommInitRootInfoConfig(uint32_t size, const void *info, uint32_t rank, const void *config, void **out) {
    (void)config;
    return HcclCommInitRootInfo(size, info, rank, out);
}

int HcclCommDestroy(void *comm) {
    comm_t *c = comm;
    if (!c) return OK;
    munmap(c->head, shared_bytes(c->size));
    free(c);
    return OK;
}

int HcclGetCommName(void *comm, char *name) { strcpy(name, ((comm_t *)comm)->name + 1); return OK; }
int HcclGetCommAsyncError(void *comm, int *error) { (void)comm; if (error) *error = OK; return OK; }
const char *HcclGetErrorString(int error) { (void)error; return "error of the stand-in for HCCL"; }
int HcclGetRankSize(void *comm, uint32_t *size) { *size = ((comm_t *)comm)->size; return OK; }
int HcclGetRankId(void *comm, uint32_t *rank) { *rank = ((comm_t *)comm)->rank; return OK; }

/* data types, by the number that HCCL gives them */
enum { I8, I16, I32, F16, F32, I64, U64, U8, U16, U32, F64, BF16, TYPES };
static const size_t WIDTH[TYPES] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
static size_t width(int type) { return type >= 0 && type < TYPES ? WIDTH[type] : 0; }

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_bf16(float value) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 64; /* not a number */
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

/* HcclReduceOp: 0 sum, 1 product, 2 maximum, 3 minimum */
#define JOIN(a, b) (op == 0 ? (a) + (b) : op == 1 ? (a) * (b) : op == 2 ? ((a) > (b) ? (a) : (b)) : ((a) < (b) ? (a) : (b)))
#define REDUCE(T) { T *x = to; const T *y = from; for (uint64_t i = 0; i < n; i++) x[i] = JOIN(x[i], y[i]); return OK; }

static int reduce(void *to, const void *from, uint64_t n, int type, int op) {
    if (op < 0 || op > 3) return NOT_SUPPORTED;
    switch (type) {
    case I8: REDUCE(int8_t)
    case I16: REDUCE(int16_t)
    case I32: REDUCE(int32_t)
    case F16: REDUCE(_Float16)
    case F32: REDUCE(float)
    case I64: REDUCE(int64_t)
    case U64: REDUCE(uint64_t)
    case U8: REDUCE(uint8_t)
    case U16: REDUCE(uint16_t)
    case U32: REDUCE(uint32_t)
    case F64: REDUCE(double)
    case BF16: {
        uint16_t *x = to;
        const uint16_t *y = from;
        for (uint64_t i = 0; i < n; i++) x[i] = to_bf16(JOIN(from_bf16(x[i]), from_bf16(y[i])));
        return OK;
    }
    }
    return NOT_SUPPORTED;
}

/* `bytes` of every rank's slot from `offset` on, reduced into `to` */
static int reduce_slots(comm_t *c, void *to, size_t offset, uint64_t n, int type, int op) {
    memcpy(to, c->slot[0] + offset, n * width(type));
    for (uint32_t i = 1; i < c->size; i++) {
        int rc = reduce(to, c->slot[i] + offset, n, type, op);
        if (rc) return rc;
    }
    return OK;
}

static int give(comm_t *c, const void *from, size_t bytes) {
    if (bytes > SLOT) return BAD_ARGUMENT;
    memcpy(c->slot[c->rank], from, bytes);
    return barrier(c);
}

/* the second barrier of a call, also after an error: the others wait there */
static int end(comm_t *c, int rc) {
    int waited = barrier(c);
    return rc ? rc : waited;
}

/* collectives */
int HcclBarrier(void *comm, void *stream) { (void)stream; return barrier(comm); }

int HcclAllReduce(const void *from, void *to, uint64_t n, int type, int op, void *comm, void *stream) {
    (void)stream;
    comm_t *c = comm;
    int rc = give(c, from, n * width(type));
    return rc ? rc : end(c, reduce_slots(c, to, 0, n, type, op));
}

int HcclReduce(const void *from, void *to, uint64_t n, int type, int op, uint32_t root, void *comm, void *stream) {
    (void)stream;
    comm_t *c = comm;
    int rc = give(c, from, n * width(type));
    if (rc) return rc;
    return end(c, c->rank == root ? reduce_slots(c, to, 0, n, type, op) : OK);
}

int HcclReduceScatter(const void *from, void *to, uint64_t n, int type, int op, void *comm, void *stream) {
    (void)stream;
    comm_t *c = comm;
    size_t bytes = n * width(type);
    int rc = give(c, from, bytes * c->size);
    return rc ? rc : end(c, reduce_slots(c, to, c->rank * bytes, n, type, op));
}

int HcclAllGather(const void *from, void *to, uint64_t n, int type, void *comm, void *stream) {
    (void)stream;
    comm_t *c = comm;
    size_t bytes = n * width(type);
    int rc = give(c, from, bytes);
    if (rc) return rc;
    for (uint32_t i = 0; i < c->size; i++) memcpy((char *)to + i * bytes, c->slot[i], bytes);
    return end(c, OK);
}

int HcclBroadcast(void *data, uint64_t n, int type, uint32_t root, void *comm, void *stream) {
    (void)stream;
    comm_t *c = comm;
    size_t bytes = n * width(type);
    int rc = give(c, data, c->rank == root ? bytes : 0);
    if (rc) return rc;
    if (c->rank != root) memcpy(data, c->slot[root], bytes);
    return end(c, OK);
}

int HcclScatter(const void *from, void *to, uint64_t n, int type, uint32_t root, void *comm, void *stream) {
    (void)stream;
    comm_t *c = comm;
    size_t bytes = n * width(type);
    int rc = give(c, from, c->rank == root ? bytes * c->size : 0);
    if (rc) return rc;
    memcpy(to, c->slot[root] + c->rank * bytes, bytes);
    return end(c, OK);
}

int HcclAlltoAll(const void *from, uint64_t sent, int type, const void *to, uint64_t received, int to_type, void *comm,
                 void *stream) {
    (void)stream;
    comm_t *c = comm;
    size_t bytes = sent * width(type);
    if (bytes != received * width(to_type)) return BAD_ARGUMENT;
    int rc = give(c, from, bytes * c->size);
    if (rc) return rc;
    for (uint32_t i = 0; i < c->size; i++) memcpy((char *)to + i * bytes, c->slot[i] + c->rank * bytes, bytes);
    return end(c, OK);
}

int HcclAlltoAllV(const void *from, const void *sent_counts, const void *sent_at, int type, const void *to,
                  const void *counts, const void *at, int to_type, void *comm, void *stream) {
    (void)stream;
    comm_t *c = comm;
    head_t *h = c->head;
    const uint64_t *send = sent_counts, *send_at = sent_at, *receive = counts, *receive_at = at;
    size_t offset = 0;
    for (uint32_t i = 0; i < c->size; i++) {
        size_t bytes = send[i] * width(type);
        if (offset + bytes > SLOT) return BAD_ARGUMENT;
        memcpy(c->slot[c->rank] + offset, (const char *)from + send_at[i] * width(type), bytes);
        h->offset[c->rank][i] = offset;
        h->bytes[c->rank][i] = bytes;
        offset += bytes;
    }
    int rc = barrier(c);
    if (rc) return rc;
    for (uint32_t i = 0; i < c->size; i++) {
        size_t bytes = receive[i] * width(to_type);
        if (h->bytes[i][c->rank] != bytes) {
            fprintf(stderr, "hccl stand-in: rank %u sends %zu bytes, rank %u expects %zu\n", i,
                    (size_t)h->bytes[i][c->rank], c->rank, bytes);
            rc = BAD_ARGUMENT;
            continue;
        }
        memcpy((char *)to + receive_at[i] * width(to_type), c->slot[i] + h->offset[i][c->rank], bytes);
    }
    return end(c, rc);
}

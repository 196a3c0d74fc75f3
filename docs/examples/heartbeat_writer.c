/* A heartbeat writer in C, complete for one process with one lane. See ../heartbeat-abi.md.
 *
 *   cc -O2 -o heartbeat_writer heartbeat_writer.c
 *   STALLWATCH_BOARD=/dev/shm/stallwatch-... ./heartbeat_writer ROLE LANE
 *
 * The folder is made by a running `stallwatch serve`, which gives its path to what it starts. The
 * program attaches, enters "decode" with two details, nests "copy" into it, reports work, says
 * ready, and then waits for its standard input to end. A supervisor gives an empty one: start it
 * from a script that keeps a pipe open, e.g. `serve -- sh -c 'sleep 60 | ./heartbeat_writer worker main'`.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HEADER = 4096, PROCESS = 256, LANE = 640, NAMES = 256, NAME = 64 };
enum { IDLE, WORK, WAIT, START, PAUSE, STOP };

typedef struct { /* one frame of a lane */
    volatile uint64_t entered, word, progress, limit;
    volatile int64_t detail[2];
    uint64_t reserved[2];
} frame_t;

typedef struct { /* one lane slot */
    volatile uint64_t generation;
    uint32_t pid, tid;
    uint64_t ticks;
    uint32_t owner, flags;
    volatile uint64_t depth, work, too_deep;
    uint64_t reserved0;
    char name[32], reserved1[32];
    frame_t frame[4];
    char text[256];
} lane_t;

typedef struct { /* one process slot */
    volatile uint64_t stamp;
    uint64_t generation;
    uint32_t pid;
    int32_t rank;
    uint64_t ticks, attached;
    uint32_t flags, dump_signal;
    uint64_t pause_from, pause_until, reserved0[2];
    char role[32], pause_name[32], pause_owner[32], dump[48];
    uint64_t reserved1[2];
    volatile int64_t pending;
    uint64_t reserved2;
} process_t;

_Static_assert(sizeof(frame_t) == 64 && sizeof(lane_t) == LANE, "lane");
_Static_assert(sizeof(process_t) == PROCESS, "process");

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Field 22 of /proc/self/stat; comm may hold anything, so count from the last ')'. */
static uint64_t start_ticks(void) {
    char text[4096], *at;
    FILE *file = fopen("/proc/self/stat", "re");
    size_t size = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) fclose(file);
    text[size] = 0;
    at = strrchr(text, ')');
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

/* The lowest free slot, now ours; -1 when the table is full. (Taking over dead owners is left out.) */
static int claim(const char *folder, char kind, uint32_t count) {
    char path[4096], mine[64];
    int size = snprintf(mine, sizeof mine, "%d %llu\n", getpid(), (unsigned long long)start_ticks());
    for (uint32_t n = 0; n < count; n++) {
        snprintf(path, sizeof path, "%s/claims/%c%u", folder, kind, n);
        int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
        if (fd < 0) continue;
        int written = write(fd, mine, (size_t)size) == size;
        close(fd);
        if (written) return (int)n;
    }
    return -1;
}

/* Write a name once and return its number. */
static uint64_t name(char *table, int *count, const char *text, uint64_t limit) {
    char *entry = table + ++*count * NAME;
    size_t size = strnlen(text, NAME - 9);
    memcpy(entry, &limit, 8);
    entry[8] = (char)size;
    memcpy(entry + 9, text, size);
    return (uint64_t)*count;
}

/* Replace a frame: zero, the rest, the time. Volatile keeps the order; there is no call in between. */
static inline void fill(frame_t *frame, uint64_t word, int64_t a, int64_t b) {
    uint64_t at = now();
    frame->entered = 0;
    frame->word = word;
    frame->detail[0] = a;
    frame->detail[1] = b;
    frame->entered = at;
}

int main(int argc, char **argv) {
    const char *folder = getenv("STALLWATCH_BOARD");
    char path[4096];
    struct stat found;
    if (argc != 3 || !folder) {
        fputs("usage: STALLWATCH_BOARD=FOLDER heartbeat_writer ROLE LANE\n", stderr);
        return 2;
    }
    snprintf(path, sizeof path, "%s/board", folder);
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 || fstat(fd, &found) < 0 || found.st_size < HEADER) return 0; /* no board: go on */
    char *board = mmap(NULL, (size_t)found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    uint32_t head[8];
    if (board == MAP_FAILED || memcmp(board, "STLWBRD\1", 8)) return 0;
    memcpy(head, board + 8, sizeof head); /* version, header, P, 256, L, 640, 256, 64 */
    if (head[0] != 1 || head[1] != HEADER || head[3] != PROCESS || head[5] != LANE) return 0;

    int p = claim(folder, 'p', head[2]);
    int l = p < 0 ? -1 : claim(folder, 'l', head[4]);
    if (l < 0) return 0;
    process_t *process = (process_t *)(board + HEADER + p * PROCESS);
    lane_t *lane = (lane_t *)(board + HEADER + head[2] * PROCESS + l * LANE);
    char *names = board + HEADER + head[2] * PROCESS + head[4] * LANE + p * NAMES * NAME;
    int count = 0;
    memset(names, 0, NAMES * NAME);

    process->stamp = 0;
    memset((char *)process + 8, 0, PROCESS - 8);
    process->generation = process->attached = now();
    process->pid = (uint32_t)getpid();
    process->ticks = start_ticks();
    strncpy(process->role, argv[1], sizeof process->role - 1);
    process->stamp = now();

    uint64_t attached = IDLE | name(names, &count, "attached", 0) << 16;
    lane->generation = 0;
    memset((char *)lane + 8, 0, LANE - 8);
    lane->pid = (uint32_t)getpid();
    lane->tid = (uint32_t)gettid();
    lane->ticks = process->ticks;
    lane->owner = (uint32_t)p;
    lane->depth = 1;
    strncpy(lane->name, argv[2], sizeof lane->name - 1);
    fill(&lane->frame[0], attached, 0, 0);
    lane->generation = now();

    uint64_t decode = WORK | 2 << 4 | name(names, &count, "decode", 30000000000u) << 16 |
                      name(names, &count, "step", 0) << 40 | name(names, &count, "requests", 0) << 52;
    uint64_t copy = WAIT | name(names, &count, "copy", 0) << 16 |
                    name(names, &count, "worker:0/copy", 0) << 28;
    fill(&lane->frame[0], decode, 12, -4);
    fill(&lane->frame[1], copy, 0, 0);
    lane->depth = 2;
    lane->work = 7;
    lane->frame[1].progress = now();
    process->pending = 3;
    process->flags |= 1; /* ready: without it an engine never becomes READY */

    puts("attached");
    fflush(stdout);
    while (getchar() != EOF) {}
    process->flags |= 2; /* goodbye */
    return 0;
}

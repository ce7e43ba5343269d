/* An all-reduce without data: each rank queues a kernel that spins until all ranks queued theirs.
 *
 * The host may run ahead of the device by a few collectives, as an asynchronous training loop
 * does. A rank that is locked before it queues its part leaves the others spinning: this is the
 * deadlock that a group meets when its ranks are locked at different steps. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "softcuda.h"

enum { MAX_RANKS = 256, MAX_COLLECTIVES = 8 };

/* Shared by the ranks through the file named by the program; new files are all zeros. */
struct group_file {
    _Atomic uint64_t queued[MAX_RANKS];
};

struct collective {
    char path[256];
    struct group_file *file;
    int ranks;
    int rank;
    unsigned ordinal;
    bool spinning; /* the ledger was told that the device is busy */
};

static pthread_mutex_t collectives_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct collective collectives[MAX_COLLECTIVES];
static unsigned collective_count;

static uint64_t slowest(const struct collective *collective)
{
    uint64_t least = UINT64_MAX;
    for (int rank = 0; rank < collective->ranks; rank++) {
        uint64_t queued = collective->file->queued[rank];
        if (queued < least)
            least = queued;
    }
    return least;
}

static void tell_ledger(struct collective *collective, bool spinning)
{
    collective->spinning = spinning;
    ledger_lock();
    activity_work(target_slot(), device_physical(collective->ordinal),
                  spinning ? FOREVER_NS : monotonic_ns());
    ledger_unlock();
}

bool collective_pending(void)
{
    bool pending = false;
    pthread_mutex_lock(&collectives_mutex);
    for (unsigned index = 0; index < collective_count; index++) {
        struct collective *collective = &collectives[index];
        if (slowest(collective) < collective->file->queued[collective->rank])
            pending = true;
        else if (collective->spinning)
            tell_ledger(collective, false);
    }
    pthread_mutex_unlock(&collectives_mutex);
    return pending;
}

void collective_reset(void)
{
    pthread_mutex_init(&collectives_mutex, NULL);
    collective_count = 0;
}

static struct collective *join(const char *path, int ranks, int rank)
{
    for (unsigned index = 0; index < collective_count; index++)
        if (!strcmp(collectives[index].path, path))
            return &collectives[index];
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0 || collective_count == MAX_COLLECTIVES ||
        ftruncate(file, sizeof(struct group_file))) {
        if (file >= 0)
            close(file);
        return NULL;
    }
    struct group_file *map = mmap(NULL, sizeof(struct group_file), PROT_READ | PROT_WRITE,
                                  MAP_SHARED, file, 0);
    close(file);
    if (map == MAP_FAILED)
        return NULL;
    struct collective *collective = &collectives[collective_count++];
    *collective = (struct collective){.file = map, .ranks = ranks, .rank = rank};
    snprintf(collective->path, sizeof collective->path, "%s", path);
    return collective;
}

static struct collective *queue(const char *path, int ranks, int rank, unsigned ordinal)
{
    pthread_mutex_lock(&collectives_mutex);
    struct collective *collective = join(path, ranks, rank);
    if (collective && (collective->ranks != ranks || collective->rank != rank))
        collective = NULL;
    if (collective) {
        collective->ordinal = ordinal;
        collective->file->queued[rank]++;
        tell_ledger(collective, true);
    }
    pthread_mutex_unlock(&collectives_mutex);
    return collective;
}

/* Queues one all-reduce of the group of `ranks` processes that share the file `group_path`, and
 * returns when the device is at most `run_ahead` collectives behind (0: when this one is over). */
EXPORT enum result softcudaAllReduce(const char *group_path, int ranks, int rank, int run_ahead)
{
    const struct timespec rest = {0, 50000};
    unsigned ordinal;
    if (!group_path || strlen(group_path) >= sizeof collectives[0].path || ranks < 1 ||
        ranks > MAX_RANKS || rank < 0 || rank >= ranks || run_ahead < 0)
        return RESULT_INVALID_VALUE;
    enum result result = api_enter(&ordinal);
    if (result != RESULT_SUCCESS)
        return result;
    struct collective *collective = queue(group_path, ranks, rank, ordinal);
    gate_leave();
    if (!collective)
        return RESULT_INVALID_VALUE;
    uint64_t mine = collective->file->queued[rank];
    while (slowest(collective) + (uint64_t)run_ahead < mine)
        nanosleep(&rest, NULL);
    collective_pending();
    return RESULT_SUCCESS;
}

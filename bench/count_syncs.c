/* Counts the fsync and fdatasync calls of a process that preloads this, and how long each took.
 *
 * The daemon counts its own; this one is independent of it and sees sqlite's calls too. The file
 * that BENCH_SYNCS names must exist and have room for `struct syncs`; `bench/syncs.py` reads it. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { REMEMBERED = 65536 };

struct syncs {
    _Atomic uint64_t count;
    uint64_t nanoseconds[REMEMBERED];
};

static struct syncs *syncs;
static int (*real_fsync)(int);
static int (*real_fdatasync)(int);

__attribute__((constructor)) static void attach(void)
{
    real_fsync = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    const char *path = getenv("BENCH_SYNCS");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *area = mmap(NULL, sizeof *syncs, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (area != MAP_FAILED)
        syncs = area;
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int counted(int (*call)(int), int file)
{
    uint64_t started = now();
    int result = call(file);
    if (syncs) {
        uint64_t index = atomic_fetch_add(&syncs->count, 1);
        syncs->nanoseconds[index % REMEMBERED] = now() - started;
    }
    return result;
}

int fsync(int file)
{
    return counted(real_fsync, file);
}

int fdatasync(int file)
{
    return counted(real_fdatasync, file);
}

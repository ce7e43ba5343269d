/* The bytes of a device: one file per device, filled once, read and written by offset.
 *
 * It is never mapped. Device memory is therefore in nobody's resident set, and its pages are
 * charged to the memory cgroup of the process that filled the file: run softcuda-init outside
 * the jobs' cgroups and a snapshot adds to a job what it adds on real hardware. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "softcuda.h"

static pthread_mutex_t pool_mutex = PTHREAD_MUTEX_INITIALIZER;
static int descriptors[MAX_DEVICES]; /* descriptor + 1, 0 if closed */

/* Writes every byte, so that no later copy pays for the first touch of a page. */
static bool fill(int file, uint64_t bytes)
{
    enum { BLOCK = 1 << 20 };
    char *block = calloc(1, BLOCK);
    uint64_t done = 0;
    while (block && done < bytes) {
        ssize_t written = pwrite(file, block, BLOCK, (off_t)done);
        if (written > 0)
            done += (uint64_t)written;
        else if (errno != EINTR)
            break;
    }
    free(block);
    return done >= bytes;
}

static int open_file(const char *path)
{
    int file = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0 && errno == ENOENT) {
        file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (file >= 0 && fchmod(file, 0666))
            complain("can't share %s with other users: %s", path, strerror(errno));
    }
    return file;
}

static bool has_size(int file, uint64_t bytes)
{
    struct stat status;
    return !fstat(file, &status) && (uint64_t)status.st_size == bytes;
}

static int open_filled(unsigned device)
{
    char name[32], path[4096];
    struct device_entry *entry = &ledger_map()->devices[device];
    uint64_t bytes = (uint64_t)entry->page_count * PAGE_BYTES;
    snprintf(name, sizeof name, "gpu%u.memory", device);
    config_path(path, sizeof path, name);
    int file = open_file(path);
    if (file < 0) {
        complain("can't open device memory %s: %s (softcuda-init makes it)", path,
                 strerror(errno));
        return -1;
    }
    while (flock(file, LOCK_EX) && errno == EINTR)
        continue;
    bool ready = (entry->pool_ready && has_size(file, bytes)) || fill(file, bytes);
    entry->pool_ready = ready;
    flock(file, LOCK_UN);
    if (ready)
        return file;
    complain("no room for device memory %s: %s (see SOFTCUDA_MEM_MIB)", path, strerror(errno));
    close(file);
    return -1;
}

bool pool_open(unsigned device)
{
    pthread_mutex_lock(&pool_mutex);
    if (!descriptors[device])
        descriptors[device] = open_filled(device) + 1;
    bool is_open = descriptors[device] != 0;
    pthread_mutex_unlock(&pool_mutex);
    return is_open;
}

void pool_reset(void)
{
    pthread_mutex_init(&pool_mutex, NULL);
    for (unsigned device = 0; device < MAX_DEVICES; device++) {
        if (descriptors[device])
            close(descriptors[device] - 1);
        descriptors[device] = 0;
    }
}

/* Moves what lies in one page; returns the number of bytes, or 0 if the host address is bad. */
static size_t move(unsigned device, uint32_t page, uint64_t offset, void *host, size_t bytes,
                   bool to_device)
{
    int file = descriptors[device] - 1;
    off_t position = (off_t)page * PAGE_BYTES + (off_t)offset;
    for (;;) {
        ssize_t moved = to_device ? pwrite(file, host, bytes, position)
                                  : pread(file, host, bytes, position);
        if (moved >= 0 || errno != EINTR)
            return moved > 0 ? (size_t)moved : 0;
    }
}

static bool transfer(unsigned device, const uint32_t *pages, uint64_t offset, void *host,
                     size_t bytes, bool to_device)
{
    char *cursor = host;
    while (bytes) {
        uint64_t within = offset % PAGE_BYTES;
        size_t wanted = bytes < PAGE_BYTES - within ? bytes : PAGE_BYTES - within;
        size_t moved = move(device, pages[offset / PAGE_BYTES], within, cursor, wanted, to_device);
        if (!moved)
            return false;
        offset += moved;
        cursor += moved;
        bytes -= moved;
    }
    return true;
}

bool pool_read(unsigned device, const uint32_t *pages, uint64_t offset, void *host, size_t bytes)
{
    return transfer(device, pages, offset, host, bytes, false);
}

bool pool_write(unsigned device, const uint32_t *pages, uint64_t offset, const void *host,
                size_t bytes)
{
    return transfer(device, pages, offset, (void *)host, bytes, true);
}

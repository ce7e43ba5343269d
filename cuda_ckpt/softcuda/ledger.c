/* The shared ledger; see ledger.h for its rules. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "softcuda.h"

/* Changes whenever the layout does, so that old files are refused and not misread. */
#define LEDGER_MAGIC 0x736f667463753031ull
/* Far beyond the contents: these bytes exist only to be locked. */
#define LEASE_BASE ((off_t)1 << 40)

/* flock does not hold between threads that share a descriptor, hence the mutex. */
static struct {
    pthread_mutex_t mutex;
    int descriptor;
    int lease;
    size_t size;
    struct ledger *map;
} handle = {.mutex = PTHREAD_MUTEX_INITIALIZER, .descriptor = -1, .lease = -1};

static pthread_once_t fork_handler_once = PTHREAD_ONCE_INIT;

/* A forked child shares the parent's open files, and with them its locks: it must let go. */
static void forget_after_fork(void)
{
    pthread_mutex_init(&handle.mutex, NULL);
    ledger_close();
}

static void install_fork_handler(void)
{
    pthread_atfork(NULL, NULL, forget_after_fork);
}

static void hash_text(uint64_t hash[2], const char *text)
{
    for (; *text; text++) {
        hash[0] = (hash[0] ^ (uint8_t)*text) * 0x100000001b3ull;
        hash[1] = (hash[1] ^ (uint8_t)*text) * 0x880355f21e6d1965ull + 1;
    }
}

/* As with hardware, a device keeps its UUID when everything else is started anew, and no two
 * hosts or directories share one. */
static struct uuid make_uuid(unsigned device)
{
    char text[4096] = "", directory[PATH_MAX];
    uint64_t hash[2] = {0xcbf29ce484222325ull, 0x6c62272e07bb0142ull};
    struct uuid uuid;
    gethostname(text, sizeof text - 1);
    hash_text(hash, text);
    config_path(text, sizeof text, "");
    hash_text(hash, realpath(text, directory) ? directory : text);
    snprintf(text, sizeof text, "#%u", device);
    hash_text(hash, text);
    memcpy(uuid.bytes, hash, sizeof uuid.bytes);
    uuid.bytes[6] = (uint8_t)((uuid.bytes[6] & 0x0f) | 0x40);
    uuid.bytes[8] = (uint8_t)((uuid.bytes[8] & 0x3f) | 0x80);
    return uuid;
}

static void fill_geometry(struct ledger *ledger, uint32_t device_count, uint32_t page_count)
{
    ledger->device_count = device_count;
    for (unsigned device = 0; device < device_count; device++) {
        ledger->devices[device].uuid = make_uuid(device);
        ledger->devices[device].page_count = page_count;
        ledger->devices[device].first_owner = device * page_count;
    }
    if (getrandom(&ledger->instance, sizeof ledger->instance, 0) < 0)
        ledger->instance = monotonic_ns() ^ (uint64_t)getpid();
}

/* Gives a new file its size and its devices. The space is allocated now, since a full file system
 * would otherwise show as SIGBUS later; the magic comes last, so that a file whose maker was
 * killed counts as new. */
static int make_file(int descriptor)
{
    uint32_t devices = (uint32_t)config_number("SOFTCUDA_DEVICES", 2, 1, MAX_DEVICES);
    uint32_t pages = (uint32_t)config_number("SOFTCUDA_MEM_MIB", 512, 2, MAX_PAGES * 2L) / 2;
    size_t size = sizeof(struct ledger) + devices * pages * sizeof(uint16_t);
    if (ftruncate(descriptor, 0) || fchmod(descriptor, 0666))
        return errno;
    int error = posix_fallocate(descriptor, 0, (off_t)size);
    if (error)
        return error;
    struct ledger *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (map == MAP_FAILED)
        return errno;
    fill_geometry(map, devices, pages);
    map->magic = LEDGER_MAGIC;
    munmap(map, size);
    return 0;
}

/* Called with the file locked. */
static int map_file(int descriptor)
{
    struct stat status;
    uint64_t magic = 0;
    if (pread(descriptor, &magic, sizeof magic, 0) < 0)
        return errno;
    int error = magic ? 0 : make_file(descriptor);
    if (error)
        return error;
    if (fstat(descriptor, &status))
        return errno;
    size_t size = (size_t)status.st_size;
    if ((magic && magic != LEDGER_MAGIC) || size < sizeof(struct ledger))
        return EPROTO;
    struct ledger *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (map == MAP_FAILED)
        return errno;
    handle.map = map;
    handle.size = size;
    return 0;
}

static int open_file(bool create, char *path, size_t size)
{
    config_path(path, size, "");
    if (create && mkdir(path, 0755) && errno != EEXIST)
        return -1;
    config_path(path, size, "ledger");
    int descriptor = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (descriptor < 0 && errno == ENOENT && create)
        descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    return descriptor;
}

static int open_locked(bool create)
{
    char path[4096];
    int descriptor = open_file(create, path, sizeof path);
    int error = descriptor < 0 ? errno : 0;
    if (!error && flock(descriptor, LOCK_EX))
        error = errno;
    if (!error)
        error = map_file(descriptor);
    if (descriptor >= 0)
        flock(descriptor, LOCK_UN);
    if (!error) {
        handle.descriptor = descriptor;
        return 0;
    }
    if (descriptor >= 0)
        close(descriptor);
    if (error == EPROTO)
        complain("%s was made by another version of softcuda: remove its directory", path);
    else if (create || error != ENOENT)
        complain("can't use %s: %s (SOFTCUDA_DIR names the directory)", path, strerror(error));
    return error;
}

int ledger_open(bool create)
{
    pthread_once(&fork_handler_once, install_fork_handler);
    pthread_mutex_lock(&handle.mutex);
    int error = handle.map ? 0 : open_locked(create);
    pthread_mutex_unlock(&handle.mutex);
    return error;
}

void ledger_close(void)
{
    pthread_mutex_lock(&handle.mutex);
    if (handle.map)
        munmap(handle.map, handle.size);
    if (handle.descriptor >= 0)
        close(handle.descriptor);
    if (handle.lease >= 0)
        close(handle.lease);
    handle.map = NULL;
    handle.descriptor = handle.lease = -1;
    pthread_mutex_unlock(&handle.mutex);
}

struct ledger *ledger_map(void)
{
    return handle.map;
}

void ledger_lock(void)
{
    pthread_mutex_lock(&handle.mutex);
    while (flock(handle.descriptor, LOCK_EX) && errno == EINTR)
        continue;
}

void ledger_unlock(void)
{
    flock(handle.descriptor, LOCK_UN);
    pthread_mutex_unlock(&handle.mutex);
}

static bool is_alive(int slot)
{
    struct flock lease = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LEASE_BASE + slot, .l_len = 1};
    return fcntl(handle.descriptor, F_OFD_GETLK, &lease) == 0 && lease.l_type != F_UNLCK;
}

static void drop_lease(void)
{
    if (handle.lease >= 0)
        close(handle.lease);
    handle.lease = -1;
}

static bool take_lease(int slot)
{
    char path[4096];
    struct flock lease = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LEASE_BASE + slot, .l_len = 1};
    snprintf(path, sizeof path, "/proc/self/fd/%d", handle.descriptor);
    handle.lease = open(path, O_RDWR | O_CLOEXEC); /* its own open file, so its own lock */
    if (handle.lease >= 0 && fcntl(handle.lease, F_OFD_SETLK, &lease) == 0)
        return true;
    drop_lease();
    return false;
}

void ledger_reap(void)
{
    for (int slot = 0; slot < MAX_PROCESSES; slot++) {
        if (!handle.map->processes[slot].used || is_alive(slot))
            continue;
        for (unsigned device = 0; device < handle.map->device_count; device++) {
            uint16_t *owners = handle.map->owners + handle.map->devices[device].first_owner;
            for (uint32_t page = 0; page < handle.map->devices[device].page_count; page++)
                if (owners[page] == slot + 1)
                    owners[page] = 0;
        }
        memset(&handle.map->processes[slot], 0, sizeof handle.map->processes[slot]);
    }
}

int ledger_register(void)
{
    struct process_identity self;
    const char *peer_group = config_text("SOFTCUDA_IPC_GROUP", "");
    int slot = 0;
    if (!process_identify_self(&self))
        return NO_SLOT;
    ledger_reap();
    while (slot < MAX_PROCESSES && handle.map->processes[slot].used)
        slot++;
    if (slot == MAX_PROCESSES || !take_lease(slot))
        return NO_SLOT;
    struct process_entry *entry = &handle.map->processes[slot];
    entry->pid = self.innermost_pid;
    entry->start_time = self.start_time;
    entry->pid_namespace = process_own_namespace();
    if (strlen(peer_group) >= sizeof entry->peer_group)
        complain("SOFTCUDA_IPC_GROUP=%s is cut to %d bytes", peer_group, PEER_GROUP_BYTES - 1);
    snprintf(entry->peer_group, sizeof entry->peer_group, "%s", peer_group);
    entry->used = true;
    return slot;
}

void ledger_withdraw(int slot)
{
    memset(&handle.map->processes[slot], 0, sizeof handle.map->processes[slot]);
    drop_lease();
}

int ledger_find(int pid, uint64_t start_time)
{
    for (int slot = 0; slot < MAX_PROCESSES; slot++) {
        const struct process_entry *entry = &handle.map->processes[slot];
        if (entry->used && entry->pid == pid && entry->start_time == start_time && is_alive(slot))
            return slot;
    }
    return NO_SLOT;
}

uint32_t ledger_free_pages(unsigned device)
{
    const uint16_t *owners = handle.map->owners + handle.map->devices[device].first_owner;
    uint32_t count = 0;
    for (uint32_t page = 0; page < handle.map->devices[device].page_count; page++)
        count += owners[page] == 0;
    return count;
}

uint64_t ledger_used_bytes(unsigned device, int slot)
{
    const uint16_t *owners = handle.map->owners + handle.map->devices[device].first_owner;
    uint64_t count = 0;
    for (uint32_t page = 0; page < handle.map->devices[device].page_count; page++)
        count += owners[page] == slot + 1;
    return count * PAGE_BYTES;
}

bool ledger_take_pages(unsigned device, int slot, uint32_t count, uint32_t *pages)
{
    uint16_t *owners = handle.map->owners + handle.map->devices[device].first_owner;
    if (ledger_free_pages(device) < count)
        return false;
    for (uint32_t page = 0, taken = 0; taken < count; page++) {
        if (owners[page])
            continue;
        owners[page] = (uint16_t)(slot + 1);
        pages[taken++] = page;
    }
    return true;
}

void ledger_give_pages(unsigned device, const uint32_t *pages, uint32_t count)
{
    uint16_t *owners = handle.map->owners + handle.map->devices[device].first_owner;
    for (uint32_t index = 0; index < count; index++)
        owners[pages[index]] = 0;
}

/* The shared ledger: which devices exist, who holds which page of them, who is in which state.
 *
 * One file in SOFTCUDA_DIR, mapped by every process that loads softcuda. It takes the place of
 * the kernel driver: both libraries read and write it, and nothing else knows the truth.
 *
 * Rules:
 *  - everything is read and written between ledger_lock and ledger_unlock, except the counters
 *    marked _Atomic;
 *  - the page tables are the only record of who uses how much, so that a process killed half way
 *    through a call leaves nothing to repair;
 *  - an entry is alive while its process holds the lock on byte LEASE_BASE + slot of the file.
 *    The kernel drops that lock when the process dies, before it becomes a zombie, and a reused
 *    pid never holds it.
 */
#ifndef SOFTCUDA_LEDGER_H
#define SOFTCUDA_LEDGER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "abi.h"

enum {
    MAX_DEVICES = 16,
    MAX_PROCESSES = 256,
    MAX_PAGES = 65536, /* per device: 128 GiB */
    PAGE_BYTES = 2 << 20,
    PEER_GROUP_BYTES = 32,
    ACTIVITY_BUCKETS = 128,
    NO_SLOT = -1,
};

#define BUCKET_NS 20000000ull
#define FOREVER_NS UINT64_MAX

/* Busy time of a device in one 20 ms interval, summed over processes. */
struct activity_bucket {
    uint64_t index; /* monotonic time / BUCKET_NS */
    uint64_t kernel_ns;
    uint64_t copy_ns;
};

struct device_entry {
    struct uuid uuid;
    uint32_t page_count;
    uint32_t first_owner;            /* index of its first page in the owner table */
    _Atomic uint32_t pool_ready;     /* the pool file is filled */
    _Atomic uint64_t sent_bytes;     /* device to host, all time */
    _Atomic uint64_t received_bytes; /* host to device, all time */
    struct activity_bucket buckets[ACTIVITY_BUCKETS];
};

/* Kernels of one process on one device: busy until `until_ns`, of which the part up to
 * `settled_ns` is already counted in the buckets. */
struct device_work {
    uint64_t settled_ns;
    uint64_t until_ns;
};

struct process_entry {
    bool used;
    int32_t pid; /* in its own pid namespace */
    uint64_t start_time;
    uint64_t pid_namespace;
    uint32_t state;              /* enum process_state */
    bool operating;              /* a checkpoint operation is in flight */
    char peer_group[PEER_GROUP_BYTES]; /* empty: shares no memory with other processes */
    uint32_t contexts[MAX_DEVICES];
    struct device_work work[MAX_DEVICES];
};

struct ledger {
    uint64_t magic;
    uint64_t instance; /* random; part of the name of control sockets */
    uint32_t device_count;
    struct device_entry devices[MAX_DEVICES];
    struct process_entry processes[MAX_PROCESSES];
    uint16_t owners[]; /* per page: slot + 1, or 0 if free */
};

/* Maps the ledger of SOFTCUDA_DIR; with `create`, makes it with the geometry of the environment
 * if there is none. Repeating it is harmless. Returns 0 or an errno value, explained on stderr
 * unless it says that there is none. */
int ledger_open(bool create);
void ledger_close(void);
struct ledger *ledger_map(void);

void ledger_lock(void);
void ledger_unlock(void);

/* All below are called with the ledger locked. */
void ledger_reap(void);
int ledger_register(void);
void ledger_withdraw(int slot);
int ledger_find(int pid, uint64_t start_time);
uint32_t ledger_free_pages(unsigned device);
uint64_t ledger_used_bytes(unsigned device, int slot);
bool ledger_take_pages(unsigned device, int slot, uint32_t count, uint32_t *pages);
void ledger_give_pages(unsigned device, const uint32_t *pages, uint32_t count);

/* ---- activity.c, likewise with the ledger locked ---- */

void activity_work(int slot, unsigned device, uint64_t until_ns);
void activity_copy(unsigned device, uint64_t start_ns, uint64_t end_ns);
void activity_utilization(unsigned device, unsigned *kernel_percent, unsigned *copy_percent);

#endif

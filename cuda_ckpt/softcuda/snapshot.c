/* Moves the bytes of every allocation to private memory of this process, and back.
 *
 * Both run in the restore thread while the gate is closed and no call is in flight, so that the
 * list of allocations stands still. */
#include <errno.h>
#include <sys/mman.h>

#include "softcuda.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older C libraries don't name it */
#endif

enum { MAX_RESIDUE_PAGES = 512 };

#define POPULATE_BYTES ((uint64_t)16 << 20)
/* Small enough that a throttled copy moves something in every window of NVML's PCIe counters. */
#define COPY_BYTES ((uint64_t)256 << 10)

struct pace {
    uint64_t start_ns;
    uint64_t bytes;
    uint64_t bytes_per_s; /* 0: as fast as it goes */
};

static struct pace pace_start(void)
{
    long mbps = config_number("SOFTCUDA_THROTTLE_MBPS", 0, 0, 1000000);
    return (struct pace){.start_ns = monotonic_ns(), .bytes_per_s = (uint64_t)mbps * 1000000};
}

/* Sleeps until `bytes` more may have been moved. */
static void pace_advance(struct pace *pace, uint64_t bytes)
{
    pace->bytes += bytes;
    if (!pace->bytes_per_s)
        return;
    uint64_t due_ns =
        pace->start_ns + (uint64_t)((double)pace->bytes / (double)pace->bytes_per_s * 1e9);
    sleep_until_ns(due_ns);
}

/* The driver takes its host buffers with one call, not page by page, hence the populate. */
static bool save_allocation(struct allocation *allocation, struct pace *pace)
{
    unsigned device = device_physical(allocation->ordinal);
    char *saved = mmap(NULL, allocation->bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (saved == MAP_FAILED)
        return false;
    allocation->saved = saved;
    for (uint64_t offset = 0; offset < allocation->bytes; offset += COPY_BYTES) {
        uint64_t rest = allocation->bytes - offset;
        if (offset % POPULATE_BYTES == 0 &&
            madvise(saved + offset, rest < POPULATE_BYTES ? rest : POPULATE_BYTES,
                    MADV_POPULATE_WRITE) && errno != EINVAL)
            return false;
        if (!pool_read(device, allocation->pages, offset, saved + offset, COPY_BYTES))
            return false;
        ledger_map()->devices[device].sent_bytes += COPY_BYTES;
        pace_advance(pace, COPY_BYTES);
    }
    return true;
}

/* Pages that stay on each device while the process is checkpointed: a driver or an engine may not
 * give everything back. */
static uint32_t residue[MAX_DEVICES][MAX_RESIDUE_PAGES];
static uint32_t residue_count[MAX_DEVICES];

/* With the ledger locked; as much as there is room for. */
static void keep_residue(void)
{
    long mebibytes = config_number("SOFTCUDA_RESIDUE_MIB", 0, 0, MAX_RESIDUE_PAGES * 2);
    uint32_t count = (uint32_t)((mebibytes << 20) / PAGE_BYTES);
    const struct process_entry *self = &ledger_map()->processes[target_slot()];
    for (unsigned device = 0; device < ledger_map()->device_count; device++)
        if (count && self->contexts[device] &&
            ledger_take_pages(device, target_slot(), count, residue[device]))
            residue_count[device] = count;
}

static void give_residue(void)
{
    for (unsigned device = 0; device < ledger_map()->device_count; device++) {
        ledger_give_pages(device, residue[device], residue_count[device]);
        residue_count[device] = 0;
    }
}

static void drop_saved(struct allocation *allocation)
{
    if (allocation->saved)
        munmap(allocation->saved, allocation->bytes);
    allocation->saved = NULL;
}

enum result snapshot_save(void)
{
    struct pace pace = pace_start();
    struct allocation *item = memory_first();
    while (item && save_allocation(item, &pace))
        item = item->next;
    if (item) {
        for (item = memory_first(); item; item = item->next)
            drop_saved(item);
        return RESULT_OUT_OF_MEMORY;
    }
    ledger_lock();
    for (item = memory_first(); item; item = item->next)
        ledger_give_pages(device_physical(item->ordinal), item->pages, item->page_count);
    keep_residue();
    ledger_unlock();
    return RESULT_SUCCESS;
}

/* All or nothing, over all devices. */
static bool take_all_pages(void)
{
    uint64_t needed[MAX_DEVICES] = {0};
    bool fits = true;
    for (struct allocation *item = memory_first(); item; item = item->next)
        needed[device_physical(item->ordinal)] += item->page_count;
    ledger_lock();
    ledger_reap();
    give_residue();
    for (unsigned device = 0; device < ledger_map()->device_count; device++)
        fits = fits && needed[device] <= ledger_free_pages(device);
    for (struct allocation *item = memory_first(); item && fits; item = item->next)
        ledger_take_pages(device_physical(item->ordinal), target_slot(), item->page_count,
                          item->pages);
    if (!fits)
        keep_residue();
    ledger_unlock();
    return fits;
}

static enum result load_allocation(struct allocation *allocation, struct pace *pace)
{
    unsigned device = device_physical(allocation->ordinal);
    const char *saved = allocation->saved;
    if (!pool_open(device))
        return RESULT_SYSTEM_NOT_READY;
    for (uint64_t offset = 0; offset < allocation->bytes; offset += COPY_BYTES) {
        if (!pool_write(device, allocation->pages, offset, saved + offset, COPY_BYTES))
            return RESULT_UNKNOWN;
        ledger_map()->devices[device].received_bytes += COPY_BYTES;
        pace_advance(pace, COPY_BYTES);
    }
    drop_saved(allocation);
    return RESULT_SUCCESS;
}

enum result snapshot_load(void)
{
    struct pace pace = pace_start();
    enum result result = RESULT_SUCCESS;
    if (!take_all_pages())
        return RESULT_OUT_OF_MEMORY;
    for (struct allocation *item = memory_first(); item && result == RESULT_SUCCESS;
         item = item->next)
        result = load_allocation(item, &pace);
    return result;
}

/* How busy a device was lately. Busy time is kept in 20 ms buckets of the monotonic clock;
 * work in flight is a promise (busy until then) that whoever looks next settles into them. */
#include "softcuda.h"

#define WINDOW_BUCKETS 50 /* one second, the longest period over which NVML samples */

static struct activity_bucket *bucket_at(unsigned device, uint64_t index)
{
    struct activity_bucket *bucket =
        &ledger_map()->devices[device].buckets[index % ACTIVITY_BUCKETS];
    if (bucket->index != index)
        *bucket = (struct activity_bucket){.index = index};
    return bucket;
}

static void add_busy(unsigned device, uint64_t start_ns, uint64_t end_ns, bool is_copy)
{
    const uint64_t kept_ns = (ACTIVITY_BUCKETS - 1) * BUCKET_NS;
    if (end_ns > kept_ns && start_ns < end_ns - kept_ns)
        start_ns = end_ns - kept_ns;
    while (start_ns < end_ns) {
        uint64_t index = start_ns / BUCKET_NS;
        uint64_t stop_ns = (index + 1) * BUCKET_NS < end_ns ? (index + 1) * BUCKET_NS : end_ns;
        struct activity_bucket *bucket = bucket_at(device, index);
        bucket->kernel_ns += stop_ns - start_ns;
        if (is_copy)
            bucket->copy_ns += stop_ns - start_ns;
        start_ns = stop_ns;
    }
}

static void settle(int slot, unsigned device, uint64_t now_ns)
{
    struct device_work *work = &ledger_map()->processes[slot].work[device];
    uint64_t end_ns = work->until_ns < now_ns ? work->until_ns : now_ns;
    if (end_ns <= work->settled_ns)
        return;
    add_busy(device, work->settled_ns, end_ns, false);
    work->settled_ns = end_ns;
}

void activity_work(int slot, unsigned device, uint64_t until_ns)
{
    struct device_work *work = &ledger_map()->processes[slot].work[device];
    uint64_t now_ns = monotonic_ns();
    settle(slot, device, now_ns);
    if (work->until_ns <= now_ns)
        work->settled_ns = now_ns;
    work->until_ns = until_ns;
}

void activity_copy(unsigned device, uint64_t start_ns, uint64_t end_ns)
{
    add_busy(device, start_ns, end_ns, true);
}

static unsigned percent(uint64_t part, uint64_t whole)
{
    uint64_t value = whole ? (part * 100 + whole / 2) / whole : 0;
    return (unsigned)(value > 100 ? 100 : value);
}

void activity_utilization(unsigned device, unsigned *kernel_percent, unsigned *copy_percent)
{
    uint64_t now_ns = monotonic_ns(), now_index = now_ns / BUCKET_NS;
    uint64_t kernel_ns = 0, copy_ns = 0;
    for (int slot = 0; slot < MAX_PROCESSES; slot++)
        if (ledger_map()->processes[slot].used)
            settle(slot, device, now_ns);
    for (uint64_t index = now_index - WINDOW_BUCKETS; index < now_index; index++) {
        const struct activity_bucket *bucket = bucket_at(device, index);
        kernel_ns += bucket->kernel_ns < BUCKET_NS ? bucket->kernel_ns : BUCKET_NS;
        copy_ns += bucket->copy_ns < BUCKET_NS ? bucket->copy_ns : BUCKET_NS;
    }
    *kernel_percent = percent(kernel_ns, WINDOW_BUCKETS * BUCKET_NS);
    *copy_percent = percent(copy_ns, WINDOW_BUCKETS * BUCKET_NS);
}

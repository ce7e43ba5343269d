/* The driver's functions for memory and work. Copies are ordered after the work queued before
 * them, as on the default stream. */
#include <stdlib.h>
#include <string.h>

#include "softcuda.h"

enum { BLOCK_BYTES = 256 << 10 };

EXPORT enum result cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    unsigned ordinal;
    enum result result = api_enter(&ordinal);
    if (result != RESULT_SUCCESS)
        return result;
    if (free_bytes && total_bytes) {
        unsigned device = device_physical(ordinal);
        ledger_lock();
        ledger_reap();
        *free_bytes = (size_t)ledger_free_pages(device) * PAGE_BYTES;
        *total_bytes = (size_t)ledger_map()->devices[device].page_count * PAGE_BYTES;
        ledger_unlock();
    } else {
        result = RESULT_INVALID_VALUE;
    }
    gate_leave();
    return result;
}

static enum result allocate(uint64_t *address, size_t bytes, bool managed)
{
    unsigned ordinal;
    struct fault fault = faults_for(FAULT_ALLOC);
    enum result result = api_enter(&ordinal);
    if (result != RESULT_SUCCESS)
        return result;
    fault_before(&fault);
    if (!address)
        result = RESULT_INVALID_VALUE;
    else if (fault.kind == FAULT_ERROR)
        result = (enum result)fault.code;
    else
        result = memory_allocate(context_current(), bytes, managed, address);
    gate_leave();
    return result;
}

EXPORT enum result cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    return allocate(address, bytes, false);
}

/* The host can't touch it, unlike the real thing: it is there to make a checkpoint fail. */
EXPORT enum result cuMemAllocManaged(uint64_t *address, size_t bytes, unsigned flags)
{
    (void)flags;
    return allocate(address, bytes, true);
}

EXPORT enum result cuMemFree_v2(uint64_t address)
{
    unsigned ordinal;
    enum result result = api_enter(&ordinal);
    if (result != RESULT_SUCCESS)
        return result;
    gate_synchronize(ordinal);
    if (address)
        result = memory_free(address);
    gate_leave();
    return result;
}

/* A call that touches device memory: where it lies and since when it runs. */
struct access {
    struct allocation *allocation;
    unsigned device;
    uint64_t offset;
    uint64_t start_ns;
};

static enum result access_begin(struct access *access, uint64_t address, uint64_t bytes)
{
    unsigned ordinal;
    enum result result = api_enter(&ordinal);
    if (result != RESULT_SUCCESS)
        return result;
    access->allocation = memory_find(address, bytes);
    if (!access->allocation) {
        gate_leave();
        return RESULT_INVALID_VALUE;
    }
    gate_synchronize(access->allocation->ordinal);
    access->device = device_physical(access->allocation->ordinal);
    access->offset = address - access->allocation->address;
    access->start_ns = monotonic_ns();
    return RESULT_SUCCESS;
}

static enum result access_end(const struct access *access, bool done)
{
    ledger_lock();
    activity_copy(access->device, access->start_ns, monotonic_ns());
    ledger_unlock();
    gate_leave();
    return done ? RESULT_SUCCESS : RESULT_INVALID_VALUE;
}

EXPORT enum result cuMemcpyHtoD_v2(uint64_t destination, const void *source, size_t bytes)
{
    struct access access;
    enum result result = access_begin(&access, destination, bytes);
    if (result != RESULT_SUCCESS)
        return result;
    bool done = pool_write(access.device, access.allocation->pages, access.offset, source, bytes);
    ledger_map()->devices[access.device].received_bytes += bytes;
    return access_end(&access, done);
}

EXPORT enum result cuMemcpyDtoH_v2(void *destination, uint64_t source, size_t bytes)
{
    struct access access;
    enum result result = access_begin(&access, source, bytes);
    if (result != RESULT_SUCCESS)
        return result;
    bool done = pool_read(access.device, access.allocation->pages, access.offset, destination,
                          bytes);
    ledger_map()->devices[access.device].sent_bytes += bytes;
    return access_end(&access, done);
}

EXPORT enum result cuMemcpyDtoD_v2(uint64_t destination, uint64_t source, size_t bytes)
{
    struct access access;
    enum result result = access_begin(&access, destination, bytes);
    if (result != RESULT_SUCCESS)
        return result;
    const struct allocation *from = memory_find(source, bytes);
    char *block = malloc(BLOCK_BYTES);
    bool done = from && block;
    for (size_t moved = 0; done && moved < bytes;) {
        size_t part = bytes - moved < BLOCK_BYTES ? bytes - moved : BLOCK_BYTES;
        done = pool_read(device_physical(from->ordinal), from->pages,
                         source - from->address + moved, block, part) &&
               pool_write(access.device, access.allocation->pages, access.offset + moved, block,
                          part);
        moved += part;
    }
    free(block);
    return access_end(&access, done);
}

/* Writes `count` copies of the `width` bytes of `value`. */
static enum result fill(uint64_t address, const void *value, size_t width, size_t count)
{
    struct access access;
    if (address % width || count > SIZE_MAX / width)
        return RESULT_INVALID_VALUE;
    size_t bytes = count * width;
    enum result result = access_begin(&access, address, bytes);
    if (result != RESULT_SUCCESS)
        return result;
    char *block = malloc(BLOCK_BYTES);
    for (size_t offset = 0; block && offset < BLOCK_BYTES; offset += width)
        memcpy(block + offset, value, width);
    bool done = block != NULL;
    for (size_t moved = 0; done && moved < bytes;) {
        size_t part = bytes - moved < BLOCK_BYTES ? bytes - moved : BLOCK_BYTES;
        done = pool_write(access.device, access.allocation->pages, access.offset + moved, block,
                          part);
        moved += part;
    }
    free(block);
    return access_end(&access, done);
}

EXPORT enum result cuMemsetD8_v2(uint64_t address, unsigned char value, size_t count)
{
    return fill(address, &value, sizeof value, count);
}

EXPORT enum result cuMemsetD32_v2(uint64_t address, unsigned value, size_t count)
{
    return fill(address, &value, sizeof value, count);
}

/* Queues a kernel that keeps the current device busy for `ms` milliseconds, and returns. */
EXPORT enum result softcudaLaunch(unsigned ms)
{
    unsigned ordinal;
    enum result result = api_enter(&ordinal);
    if (result != RESULT_SUCCESS)
        return result;
    gate_launch(ordinal, ms);
    gate_leave();
    return RESULT_SUCCESS;
}

/* Allocations of this process: a reserved address range and the device pages behind it. */
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "softcuda.h"

static pthread_mutex_t memory_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *allocations;

static enum result take_pages(struct allocation *allocation)
{
    ledger_lock();
    ledger_reap();
    bool taken = ledger_take_pages(device_physical(allocation->ordinal), target_slot(),
                                   allocation->page_count, allocation->pages);
    ledger_unlock();
    return taken ? RESULT_SUCCESS : RESULT_OUT_OF_MEMORY;
}

/* The range is never readable: a program that dereferences device memory on the host crashes,
 * as it does with real hardware, and nothing else can be mapped there while it is off the
 * device. */
static enum result reserve(struct allocation *allocation)
{
    void *address = mmap(NULL, allocation->bytes, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        return RESULT_OUT_OF_MEMORY;
    allocation->address = (uint64_t)(uintptr_t)address;
    return RESULT_SUCCESS;
}

static void release(struct allocation *allocation)
{
    ledger_lock();
    ledger_give_pages(device_physical(allocation->ordinal), allocation->pages,
                      allocation->page_count);
    ledger_unlock();
    munmap((void *)(uintptr_t)allocation->address, allocation->bytes);
    free(allocation->pages);
    free(allocation);
}

enum result memory_allocate(const struct context *context, uint64_t bytes, bool managed,
                            uint64_t *address)
{
    uint64_t page_count = bytes / PAGE_BYTES + (bytes % PAGE_BYTES != 0);
    if (!bytes)
        return RESULT_INVALID_VALUE;
    if (page_count > MAX_PAGES)
        return RESULT_OUT_OF_MEMORY;
    struct allocation *allocation = calloc(1, sizeof *allocation);
    uint32_t *pages = calloc(page_count, sizeof *pages);
    enum result result = RESULT_OUT_OF_MEMORY;
    if (allocation && pages) {
        *allocation = (struct allocation){.context = context,
                                          .bytes = page_count * PAGE_BYTES,
                                          .ordinal = context_ordinal(context),
                                          .managed = managed,
                                          .page_count = (uint32_t)page_count,
                                          .pages = pages};
        result = reserve(allocation);
        if (result == RESULT_SUCCESS && (result = take_pages(allocation)) != RESULT_SUCCESS)
            munmap((void *)(uintptr_t)allocation->address, allocation->bytes);
    }
    if (result != RESULT_SUCCESS) {
        free(pages);
        free(allocation);
        return result;
    }
    pthread_mutex_lock(&memory_mutex);
    allocation->next = allocations;
    allocations = allocation;
    pthread_mutex_unlock(&memory_mutex);
    *address = allocation->address;
    return RESULT_SUCCESS;
}

enum result memory_free(uint64_t address)
{
    pthread_mutex_lock(&memory_mutex);
    struct allocation **link = &allocations;
    while (*link && (*link)->address != address)
        link = &(*link)->next;
    struct allocation *found = *link;
    if (found)
        *link = found->next;
    pthread_mutex_unlock(&memory_mutex);
    if (!found)
        return RESULT_INVALID_VALUE;
    release(found);
    return RESULT_SUCCESS;
}

void memory_free_context(const struct context *context)
{
    pthread_mutex_lock(&memory_mutex);
    for (struct allocation **link = &allocations; *link;) {
        struct allocation *allocation = *link;
        if (allocation->context != context) {
            link = &allocation->next;
            continue;
        }
        *link = allocation->next;
        release(allocation);
    }
    pthread_mutex_unlock(&memory_mutex);
}

struct allocation *memory_find(uint64_t address, uint64_t bytes)
{
    pthread_mutex_lock(&memory_mutex);
    struct allocation *item = allocations;
    while (item && (address < item->address || address - item->address > item->bytes ||
                    bytes > item->bytes - (address - item->address)))
        item = item->next;
    pthread_mutex_unlock(&memory_mutex);
    return item;
}

struct allocation *memory_first(void)
{
    return allocations;
}

void memory_reset(void)
{
    pthread_mutex_init(&memory_mutex, NULL);
    allocations = NULL;
}

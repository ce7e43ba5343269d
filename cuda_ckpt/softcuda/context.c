/* Contexts: one primary context per device, any number of others, one current per thread. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "softcuda.h"

struct context {
    struct context *next;
    unsigned ordinal;
    unsigned references; /* of a primary context; 0 for others */
    bool is_primary;
};

static pthread_mutex_t contexts_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct context *contexts;
static _Thread_local struct context *current;

static bool is_alive(const struct context *context)
{
    for (const struct context *item = contexts; item; item = item->next)
        if (item == context)
            return true;
    return false;
}

struct context *context_current(void)
{
    pthread_mutex_lock(&contexts_mutex);
    if (!is_alive(current))
        current = NULL;
    pthread_mutex_unlock(&contexts_mutex);
    return current;
}

unsigned context_ordinal(const struct context *context)
{
    return context->ordinal;
}

bool contexts_any(void)
{
    return contexts != NULL;
}

static void publish_locked(void)
{
    struct process_entry *entry = &ledger_map()->processes[target_slot()];
    ledger_lock();
    memset(entry->contexts, 0, sizeof entry->contexts);
    for (const struct context *item = contexts; item; item = item->next)
        entry->contexts[device_physical(item->ordinal)]++;
    ledger_unlock();
}

void contexts_publish(void)
{
    pthread_mutex_lock(&contexts_mutex);
    publish_locked();
    pthread_mutex_unlock(&contexts_mutex);
}

void contexts_reset(void)
{
    pthread_mutex_init(&contexts_mutex, NULL);
    contexts = NULL; /* leaked: a few bytes per fork */
    current = NULL;
}

enum result api_enter(unsigned *ordinal)
{
    enum result result = gate_enter();
    if (result != RESULT_SUCCESS)
        return result;
    const struct context *context = context_current();
    if (!context) {
        gate_leave();
        return RESULT_INVALID_CONTEXT;
    }
    *ordinal = context->ordinal;
    return RESULT_SUCCESS;
}

/* What the driver needs for itself is ordinary memory of the context: it is saved, restored
 * and freed with it. */
static enum result make_context(unsigned ordinal, bool is_primary, struct context **made)
{
    uint64_t address;
    uint64_t overhead = (uint64_t)config_number("SOFTCUDA_CONTEXT_MIB", 2, 0, 65536) << 20;
    struct context *context = calloc(1, sizeof *context);
    if (!context)
        return RESULT_OUT_OF_MEMORY;
    context->ordinal = ordinal;
    context->is_primary = is_primary;
    enum result result = RESULT_SUCCESS;
    if (!pool_open(device_physical(ordinal)))
        result = RESULT_SYSTEM_NOT_READY;
    else if (overhead)
        result = memory_allocate(context, overhead, false, &address);
    if (result != RESULT_SUCCESS) {
        free(context);
        return result;
    }
    context->next = contexts;
    contexts = context;
    publish_locked();
    *made = context;
    return RESULT_SUCCESS;
}

static void destroy_context(struct context *context)
{
    struct context **link = &contexts;
    while (*link != context)
        link = &(*link)->next;
    *link = context->next;
    memory_free_context(context);
    publish_locked();
    free(context);
}

static struct context *find_primary(unsigned ordinal)
{
    struct context *item = contexts;
    while (item && !(item->is_primary && item->ordinal == ordinal))
        item = item->next;
    return item;
}

EXPORT enum result cuCtxCreate_v2(struct context **context, unsigned flags, int device)
{
    (void)flags;
    enum result result = gate_enter();
    if (result != RESULT_SUCCESS)
        return result;
    if (!context)
        result = RESULT_INVALID_VALUE;
    else if (device < 0 || (unsigned)device >= devices_visible())
        result = RESULT_INVALID_DEVICE;
    if (result == RESULT_SUCCESS) {
        pthread_mutex_lock(&contexts_mutex);
        result = make_context((unsigned)device, false, context);
        pthread_mutex_unlock(&contexts_mutex);
    }
    if (result == RESULT_SUCCESS)
        current = *context;
    gate_leave();
    return result;
}

EXPORT enum result cuCtxDestroy_v2(struct context *context)
{
    enum result result = gate_enter();
    if (result != RESULT_SUCCESS)
        return result;
    pthread_mutex_lock(&contexts_mutex);
    if (!is_alive(context) || context->is_primary)
        result = RESULT_INVALID_CONTEXT;
    else
        destroy_context(context);
    pthread_mutex_unlock(&contexts_mutex);
    gate_leave();
    return result;
}

EXPORT enum result cuDevicePrimaryCtxRetain(struct context **context, int device)
{
    enum result result = gate_enter();
    if (result != RESULT_SUCCESS)
        return result;
    if (!context)
        result = RESULT_INVALID_VALUE;
    else if (device < 0 || (unsigned)device >= devices_visible())
        result = RESULT_INVALID_DEVICE;
    if (result == RESULT_SUCCESS) {
        pthread_mutex_lock(&contexts_mutex);
        struct context *primary = find_primary((unsigned)device);
        if (!primary)
            result = make_context((unsigned)device, true, &primary);
        if (result == RESULT_SUCCESS) {
            primary->references++;
            *context = primary;
        }
        pthread_mutex_unlock(&contexts_mutex);
    }
    gate_leave();
    return result;
}

EXPORT enum result cuDevicePrimaryCtxRelease_v2(int device)
{
    enum result result = gate_enter();
    if (result != RESULT_SUCCESS)
        return result;
    pthread_mutex_lock(&contexts_mutex);
    struct context *primary = device < 0 ? NULL : find_primary((unsigned)device);
    if (device < 0 || (unsigned)device >= devices_visible())
        result = RESULT_INVALID_DEVICE;
    else if (!primary)
        result = RESULT_INVALID_CONTEXT;
    else if (--primary->references == 0)
        destroy_context(primary);
    pthread_mutex_unlock(&contexts_mutex);
    gate_leave();
    return result;
}

EXPORT enum result cuCtxSetCurrent(struct context *context)
{
    enum result result = gate_enter();
    if (result != RESULT_SUCCESS)
        return result;
    pthread_mutex_lock(&contexts_mutex);
    if (context && !is_alive(context))
        result = RESULT_INVALID_CONTEXT;
    else
        current = context;
    pthread_mutex_unlock(&contexts_mutex);
    gate_leave();
    return result;
}

EXPORT enum result cuCtxGetCurrent(struct context **context)
{
    enum result result = gate_enter();
    if (result != RESULT_SUCCESS)
        return result;
    if (context)
        *context = context_current();
    gate_leave();
    return context ? RESULT_SUCCESS : RESULT_INVALID_VALUE;
}

EXPORT enum result cuCtxGetDevice(int *device)
{
    unsigned ordinal;
    enum result result = api_enter(&ordinal);
    if (result != RESULT_SUCCESS)
        return result;
    if (device)
        *device = (int)ordinal;
    gate_leave();
    return device ? RESULT_SUCCESS : RESULT_INVALID_VALUE;
}

EXPORT enum result cuCtxSynchronize(void)
{
    unsigned ordinal;
    enum result result = api_enter(&ordinal);
    if (result != RESULT_SUCCESS)
        return result;
    gate_synchronize(ordinal);
    gate_leave();
    return RESULT_SUCCESS;
}

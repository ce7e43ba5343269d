/* The six checkpoint functions. A driver of the 550 generation is built without this file. */
#include <string.h>

#include "softcuda.h"

static bool all_zero(const void *bytes, size_t size)
{
    const uint8_t *cursor = bytes;
    while (size--)
        if (*cursor++)
            return false;
    return true;
}

EXPORT enum result cuCheckpointProcessGetState(int pid, enum process_state *state)
{
    int value;
    struct request request = {.operation = OPERATION_STATE};
    if (!state)
        return RESULT_INVALID_VALUE;
    enum result result = caller_request(pid, &request, &value);
    if (result == RESULT_SUCCESS)
        *state = (enum process_state)value;
    return result;
}

EXPORT enum result cuCheckpointProcessGetRestoreThreadId(int pid, int *thread)
{
    struct request request = {.operation = OPERATION_THREAD};
    return thread ? caller_request(pid, &request, thread) : RESULT_INVALID_VALUE;
}

EXPORT enum result cuCheckpointProcessLock(int pid, const struct lock_arguments *arguments)
{
    struct request request = {.operation = OPERATION_LOCK};
    if (arguments) {
        if (arguments->reserved0 || !all_zero(arguments->reserved1, sizeof arguments->reserved1))
            return RESULT_INVALID_VALUE;
        request.timeout_ms = arguments->timeout_ms;
    }
    return caller_request(pid, &request, NULL);
}

EXPORT enum result cuCheckpointProcessCheckpoint(int pid, const struct plain_arguments *arguments)
{
    struct request request = {.operation = OPERATION_CHECKPOINT};
    if (arguments) {
        if (!all_zero(arguments->words + 1, sizeof arguments->words - sizeof(uint64_t)))
            return RESULT_INVALID_VALUE;
        if (arguments->words[0])
            return config_driver_version() >= VERSION_CUSTOM_STORAGE ? RESULT_NOT_SUPPORTED
                                                                     : RESULT_INVALID_VALUE;
    }
    return caller_request(pid, &request, NULL);
}

/* Copies the device map, which exists since 13.0. */
static enum result read_restore_arguments(const struct restore_arguments *arguments,
                                          struct request *request)
{
    enum { STORAGE = 4, AFTER_STORAGE = 12 }; /* offsets in `rest` */
    unsigned version = config_driver_version();
    if (version < VERSION_MIGRATION)
        return all_zero(arguments, sizeof *arguments) ? RESULT_SUCCESS : RESULT_INVALID_VALUE;
    if (!all_zero(arguments->rest, STORAGE) ||
        !all_zero(arguments->rest + AFTER_STORAGE, sizeof arguments->rest - AFTER_STORAGE))
        return RESULT_INVALID_VALUE;
    if (!all_zero(arguments->rest + STORAGE, AFTER_STORAGE - STORAGE))
        return version >= VERSION_CUSTOM_STORAGE ? RESULT_NOT_SUPPORTED : RESULT_INVALID_VALUE;
    if (arguments->pair_count > MAX_DEVICES || (arguments->pair_count && !arguments->pairs))
        return RESULT_INVALID_VALUE;
    request->pair_count = arguments->pair_count;
    if (arguments->pair_count)
        memcpy(request->pairs, arguments->pairs, arguments->pair_count * sizeof *request->pairs);
    return RESULT_SUCCESS;
}

EXPORT enum result cuCheckpointProcessRestore(int pid, const struct restore_arguments *arguments)
{
    struct request request = {.operation = OPERATION_RESTORE};
    enum result result =
        arguments ? read_restore_arguments(arguments, &request) : RESULT_SUCCESS;
    if (result != RESULT_SUCCESS)
        return result;
    /* Without persistence the devices sleep unless someone holds the driver open. */
    if (!target_initialized() && !config_flag("SOFTCUDA_PERSISTENCE", true))
        return RESULT_NOT_PERMITTED;
    return caller_request(pid, &request, NULL);
}

EXPORT enum result cuCheckpointProcessUnlock(int pid, const struct plain_arguments *arguments)
{
    struct request request = {.operation = OPERATION_UNLOCK};
    if (arguments && !all_zero(arguments, sizeof *arguments))
        return RESULT_INVALID_VALUE;
    return caller_request(pid, &request, NULL);
}

/* The checkpoint operations of this process, carried out by its restore thread.
 *
 *     RUNNING -lock-> LOCKED -checkpoint-> CHECKPOINTED -restore-> LOCKED -unlock-> RUNNING
 *
 * Every other pair of state and operation is ILLEGAL_STATE and changes nothing. FAILED is final:
 * calls of the program stay blocked until someone kills it. */
#include <string.h>

#include "softcuda.h"

/* A restore that ran out of device memory can't be tried again, nor undone. */
static bool is_stuck;

static enum result run_lock(unsigned timeout_ms)
{
    if (gate_state() != STATE_RUNNING)
        return RESULT_ILLEGAL_STATE;
    enum result result = gate_lock(timeout_ms);
    if (result != RESULT_SUCCESS)
        gate_unlock();
    return result;
}

/* Resources that the driver can't save. With MIG it reports out of memory. */
static enum result find_unsupported(void)
{
    const char *resource = config_text("SOFTCUDA_UNSUPPORTED", NULL);
    if (resource)
        return strcmp(resource, "mig") ? RESULT_NOT_SUPPORTED : RESULT_OUT_OF_MEMORY;
    for (const struct allocation *item = memory_first(); item; item = item->next)
        if (item->managed)
            return RESULT_NOT_SUPPORTED;
    return RESULT_SUCCESS;
}

static enum result run_checkpoint(void)
{
    if (gate_state() != STATE_LOCKED)
        return RESULT_ILLEGAL_STATE;
    enum result result = find_unsupported();
    if (result == RESULT_SUCCESS)
        result = snapshot_save();
    gate_set_state(result == RESULT_SUCCESS ? STATE_CHECKPOINTED : STATE_FAILED);
    return result;
}

static enum result run_restore(const struct request *request)
{
    unsigned before[MAX_DEVICES] = {0}, after[MAX_DEVICES] = {0};
    if (is_stuck)
        return RESULT_OPERATING_SYSTEM;
    if (gate_state() != STATE_CHECKPOINTED)
        return RESULT_ILLEGAL_STATE;
    for (unsigned ordinal = 0; ordinal < devices_visible(); ordinal++)
        before[ordinal] = device_physical(ordinal);
    if (request->pair_count) {
        enum result result = devices_check_pairs(request->pairs, request->pair_count, after);
        if (result != RESULT_SUCCESS)
            return result;
        devices_migrate(after);
    }
    enum result result = snapshot_load();
    if (result == RESULT_SUCCESS) {
        contexts_publish();
        gate_set_state(STATE_LOCKED);
    } else if (result == RESULT_OUT_OF_MEMORY) {
        is_stuck = config_flag("SOFTCUDA_STICKY_OOM", true);
        devices_migrate(before);
    } else {
        gate_set_state(STATE_FAILED);
    }
    return result;
}

static enum result run_unlock(void)
{
    if (gate_state() != STATE_LOCKED)
        return RESULT_ILLEGAL_STATE;
    gate_set_state(STATE_RUNNING);
    gate_unlock();
    return RESULT_SUCCESS;
}

enum result operation_run(const struct request *request)
{
    switch (request->operation) {
    case OPERATION_LOCK:
        return run_lock(request->timeout_ms);
    case OPERATION_CHECKPOINT:
        return run_checkpoint();
    case OPERATION_RESTORE:
        return run_restore(request);
    case OPERATION_UNLOCK:
        return run_unlock();
    default:
        return RESULT_INVALID_VALUE;
    }
}

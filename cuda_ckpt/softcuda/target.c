/* This process as a target: cuInit makes it one, a fork makes the child none. */
#include <pthread.h>

#include "softcuda.h"

static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool initialized;
static bool is_forked_child;
static int own_slot = NO_SLOT;

bool target_initialized(void)
{
    return initialized;
}

int target_slot(void)
{
    return own_slot;
}

/* CUDA does not survive a fork: the child owns none of the parent's device state and can't get
 * any of its own. It may still call the checkpoint functions on others. */
static void forget_after_fork(void)
{
    pthread_mutex_init(&init_mutex, NULL);
    is_forked_child = is_forked_child || initialized;
    initialized = false;
    own_slot = NO_SLOT;
    faults_reset();
    control_reset();
    memory_reset();
    contexts_reset();
    collective_reset();
    pool_reset();
    gate_reset();
}

static bool register_target(void)
{
    ledger_lock();
    own_slot = ledger_register();
    bool started = own_slot != NO_SLOT &&
                   control_listen(own_slot, ledger_map()->processes[own_slot].start_time) &&
                   control_start();
    if (own_slot != NO_SLOT && !started) {
        ledger_withdraw(own_slot);
        control_reset();
    }
    ledger_unlock();
    return started;
}

static enum result initialize(void)
{
    struct fault fault = faults_for(FAULT_INIT);
    sleep_ms((unsigned)config_number("SOFTCUDA_INIT_MS", 0, 0, 600000));
    fault_before(&fault);
    if (fault.kind == FAULT_ERROR)
        return (enum result)fault.code;
    if (ledger_open(true))
        return RESULT_SYSTEM_NOT_READY;
    enum result result = devices_choose();
    if (result != RESULT_SUCCESS)
        return result;
    if (!register_target()) {
        complain("can't register with the ledger (at most %d processes)", MAX_PROCESSES);
        return RESULT_UNKNOWN;
    }
    pthread_atfork(NULL, NULL, forget_after_fork);
    initialized = true;
    return RESULT_SUCCESS;
}

enum result target_initialize(void)
{
    if (is_forked_child)
        return RESULT_NOT_INITIALIZED;
    pthread_mutex_lock(&init_mutex);
    enum result result = initialized ? RESULT_SUCCESS : initialize();
    pthread_mutex_unlock(&init_mutex);
    return result;
}

/* At exit the CUDA runtime unloads its modules, which is an API call like any other: it blocks
 * while the process is locked. Off unless asked for, since a driver program need not do it. */
__attribute__((destructor)) static void leave(void)
{
    if (!initialized || !config_flag("SOFTCUDA_EXIT_BLOCKS", false) || !contexts_any())
        return;
    if (gate_enter() == RESULT_SUCCESS)
        gate_leave();
    control_drain(); /* whoever let us go is told so before we are gone */
}

/* The gate that every API call passes. A lock closes it, waits until no call and no work is in
 * flight, and leaves it closed; callers block inside their call until it opens again. */
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "softcuda.h"

#define COLLECTIVE_POLL_NS 500000ull

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    enum process_state state;
    bool closing; /* a lock waits for work to end */
    bool wedged;  /* the caller of an operation was killed half way: nothing passes any more */
    unsigned active;
    uint64_t busy_until_ns[MAX_DEVICES]; /* by ordinal */
} gate = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

enum result gate_enter(void)
{
    if (!target_initialized())
        return RESULT_NOT_INITIALIZED;
    pthread_mutex_lock(&gate.mutex);
    while (gate.state != STATE_RUNNING || gate.closing || gate.wedged)
        pthread_cond_wait(&gate.changed, &gate.mutex);
    gate.active++;
    pthread_mutex_unlock(&gate.mutex);
    return RESULT_SUCCESS;
}

void gate_leave(void)
{
    pthread_mutex_lock(&gate.mutex);
    gate.active--;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.mutex);
}

enum process_state gate_state(void)
{
    pthread_mutex_lock(&gate.mutex);
    enum process_state state = gate.state;
    pthread_mutex_unlock(&gate.mutex);
    return state;
}

static void publish(enum process_state state)
{
    ledger_lock();
    ledger_map()->processes[target_slot()].state = state;
    ledger_unlock();
}

/* The ledger learns of it first: whoever is let in by the gate finds it up to date. */
void gate_set_state(enum process_state state)
{
    publish(state);
    pthread_mutex_lock(&gate.mutex);
    gate.state = state;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.mutex);
}

static void wait_until(uint64_t time_ns)
{
    struct timespec until = {(time_t)(time_ns / 1000000000u), (long)(time_ns % 1000000000u)};
    pthread_cond_clockwait(&gate.changed, &gate.mutex, CLOCK_MONOTONIC, &until);
}

/* When to look again for the end of what is in flight, or 0 if nothing is. */
static uint64_t next_look(uint64_t now_ns)
{
    uint64_t look_ns = 0;
    if (collective_pending())
        return now_ns + COLLECTIVE_POLL_NS;
    for (unsigned ordinal = 0; ordinal < devices_visible(); ordinal++)
        if (gate.busy_until_ns[ordinal] > now_ns && gate.busy_until_ns[ordinal] > look_ns)
            look_ns = gate.busy_until_ns[ordinal];
    if (!look_ns && gate.active)
        look_ns = now_ns + 1000000000u; /* the end of a call wakes us before that */
    return look_ns;
}

enum result gate_lock(unsigned timeout_ms)
{
    enum result result = RESULT_SUCCESS;
    uint64_t now_ns = monotonic_ns();
    uint64_t deadline_ns = timeout_ms ? now_ns + timeout_ms * 1000000ull : FOREVER_NS;
    pthread_mutex_lock(&gate.mutex);
    gate.closing = true;
    for (uint64_t look_ns; (look_ns = next_look(now_ns)) != 0; now_ns = monotonic_ns()) {
        if (now_ns >= deadline_ns) {
            result = RESULT_NOT_READY;
            break;
        }
        wait_until(look_ns < deadline_ns ? look_ns : deadline_ns);
    }
    pthread_mutex_unlock(&gate.mutex);
    if (result == RESULT_SUCCESS)
        gate_set_state(STATE_LOCKED);
    return result;
}

/* Lets calls in again, after a lock that failed or an unlock. */
void gate_unlock(void)
{
    pthread_mutex_lock(&gate.mutex);
    gate.closing = false;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.mutex);
}

void gate_wedge(void)
{
    pthread_mutex_lock(&gate.mutex);
    gate.wedged = true;
    pthread_mutex_unlock(&gate.mutex);
}

void gate_launch(unsigned ordinal, unsigned ms)
{
    uint64_t now_ns = monotonic_ns();
    pthread_mutex_lock(&gate.mutex);
    uint64_t start_ns = gate.busy_until_ns[ordinal];
    if (start_ns < now_ns)
        start_ns = now_ns;
    uint64_t until_ns = start_ns + ms * 1000000ull;
    gate.busy_until_ns[ordinal] = until_ns;
    pthread_mutex_unlock(&gate.mutex);
    if (collective_pending())
        return; /* the device counts as busy already, for as long as that spins */
    ledger_lock();
    activity_work(target_slot(), device_physical(ordinal), until_ns);
    ledger_unlock();
}

void gate_synchronize(unsigned ordinal)
{
    pthread_mutex_lock(&gate.mutex);
    for (;;) {
        uint64_t now_ns = monotonic_ns(), look_ns = gate.busy_until_ns[ordinal];
        if (collective_pending())
            look_ns = now_ns + COLLECTIVE_POLL_NS;
        if (look_ns <= now_ns)
            break;
        wait_until(look_ns);
    }
    pthread_mutex_unlock(&gate.mutex);
}

void gate_reset(void)
{
    memset(&gate, 0, sizeof gate);
    pthread_mutex_init(&gate.mutex, NULL);
    pthread_cond_init(&gate.changed, NULL);
}

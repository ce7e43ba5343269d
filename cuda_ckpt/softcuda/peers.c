/* Processes that map one another's device memory. While one of them is off the device or an
 * operation on it is in flight, the driver can't be asked about the others. */
#include <string.h>

#include "softcuda.h"

static enum peers_verdict verdict_for(bool is_busy, bool is_running, bool query)
{
    const char *mode = config_text("SOFTCUDA_IPC_MODE", "linked");
    if (!strcmp(mode, "parallel-hang"))
        return is_busy && !query ? PEERS_HANG : PEERS_GO;
    if (!strcmp(mode, "parallel-refuse"))
        return is_busy && !query ? PEERS_REFUSE : PEERS_GO;
    if (strcmp(mode, "linked"))
        complain("SOFTCUDA_IPC_MODE=%s is none of linked, parallel-hang, parallel-refuse; "
                 "using linked", mode);
    return is_busy || !is_running ? PEERS_WAIT : PEERS_GO;
}

enum peers_verdict peers_begin(bool query)
{
    struct process_entry *own = &ledger_map()->processes[target_slot()];
    enum peers_verdict verdict = PEERS_GO;
    ledger_lock();
    if (own->peer_group[0])
        ledger_reap();
    for (int slot = 0; slot < MAX_PROCESSES && own->peer_group[0]; slot++) {
        const struct process_entry *other = &ledger_map()->processes[slot];
        if (other == own || !other->used || strcmp(other->peer_group, own->peer_group))
            continue;
        if (other->operating || other->state != STATE_RUNNING)
            verdict = verdict_for(other->operating, other->state == STATE_RUNNING, query);
        if (verdict != PEERS_GO)
            break;
    }
    if (verdict == PEERS_GO && !query)
        own->operating = true;
    ledger_unlock();
    return verdict;
}

void peers_end(bool query)
{
    if (query)
        return;
    ledger_lock();
    ledger_map()->processes[target_slot()].operating = false;
    ledger_unlock();
}

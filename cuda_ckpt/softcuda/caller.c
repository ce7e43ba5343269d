/* The caller's end of the control channel. It needs no cuInit. */
#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "softcuda.h"

/* The target died in the middle. Some drivers never tell the caller. */
static enum result target_lost(void)
{
    while (config_flag("SOFTCUDA_DEATH_HANGS", false))
        pause();
    return RESULT_OPERATING_SYSTEM;
}

static enum result exchange(int channel, const struct request *request, struct reply *reply)
{
    ssize_t length;
    if (send(channel, request, sizeof *request, MSG_NOSIGNAL) != sizeof *request)
        return target_lost();
    do
        length = recv(channel, reply, sizeof *reply, 0);
    while (length < 0 && errno == EINTR);
    return length == sizeof *reply ? RESULT_SUCCESS : target_lost();
}

static int connect_to(int slot, uint64_t start_time)
{
    struct sockaddr_un address;
    unsigned length = control_address(&address, slot, start_time);
    int channel = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (channel < 0)
        return -1;
    while (connect(channel, (struct sockaddr *)&address, length)) {
        if (errno == EINTR)
            continue;
        close(channel);
        return -1;
    }
    return channel;
}

/* Asked here and not by the target, which cannot tell users from each other whom its user namespace
 * does not map: in a container, the host's root looks to it like anybody. */
static bool is_permitted(const struct process_identity *target)
{
    uid_t uid = geteuid();
    return uid == 0 || uid == target->uid;
}

enum result caller_request(int pid, const struct request *request, int *value)
{
    struct process_identity target;
    struct reply reply = {0};
    if (!process_identify(pid, &target))
        return RESULT_INVALID_VALUE;
    if (ledger_open(false))
        return RESULT_NOT_INITIALIZED;
    ledger_lock();
    int slot = ledger_find(target.innermost_pid, target.start_time);
    ledger_unlock();
    if (slot == NO_SLOT)
        return RESULT_NOT_INITIALIZED;
    if (!is_permitted(&target))
        return (enum result)config_number("SOFTCUDA_FOREIGN_ERROR", RESULT_OPERATING_SYSTEM, 1,
                                          999);
    int channel = connect_to(slot, target.start_time);
    if (channel < 0)
        return target_lost();
    enum result result = exchange(channel, request, &reply);
    close(channel);
    if (result != RESULT_SUCCESS)
        return result;
    if (value)
        *value = reply.value;
    if (request->operation == OPERATION_THREAD && target.pid != target.innermost_pid)
        *value = process_visible_thread(target.pid, reply.value);
    return (enum result)reply.result;
}

/* The target's end of the control channel: a thread that carries out what callers ask for.
 *
 * It serves one request at a time, as the driver's restore thread does: while an operation is
 * in flight, a question about the state waits. It runs with all signals blocked and stops with
 * the process (SIGSTOP, a frozen cgroup), and then so does everything that it was asked. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "softcuda.h"

enum { PEERS_POLL_MS = 5, RECEIVE_LIMIT_S = 10 };

static pthread_mutex_t serving = PTHREAD_MUTEX_INITIALIZER;
static int listener = -1;
static int connection = -1;
static int thread_id;

/* An abstract name, so that nothing is left behind. It holds the slot and the start time and
 * not the pid, which differs between namespaces and is used again. */
unsigned control_address(struct sockaddr_un *address, int slot, uint64_t start_time)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1,
                          "softcuda-%016llx-%d-%llu", (unsigned long long)ledger_map()->instance,
                          slot, (unsigned long long)start_time);
    return (unsigned)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

bool control_listen(int slot, uint64_t start_time)
{
    struct sockaddr_un address;
    unsigned length = control_address(&address, slot, start_time);
    listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    return listener >= 0 && !bind(listener, (struct sockaddr *)&address, length) &&
           !listen(listener, 64);
}

static bool is_query(const struct request *request)
{
    return request->operation == OPERATION_STATE || request->operation == OPERATION_THREAD;
}

static bool is_caller_gone(int wait_ms)
{
    struct pollfd item = {.fd = connection, .events = POLLRDHUP};
    return poll(&item, 1, wait_ms) > 0 && (item.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

/* Caller and target are out of step, or a fault asks for it: nothing is answered any more, and
 * unless it was a mere question the program gets stuck in its next call. */
static _Noreturn void hang(bool query)
{
    if (!query)
        gate_wedge();
    for (;;)
        pause();
}

/* An operation whose caller was killed never ends, as far as anyone can tell. */
static void hang_without_caller(const struct request *request)
{
    if (!is_query(request) && is_caller_gone(0))
        hang(false);
}

static enum fault_operation fault_operation_of(const struct request *request)
{
    static const enum fault_operation operations[] = {
        [OPERATION_STATE] = FAULT_STATE,     [OPERATION_THREAD] = FAULT_THREAD,
        [OPERATION_LOCK] = FAULT_LOCK,       [OPERATION_CHECKPOINT] = FAULT_CHECKPOINT,
        [OPERATION_RESTORE] = FAULT_RESTORE, [OPERATION_UNLOCK] = FAULT_UNLOCK,
    };
    return operations[request->operation];
}

static struct reply perform(const struct request *request)
{
    struct reply reply = {0};
    struct fault fault = faults_for(fault_operation_of(request));
    fault_before(&fault);
    if (fault.kind == FAULT_HANG)
        hang(is_query(request));
    if (fault.kind == FAULT_FAIL)
        gate_set_state(STATE_FAILED);
    if (fault.kind == FAULT_FAIL || fault.kind == FAULT_ERROR) {
        reply.result = fault.code;
        return reply;
    }
    hang_without_caller(request);
    if (request->operation == OPERATION_STATE)
        reply.value = (int32_t)gate_state();
    else if (request->operation == OPERATION_THREAD)
        reply.value = thread_id;
    else
        reply.result = (int32_t)operation_run(request);
    fault_after(&fault);
    return reply;
}

static void send_reply(struct reply reply)
{
    while (send(connection, &reply, sizeof reply, MSG_NOSIGNAL) < 0 && errno == EINTR)
        continue;
}

/* Waits until the peers let the operation begin. False if there is nothing more to do. */
static bool wait_for_peers(bool query)
{
    enum peers_verdict verdict;
    while ((verdict = peers_begin(query)) == PEERS_WAIT) {
        if (!is_caller_gone(PEERS_POLL_MS))
            continue;
        if (query)
            return false;
        hang(false);
    }
    if (verdict == PEERS_HANG)
        hang(query);
    if (verdict == PEERS_REFUSE)
        send_reply((struct reply){.result = RESULT_NOT_SUPPORTED});
    return verdict == PEERS_GO;
}

static void serve(void)
{
    struct request request;
    struct timeval limit = {.tv_sec = RECEIVE_LIMIT_S};
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (recv(connection, &request, sizeof request, 0) != sizeof request ||
        request.operation > OPERATION_UNLOCK || request.pair_count > MAX_DEVICES)
        return;
    bool query = is_query(&request);
    if (!wait_for_peers(query))
        return;
    struct reply reply = perform(&request);
    hang_without_caller(&request);
    peers_end(query);
    send_reply(reply);
}

static void *serve_all(void *named)
{
    char name[16];
    thread_id = (int)syscall(SYS_gettid);
    snprintf(name, sizeof name, "cuda%011x", (unsigned)thread_id);
    prctl(PR_SET_NAME, name);
    sem_post(named);
    for (;;) {
        connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (connection < 0)
            continue;
        pthread_mutex_lock(&serving);
        serve();
        close(connection);
        connection = -1;
        pthread_mutex_unlock(&serving);
    }
    return NULL;
}

bool control_start(void)
{
    pthread_t thread;
    sigset_t all, before;
    /* Whoever has a context is known by this thread's name, from the first moment on. */
    sem_t named;
    sem_init(&named, 0, 0);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, NULL, serve_all, &named);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return false;
    while (sem_wait(&named))
        ;
    pthread_detach(thread);
    return true;
}

/* Waits until the request in flight is answered. */
void control_drain(void)
{
    pthread_mutex_lock(&serving);
    pthread_mutex_unlock(&serving);
}

/* A forked child must not keep the parent's sockets: whoever asks for a dead parent would wait
 * for an answer for ever. */
void control_reset(void)
{
    if (listener >= 0)
        close(listener);
    if (connection >= 0)
        close(connection);
    listener = connection = -1;
    pthread_mutex_init(&serving, NULL);
}

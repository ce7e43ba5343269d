/* What the files of softcuda offer one another. Each block is implemented by the file it names;
 * a function without a comment does what its name says. */
#ifndef SOFTCUDA_H
#define SOFTCUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "ledger.h"

/* What every device says of itself. */
#define DEVICE_NAME "softcuda device"
enum { FIRST_PCI_BUS = 0x10 };

/* ---- config.c: the environment, read at call time ---- */

const char *config_text(const char *name, const char *fallback);
/* A value that is no number or out of bounds is named on stderr and replaced by `fallback`. */
long config_number(const char *name, long fallback, long minimum, long maximum);
bool config_flag(const char *name, bool fallback);
void config_path(char *path, size_t size, const char *file);
unsigned config_driver_version(void);
void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- clock.c ---- */

uint64_t monotonic_ns(void);
void sleep_until_ns(uint64_t time_ns);
void sleep_ms(unsigned milliseconds);

/* ---- process.c: who a pid is ---- */

struct process_identity {
    int pid;           /* as seen by the reader */
    int innermost_pid; /* as the process sees itself */
    unsigned uid;      /* as seen by the reader */
    uint64_t start_time;
};

/* Accepts the id of any thread. False if there is no such process. */
bool process_identify(int pid_or_thread, struct process_identity *identity);
bool process_identify_self(struct process_identity *identity);
uint64_t process_own_namespace(void);
/* The pid under which the reader can find the process of `entry`: translated where the process
 * lives in another pid namespace, its own pid if it can't be seen from here. */
int process_visible_pid(const struct process_entry *entry);
/* The reader's name for the thread that calls itself `innermost_thread` in process `pid`. */
int process_visible_thread(int pid, int innermost_thread);

/* ---- uuid.c ---- */

void device_uuid_text(const struct uuid *uuid, char text[41]);

/* ---- faults.c: errors, delays and crashes on request ---- */

enum fault_operation {
    FAULT_INIT,
    FAULT_ALLOC,
    FAULT_STATE,
    FAULT_THREAD,
    FAULT_LOCK,
    FAULT_CHECKPOINT,
    FAULT_RESTORE,
    FAULT_UNLOCK,
    FAULT_NVML,
    FAULT_OPERATIONS,
};

/* One call: of an operation or, with `device`, of NVML on that one. */
struct fault_call {
    enum fault_operation operation;
    int device; /* -1: any or none */
    unsigned count;
};

struct fault {
    struct fault_call call;
    unsigned delay_ms;
    enum {
        FAULT_NONE,
        FAULT_ERROR,
        FAULT_FAIL,
        FAULT_HANG,
        FAULT_STALL,
        FAULT_SEGV,
        FAULT_DIE_BEFORE,
        FAULT_DIE_AFTER,
    } kind;
    int code;
};

/* Count the call and read what the faults file says about it: of an operation of this process, or
 * of NVML's calls on one device (`nvml:N`). */
struct fault faults_for(enum fault_operation operation);
struct fault faults_for_device(unsigned device);
/* Sleeps, stalls, dies or crashes as told. Errors and hangs are left to the caller. */
void fault_before(const struct fault *fault);
void fault_after(const struct fault *fault);
void faults_reset(void);

/* ---- pool.c: the bytes of a device ---- */

/* Opens and, if nobody did so before, fills the pool file. Returns false, explained on stderr. */
bool pool_open(unsigned device);
bool pool_read(unsigned device, const uint32_t *pages, uint64_t offset, void *host, size_t bytes);
bool pool_write(unsigned device, const uint32_t *pages, uint64_t offset, const void *host,
                size_t bytes);
void pool_reset(void);

/* ---- devices.c: the devices that this process may see ---- */

enum result devices_choose(void);
unsigned devices_visible(void);
unsigned device_physical(unsigned ordinal);
/* Reads a restore's device map, which must name every visible device once, into `physical`. */
enum result devices_check_pairs(const struct gpu_pair *pairs, unsigned count,
                                unsigned physical[MAX_DEVICES]);
void devices_migrate(const unsigned physical[MAX_DEVICES]);
int device_find(const struct uuid *uuid);

/* ---- gate.c: every API call passes it; closed from lock to unlock ---- */

enum result gate_enter(void);
void gate_leave(void);
enum process_state gate_state(void);
void gate_set_state(enum process_state state);
enum result gate_lock(unsigned timeout_ms);
void gate_unlock(void);
void gate_wedge(void);
/* Queues `ms` of work on a device; called inside the gate. */
void gate_launch(unsigned ordinal, unsigned ms);
/* Waits, inside the gate, for what was queued on a device. */
void gate_synchronize(unsigned ordinal);
void gate_reset(void);

/* ---- target.c: this process as a target ---- */

enum result target_initialize(void);
bool target_initialized(void);
int target_slot(void);

/* ---- context.c ---- */

struct context;

/* Current context of the calling thread, or NULL if it has none or a destroyed one. */
struct context *context_current(void);
unsigned context_ordinal(const struct context *context);
/* Rewrites the ledger's counts, after a migration. */
void contexts_publish(void);
bool contexts_any(void);
void contexts_reset(void);

/* Opens the gate for a call that needs a current context, and tells its device. */
enum result api_enter(unsigned *ordinal);

/* ---- memory.c: allocations of this process ---- */

struct allocation {
    struct allocation *next;
    const struct context *context;
    uint64_t address; /* start of a PROT_NONE reservation, stable over restore */
    uint64_t bytes;
    unsigned ordinal;
    bool managed;
    uint32_t page_count;
    uint32_t *pages;
    void *saved; /* host copy while CHECKPOINTED */
};

enum result memory_allocate(const struct context *context, uint64_t bytes, bool managed,
                            uint64_t *address);
enum result memory_free(uint64_t address);
void memory_free_context(const struct context *context);
/* The allocation that holds all of [address, address + bytes), or NULL. */
struct allocation *memory_find(uint64_t address, uint64_t bytes);
struct allocation *memory_first(void);
void memory_reset(void);

/* ---- snapshot.c: device memory to private host memory and back ---- */

enum result snapshot_save(void);
enum result snapshot_load(void);

/* ---- collective.c ---- */

/* True while a collective that this process joined waits for other ranks. Also tells the
 * ledger when one has ended. */
bool collective_pending(void);
void collective_reset(void);

/* ---- peers.c: processes that share device memory with this one ---- */

enum peers_verdict { PEERS_GO, PEERS_WAIT, PEERS_REFUSE, PEERS_HANG };

enum peers_verdict peers_begin(bool query);
void peers_end(bool query);

/* ---- operations.c: the checkpoint operations, carried out by the restore thread ---- */

enum operation {
    OPERATION_STATE,
    OPERATION_THREAD,
    OPERATION_LOCK,
    OPERATION_CHECKPOINT,
    OPERATION_RESTORE,
    OPERATION_UNLOCK,
};

struct request {
    uint32_t operation;
    uint32_t timeout_ms;
    uint32_t pair_count;
    uint32_t zero;
    struct gpu_pair pairs[MAX_DEVICES];
};

struct reply {
    int32_t result;
    int32_t value;
};

enum result operation_run(const struct request *request);

/* ---- control.c: the target's end of the channel; caller.c: the other end ---- */

bool control_listen(int slot, uint64_t start_time);
bool control_start(void);
void control_drain(void);
void control_reset(void);

/* Name of a target's control socket; returns the length for bind and connect. */
struct sockaddr_un;
unsigned control_address(struct sockaddr_un *address, int slot, uint64_t start_time);

enum result caller_request(int pid, const struct request *request, int *value);

#endif

/* The part of the CUDA driver's binary interface that softcuda speaks, in our own words.
 *
 * Only numbers and layouts are shared with the vendor's headers: every value below is what a
 * program compiled against them passes or expects. All four argument blocks of the checkpoint
 * calls are 64 bytes in every driver generation, which the assertions keep true.
 */
#ifndef SOFTCUDA_ABI_H
#define SOFTCUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum result {
    RESULT_SUCCESS = 0,
    RESULT_INVALID_VALUE = 1,
    RESULT_OUT_OF_MEMORY = 2,
    RESULT_NOT_INITIALIZED = 3,
    RESULT_DEINITIALIZED = 4,
    RESULT_NO_DEVICE = 100,
    RESULT_INVALID_DEVICE = 101,
    RESULT_INVALID_CONTEXT = 201,
    RESULT_OPERATING_SYSTEM = 304,
    RESULT_ILLEGAL_STATE = 401,
    RESULT_NOT_READY = 600,
    RESULT_NOT_PERMITTED = 800,
    RESULT_NOT_SUPPORTED = 801,
    RESULT_SYSTEM_NOT_READY = 802,
    RESULT_UNKNOWN = 999,
};

enum process_state {
    STATE_RUNNING = 0,
    STATE_LOCKED = 1,
    STATE_CHECKPOINTED = 2,
    STATE_FAILED = 3,
};

/* First versions that know a feature, as cuDriverGetVersion encodes them. */
enum {
    VERSION_MIGRATION = 13000,
    VERSION_CUSTOM_STORAGE = 13040,
};

struct uuid {
    uint8_t bytes[16];
};

struct gpu_pair {
    struct uuid old_uuid;
    struct uuid new_uuid;
};

struct lock_arguments {
    unsigned timeout_ms; /* 0 waits for ever */
    unsigned reserved0;
    uint64_t reserved1[7];
};

/* Checkpoint and unlock. From 13.4 on the first word of checkpoint asks for custom storage. */
struct plain_arguments {
    uint64_t words[8];
};

/* Restore, as of 13.0: before that all of it is reserved. From 13.4 on the eight bytes at
 * offset 16 ask for custom storage. */
struct restore_arguments {
    const struct gpu_pair *pairs;
    unsigned pair_count;
    uint8_t rest[52];
};

_Static_assert(sizeof(struct uuid) == 16, "uuid");
_Static_assert(sizeof(struct gpu_pair) == 32, "GPU pair");
_Static_assert(sizeof(struct lock_arguments) == 64, "lock arguments");
_Static_assert(sizeof(struct plain_arguments) == 64, "checkpoint and unlock arguments");
_Static_assert(sizeof(struct restore_arguments) == 64, "restore arguments");
_Static_assert(offsetof(struct restore_arguments, pair_count) == 8, "pair count");
_Static_assert(sizeof(enum result) == 4 && sizeof(enum process_state) == 4, "enums are words");

#endif

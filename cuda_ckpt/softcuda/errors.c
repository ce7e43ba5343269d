/* Names and texts of result codes. */
#include "softcuda.h"

struct description {
    int result;
    const char *name;
    const char *text;
};

static const struct description descriptions[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "a stub library was loaded in place of the driver"},
    {36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "the call needs a newer driver"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "device busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported driver combination"},
    {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
     "forward compatibility was attempted on unsupported hardware"},
    {805, "CUDA_ERROR_MPS_CONNECTION_FAILED", "no connection to the MPS server"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted while a stream is captured"},
    {909, "CUDA_ERROR_TIMEOUT", "wait operation timed out"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static const struct description *find(int result)
{
    for (size_t index = 0; index < sizeof descriptions / sizeof *descriptions; index++)
        if (descriptions[index].result == result)
            return &descriptions[index];
    return NULL;
}

EXPORT enum result cuGetErrorName(int result, const char **name)
{
    const struct description *found = find(result);
    if (!name)
        return RESULT_INVALID_VALUE;
    *name = found ? found->name : NULL;
    return found ? RESULT_SUCCESS : RESULT_INVALID_VALUE;
}

EXPORT enum result cuGetErrorString(int result, const char **text)
{
    const struct description *found = find(result);
    if (!text)
        return RESULT_INVALID_VALUE;
    *text = found ? found->text : NULL;
    return found ? RESULT_SUCCESS : RESULT_INVALID_VALUE;
}

# Builds softcuda. Included by the Makefile at the top, or on its own:
#     make -f cuda_ckpt/softcuda/build.mk softcuda
# Everything is written to a temporary name and moved into place: several test runs may build at
# once, and a library that a running process has mapped must not change under it.

SOFTCUDA_SOURCE := $(patsubst %/,%,$(dir $(lastword $(MAKEFILE_LIST))))
SOFTCUDA_BUILD := build/softcuda
SOFTCUDA_OBJECTS := $(SOFTCUDA_BUILD)/objects
SOFTCUDA_BUILD_550 := build/softcuda-550

SOFTCUDA_CFLAGS := -std=gnu11 -D_GNU_SOURCE -O2 -g -fPIC -fvisibility=hidden -pthread \
	-Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wvla
SOFTCUDA_LDFLAGS := -pthread -Wl,-z,defs -Wl,-z,now -Wl,-z,nodelete

SOFTCUDA_SHARED := activity clock config faults ledger process uuid
SOFTCUDA_DRIVER := caller collective context control devices driver driver_memory errors gate \
	memory operations peers pool snapshot target
SOFTCUDA_HEADERS := $(wildcard $(SOFTCUDA_SOURCE)/*.h)

softcuda-objects = $(patsubst %,$(SOFTCUDA_OBJECTS)/%.o,$(1))

.PHONY: softcuda
softcuda: $(SOFTCUDA_BUILD)/libcuda.so.1 $(SOFTCUDA_BUILD)/libcuda.so \
	$(SOFTCUDA_BUILD)/libnvidia-ml.so.1 $(SOFTCUDA_BUILD)/softcuda-init \
	$(SOFTCUDA_BUILD_550)/libcuda.so.1

$(SOFTCUDA_OBJECTS)/%.o: $(SOFTCUDA_SOURCE)/%.c $(SOFTCUDA_HEADERS) $(SOFTCUDA_SOURCE)/build.mk
	@mkdir -p $(@D)
	$(CC) $(SOFTCUDA_CFLAGS) $(CFLAGS) -c $< -o $@.$$$$ && mv -f $@.$$$$ $@

# A driver before 12.8: its version, and none of the checkpoint functions.
$(SOFTCUDA_OBJECTS)/config_550.o: $(SOFTCUDA_SOURCE)/config.c $(SOFTCUDA_HEADERS) \
	$(SOFTCUDA_SOURCE)/build.mk
	@mkdir -p $(@D)
	$(CC) $(SOFTCUDA_CFLAGS) $(CFLAGS) -DSOFTCUDA_DEFAULT_VERSION=12040 -c $< -o $@.$$$$ \
		&& mv -f $@.$$$$ $@

$(SOFTCUDA_BUILD)/libcuda.so.1: \
	$(call softcuda-objects,$(SOFTCUDA_SHARED) $(SOFTCUDA_DRIVER) checkpoint_api)
	$(CC) -shared -Wl,-soname,libcuda.so.1 $^ $(SOFTCUDA_LDFLAGS) $(LDFLAGS) -o $@.$$$$ \
		&& mv -f $@.$$$$ $@

$(SOFTCUDA_BUILD_550)/libcuda.so.1: \
	$(call softcuda-objects,$(filter-out config,$(SOFTCUDA_SHARED)) config_550 $(SOFTCUDA_DRIVER))
	@mkdir -p $(@D)
	$(CC) -shared -Wl,-soname,libcuda.so.1 $^ $(SOFTCUDA_LDFLAGS) $(LDFLAGS) -o $@.$$$$ \
		&& mv -f $@.$$$$ $@

$(SOFTCUDA_BUILD)/libnvidia-ml.so.1: $(call softcuda-objects,$(SOFTCUDA_SHARED) nvml)
	$(CC) -shared -Wl,-soname,libnvidia-ml.so.1 $^ $(SOFTCUDA_LDFLAGS) $(LDFLAGS) -o $@.$$$$ \
		&& mv -f $@.$$$$ $@

$(SOFTCUDA_BUILD)/softcuda-init: $(call softcuda-objects,$(SOFTCUDA_SHARED) pool softcuda_init)
	$(CC) $^ $(SOFTCUDA_LDFLAGS) $(LDFLAGS) -o $@.$$$$ && mv -f $@.$$$$ $@

$(SOFTCUDA_BUILD)/libcuda.so: $(SOFTCUDA_BUILD)/libcuda.so.1
	ln -sfn libcuda.so.1 $@

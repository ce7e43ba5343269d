# Everything that is made lies under build/; `make clean` takes it away again.

PYTHON ?= python3
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := build/venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
METADATA := setup.cfg pyproject.toml

include cuda_ckpt/softcuda/build.mk

.PHONY: help
help: ## Say what there is to make
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r name text; do printf 'make %-13s %s\n' "$$name" "$$text"; done

.PHONY: demo
demo: $(VENV)/.stamp-daemon softcuda ## Two RL jobs share two devices, in under 90 seconds
	$(BIN)/python -m demo

.PHONY: picture
picture: ## The picture of a report in README.md, of the last `make demo`; needs chromium
	test -e build/demo/report.html || $(MAKE) demo
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,1200 \
		--screenshot=docs/report.webp build/demo/report.html

.PHONY: grpo
grpo: $(VENV)/.stamp-test softcuda ## Two training runs of real torch, alone and sharing; ARGS='--ranks 2', '--lora 4', ...
	$(BIN)/python -W ignore -m examples.grpo $(ARGS)

.PHONY: test
test: $(VENV)/.stamp-test softcuda ## All tests that need no GPU; PYTEST_ARGS=... narrows them down
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_ARGS)

.PHONY: test-slurm
test-slurm: $(VENV)/.stamp-test softcuda ## Jobs of two users on a real Slurm; needs root and Debian's packages of it
	$(BIN)/python -m pytest tests/slurm $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: $(VENV)/.stamp-test softcuda ## The tests that need a CUDA device and driver 570 or later, and what they find
	$(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

.PHONY: chaos
chaos: $(VENV)/.stamp-test softcuda ## 40 clients in a storm of faults; DURATION=60 seconds, SEED=n repeats one
	PYTHONPATH=tests/e2e:. $(BIN)/python tests/chaos/chaos_run.py --duration $(or $(DURATION),60) $(SEED:%=--seed %)

.PHONY: sim
sim: $(VENV)/.stamp-test ## SEEDS=2000 lives of simulated clusters in which anything goes wrong; SEED=n tells one; JOBS=cores
	PYTHONPATH=tests/tsliced/core:. $(BIN)/python tests/sim/simulate.py --seeds $(or $(SEEDS),2000) \
		$(SEED:%=--seed %) $(JOBS:%=--jobs %)

.PHONY: sim-mutations
sim-mutations: $(VENV)/.stamp-test ## Break ten rules of the core on purpose; the simulation must miss each of them
	PYTHONPATH=tests/tsliced/core:. $(BIN)/python tests/sim/mutations.py

.PHONY: explore
explore: $(VENV)/.stamp-test ## All ways in which a switch over hosts can go with FAULTS=0, 1 and 2 faults; SCENE=name LIMIT=states
	PYTHONPATH=tests/tsliced/core:. $(BIN)/python tests/sim/explore.py $(SCENE:%=--scene %) \
		$(FAULTS:%=--faults %) $(LIMIT:%=--limit %)

.PHONY: check
check: $(VENV)/.stamp-test ## Format, lint, types, the layering of the packages, and every branch of the core
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/test_layering.py
	$(BIN)/python -m coverage run -m pytest --quiet tests/tsliced/core
	$(BIN)/python -m coverage report

.PHONY: bench
bench: $(VENV)/.stamp-test softcuda ## Measure the figures that README.md gives
	$(BIN)/python -m bench

.PHONY: bench-hosts
bench-hosts: $(VENV)/.stamp-test softcuda ## Measure what a switch costs over up to 2,048 hosts
	$(BIN)/python -m bench.hosts

.PHONY: bench-backends
bench-backends: $(VENV)/.stamp-test softcuda ## Measure how fast each backend moves state, beside a plain copy
	$(BIN)/python -m bench.backends

.PHONY: fuzz
fuzz: $(VENV)/.stamp-fuzz ## Feed the daemon FRAMES=1000000 frames that nobody meant, or DURATION=seconds of them; SEED=n
	$(BIN)/python tests/fuzz/fuzz.py --frames $(or $(FRAMES),1000000) \
		$(if $(filter command% environment%,$(origin DURATION)),--duration $(DURATION)) \
		$(if $(filter command% environment%,$(origin SEED)),--seed $(SEED))

.PHONY: package
package: bundle ## An archive that installs the daemon without a network: build/package/
	tar --owner=0 --group=0 --numeric-owner --sort=name -C build/package \
		-czf $(BUNDLE).tar.gz tsliced-$(VERSION)

.PHONY: install
install: bundle ## Install daemon, units and configuration; DESTDIR=, PREFIX=/usr/local
	$(BUNDLE)/install.sh --prefix '$(PREFIX)' --destdir '$(DESTDIR)' --python '$(INSTALL_PYTHON)'

.PHONY: uninstall
uninstall: ## Take away what `make install` installed; configuration and state stay
	systemd/install.sh --uninstall --prefix '$(PREFIX)' --destdir '$(DESTDIR)'

.PHONY: clean
clean: ## Remove build/ and the caches of the tools
	rm -rf build *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- What is installed ------------------------------------------------------------------------
# Wheels are for the Python of build/venv; the Python that is to run them must be of that version.

PREFIX ?= /usr/local
DESTDIR ?=
INSTALL_PYTHON ?= /usr/bin/python3
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' libtimeslice/__init__.py)
BUNDLE := build/package/tsliced-$(VERSION)

# Always made anew: that nothing changed is seen by the wheels' contents when they are installed.
.PHONY: bundle
bundle: | $(VENV)/bin/python
	@# What setuptools left from an earlier build would be packed again, though it is gone.
	rm -rf build/lib build/bdist.* $(BUNDLE)
	mkdir -p $(BUNDLE)/systemd
	SOURCE_DATE_EPOCH=315532800 $(PIP) wheel --wheel-dir $(BUNDLE)/wheels '.[daemon]'
	cp -r systemd/tsliced.* systemd/*.conf systemd/slurm $(BUNDLE)/systemd
	cp systemd/install.sh LICENSE $(BUNDLE)

# --- The virtual environments ---------------------------------------------------------------
# One environment, filled in steps: the demo needs the daemon's packages only. A stamp is older than
# the metadata when a dependency was added, and the step is done again.

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'The daemon needs Python 3.11 or later: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ echo 'This Python has no venv module; on Debian: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-daemon: $(METADATA) | $(VENV)/bin/python
	$(PIP) install --editable '.[daemon]'
	@$(call install_systemd_python)
	@touch $@

$(VENV)/.stamp-test: $(METADATA) constraints.txt $(VENV)/.stamp-daemon
	$(PIP) install --constraint constraints.txt --editable '.[daemon,test,torch]'
	@touch $@

# The fuzzer that is guided by coverage has no wheel for every Python; there is another one without it.
$(VENV)/.stamp-fuzz: $(VENV)/.stamp-test
	@$(PIP) install --constraint constraints.txt --editable '.[fuzz]' >build/atheris.log 2>&1 || \
		echo 'atheris cannot be had here (build/atheris.log); going on without it'
	@touch $@

# systemd-python is built from source against libsystemd-dev. The daemon has a replacement for the few
# calls that it needs, so a machine that cannot build it goes without.
define install_systemd_python
if pkg-config --exists libsystemd 2>/dev/null; then \
	$(PIP) install --editable '.[systemd]' >build/systemd-python.log 2>&1 || \
		echo 'systemd-python could not be built (build/systemd-python.log); going on without it'; \
fi
endef

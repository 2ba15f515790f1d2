# make demo      install what one target needs, then export, verify and transcribe; TARGET=xnnpack for another
# make test      install the development extra as well, then run every check and every test
# make test-fast  the tests that need no torch, in an environment of their own
# make test-all  the same, with all repetitions of the long tests
# make test-versions  test-fast with the newest and the lowest versions of pyproject.toml, on each interpreter
# make lock      renew the exact versions that these commands install
# make licences  renew environments/licences.md, the licences of everything that is shipped, installed or needed
# make test-apps  write the files of each installed app, and verify them in it
# make test-machine  run every verb without space, memory, home, clock, …, and write build/conditions.md
# make test-official  test OpenAI's own weights on this machine: MODEL=tiny.en, AUDIO=folder of recordings
#
# Choose the interpreter with `make demo PYTHON=/usr/bin/python3.12`.

VENV := .venv
BIN := $(VENV)/bin
# Installs an extra from a lock of exact versions with hashes; `pip install .` uses the ranges of pyproject.toml.
LOCK := pyproject.toml $(addprefix environments/,lock.txt install.py)
INSTALL := environments/install.py

# The first interpreter that is new enough; a shim that cannot run counts as none.
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.11 python3 python; do \
	$$python -c '$(IS_NEW_ENOUGH)' >/dev/null 2>&1 && echo $$python && break; done)

.PHONY: demo test test-fast test-all test-apps test-versions test-machine test-official lock licences check docs evidence bench bench-peers fuzz clean

# The extra that a target needs; all others need `export`, and the demo says what else.
TARGET ?= onnxruntime
EXTRA_xnnpack := xnnpack
EXTRA_litert := litert-export
EXTRA_openvino := openvino-export
EXTRA := $(or $(EXTRA_$(TARGET)),export)

demo: $(VENV)/.installed-$(EXTRA)
	@$(BIN)/whisperport demo --target $(TARGET)

# One process per core, each with one thread: two thread pools of torch on the same cores slow each other down.
# Compiled modules are kept also where the environment says otherwise: without them, each worker and each of
# the many processes that tests start compiles the package and the tests again.
CHECK := $(BIN)/ruff format --check --quiet && $(BIN)/ruff check --quiet && $(BIN)/mypy --strict
# A worker that crashed is not replaced: pytest-xdist 3.8 then waits for ever for the last files.
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --dist=loadfile \
	--max-worker-restart=0

test: $(VENV)/.installed-dev
	@$(BIN)/python tests/cpu_minutes.py "make $@" '$(CHECK) && $(TEST)'

# What needs a package that is not installed is skipped and says so: tests/without_torch.py.
FAST := .venv-fast
test-fast: $(FAST)/.installed
	@$(FAST)/bin/python tests/cpu_minutes.py "make $@" '$(subst $(VENV),$(FAST),$(TEST))'

test-all: $(VENV)/.installed-dev
	@WHISPERPORT_TEST_ALL=1 $(BIN)/python tests/cpu_minutes.py "make $@" '$(CHECK) && $(TEST)'

# In environments of their own, in build/versions.
VERSIONS := build/versions
TOOLS := build/tools
test-versions: $(TOOLS)/.installed
	@$(TOOLS)/bin/python environments/versions.py $(VERSIONS)

# `whisperport apps --install APP` installs an app.
test-apps: $(VENV)/.installed-dev
	@WHISPERPORT_TEST_APPS=1 $(BIN)/python -m pytest tests/build/layouts/test_in_apps.py tests/docs/test_followed.py -k "app" -rs

# On Linux, as root: file systems are mounted in a namespace of their own, so that nothing of the machine changes.
test-machine: $(VENV)/.installed-dev
	@WHISPERPORT_TEST_MACHINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/system/test_machine.py -rs

# OpenAI's own weights, from openai-whisper's cache, the hub's cache or the network. Without them, every test is
# skipped and says so. AUDIO is a folder of recordings; NAME.txt beside NAME.wav is its transcript.
MODEL ?= tiny.en
test-official: $(VENV)/.installed-dev
	@WHISPERPORT_OFFICIAL="$(MODEL)" WHISPERPORT_AUDIO="$(AUDIO)" WHISPERPORT_RECORD="build/official-$(notdir $(MODEL)).json" \
		$(BIN)/python -m pytest tests/test_official.py -rs && echo "The record is in build/official-$(notdir $(MODEL)).json."

# The chores.

check: $(VENV)/.installed-dev
	@$(CHECK)

docs: $(VENV)/.installed-dev
	@$(BIN)/python docs/make_reference.py
	@$(BIN)/python docs/cli_page.py
	@$(BIN)/python docs/measured_pages.py
	@$(BIN)/python docs/make_readme.py
	@$(BIN)/python -m pytest tests/docs

evidence: $(VENV)/.installed-dev
	@$(BIN)/python docs/make_evidence.py

lock: $(TOOLS)/.installed
	@$(TOOLS)/bin/python environments/lock.py

licences: $(VENV)/.installed-dev $(TOOLS)/.installed
	@$(BIN)/python environments/licences.py $(TOOLS)/bin/python

bench: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks.speed.programs

$(TOOLS)/.installed: $(LOCK) | $(BIN)/python
	@$(BIN)/python -m venv --clear $(TOOLS)
	@$(TOOLS)/bin/python $(INSTALL) tools
	@touch $@

$(FAST)/.installed: $(LOCK) | $(BIN)/python
	@echo "Installing whisperport without torch, and pytest, into $(FAST)."
	@$(BIN)/python -m venv --clear $(FAST)
	@$(FAST)/bin/python $(INSTALL) fast
	@touch $@

# The peers have an environment of their own. A short run: make bench-peers OPTIONS=--quick
PEERS := .venv-peers
bench-peers: $(VENV)/.installed-dev $(PEERS)/.installed
	@$(BIN)/python -m benchmarks.peers $(OPTIONS)

# Another seed gives other inputs: make fuzz SEED=1 COUNT=100000
COUNT ?= 20000
SEED ?= 0
fuzz: $(VENV)/.installed-dev
	@$(BIN)/python -m fuzz --count $(COUNT) --seed $(SEED)

clean:
	rm -rf $(VENV) $(FAST) $(PEERS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The environment. A stamp per extra: a second `make demo` installs nothing.

$(BIN)/python:
	@if ! "$(or $(PYTHON),python3)" -c '$(IS_NEW_ENOUGH)' >/dev/null 2>&1; then \
		echo "error: no Python 3.11 or later was found" >&2; \
		echo "  why: $(or $(PYTHON),python3) is missing or older" >&2; \
		echo >&2; \
		echo "hint: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi
	@if ! "$(PYTHON)" -m venv $(VENV); then \
		rm -rf $(VENV); \
		echo "error: $(PYTHON) cannot make a virtual environment" >&2; \
		echo >&2; \
		echo "hint: on Debian and Ubuntu, apt install python3-venv" >&2; \
		exit 1; \
	fi

$(VENV)/.installed-%: $(LOCK) | $(BIN)/python
	@echo "Installing whisperport with the extra $* into $(VENV). This is done once; torch is large."
	@$(BIN)/python $(INSTALL) $*
	@touch $@

$(VENV)/.installed-dev: $(LOCK) | $(BIN)/python
	@echo "Installing whisperport and what its tests compare it with into $(VENV)."
	@echo "This is done once; torch, ExecuTorch, LiteRT and transformers are large, so it takes a few minutes."
	@$(BIN)/python $(INSTALL) dev
	@touch $(addprefix $(VENV)/.installed-,export xnnpack litert-export openvino-export) $@

$(PEERS)/.installed: benchmarks/peers/requirements.txt $(LOCK) | $(BIN)/python
	@echo "Installing the programs that whisperport is compared with into $(PEERS)."
	@$(BIN)/python -m venv --clear $(PEERS)
	@$(PEERS)/bin/python $(INSTALL) peers
	@touch $@

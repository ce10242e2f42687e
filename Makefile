# setup  .venv, the library in it, its C extension       demo   the main job on a local 3-node cluster
# test   all C and Python tests                          lint   ruff, mypy --strict, import-linter
# bench  make bench B=cold_read [ARGS=--small]           dist   sdist and wheels (check-release: fit to upload?)
# microbench  what single calls cost in one process, each beside a control
# model  the models of docs/model, exhaustively (spin)    house  the numbers of the code's shape
# site   docs/ and the docstrings as a site, in build/site
# soak   all C tests under every sanitizer, long fuzzing, long storms, benches, the models: hours

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
PYTHON := $(VENV)/bin/python
# The first of these that is at least 3.10; `make setup BASE_PYTHON=/path/to/python3` overrides.
BASE_PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	&& command -v $$p && break; done)
# What installs packages into it; the gate takes uv.
PIP_INSTALL ?= $(PYTHON) -m pip install -q --disable-pip-version-check

METADATA := setup.cfg setup.py pyproject.toml clamor_ray/_version.py
C_FILES := $(filter-out pagecache_c/tests/%,$(wildcard pagecache_c/*.h pagecache_c/*/*.[ch] \
	pagecache_c/*/*/*.[ch])) clamor_ray/_native/builder.py
EXTENSION := clamor_ray/_pagecache.abi3.so
FUZZ_SECONDS ?= 20
PYTEST_ARGS ?=
# pytest processes at a time: two cores have time for four, which often wait.
SHARDS ?= 4

.PHONY: help setup ext demo test test-c test-py soak soak-c soak-fuzz soak-py soak-bench model house site lint format linked typecheck imports bench microbench dist sdist wheels check-release sbom cibuildwheel ray-matrix arm64 clean

help:
	@sed -n '/^# /!q; s/^# //p' Makefile

$(VENV)/.created:
	@test -n "$(BASE_PYTHON)" || { echo "no Python 3.10 or newer found" >&2; exit 1; }
	test -x $(PYTHON) || $(BASE_PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.created $(METADATA)
	mkdir -p actors workloads
	# What is built here without isolation needs these before: this library, and hnswlib.
	$(PIP_INSTALL) 'setuptools>=70' wheel 'cffi>=1.15' \
		'numpy>=1.24' 'pybind11>=2.12'
	$(PIP_INSTALL) --no-build-isolation -e '.[test,workloads,docs]'
	touch $@

# The install above builds the extension too, so that this one follows changes of the C sources.
$(VENV)/.extension: $(VENV)/.installed $(C_FILES)
	@if [ ! -e $(EXTENSION) ] || [ -n "$$(find $(C_FILES) -newer $(EXTENSION))" ]; then \
		echo $(PYTHON) setup.py -q build_ext --inplace; \
		$(PYTHON) setup.py -q build_ext --inplace; fi
	touch $@

ext: $(VENV)/.extension

setup: $(VENV)/.extension

demo: setup
	$(PYTHON) -m clamor_ray.workloads.knn --demo

test: test-c test-py

test-c:
	$(MAKE) --no-print-directory -C pagecache_c gate
	$(MAKE) --no-print-directory -C pagecache_c fuzz FUZZ_SECONDS=$(FUZZ_SECONDS)

# What takes hours: nothing that `test` leaves out is left out here. All of it runs, whatever fails.
soak: setup
	@failed=; for part in soak-c soak-fuzz soak-py soak-bench model; do \
		began=$$SECONDS; $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; \
		echo "==== make $$part: $$((SECONDS - began)) s"; done; \
	test -z "$$failed" || { echo "FAILED:$$failed"; exit 1; }

soak-c:
	$(MAKE) -C pagecache_c soak

soak-fuzz:
	$(MAKE) -C pagecache_c fuzz FUZZ_SECONDS=600

soak-py: setup
	LAB_FORKED_WORKERS=0 $(PYTHON) -m tests.support.shards $(SHARDS) -m soak \
		$$(grep -rlw --include='test_*.py' --exclude=test_bench_alone.py mark.soak tests)

# One at a time: each starts a cluster of its own.
soak-bench: setup
	$(PYTHON) -m tests.support.shards 1 -m soak tests/bench/test_bench_alone.py

test-py: setup
	$(PYTHON) -m tests.support.shards $(SHARDS) $(PYTEST_ARGS)

model:
	docs/model/run.sh -DPART_HOME
	docs/model/run.sh -DPART_NODE
	docs/model/run.sh -DNB=1 -DNO_EXPIRY
	docs/model/run.sh moves.pml
	docs/model/run.sh moves.pml -DCALM
	docs/model/run.sh slices.pml
	docs/model/run.sh parity.pml
	docs/model/run.sh parity.pml -DSECOND
	docs/model/run.sh parity.pml -DREAD
	docs/model/run.sh parity.pml -DENDS
	docs/model/run.sh parity.pml -DENDS -DSECOND

# HOUSE_ARGS: --detail says what makes a number, --check fails where one is over its target.
house: setup
	@$(PYTHON) -m tests.support.house $(HOUSE_ARGS)

# Each warning is an error, and so is each name that leads nowhere. No other host is asked. It needs
# graphviz. SITE_BUILDER=dummy checks all of it and writes nothing.
SITE_BUILDER ?= html
site: setup
	$(PYTHON) -m sphinx -q -W --keep-going -n -b $(SITE_BUILDER) -c docs/site -d build/doctrees . build/site

lint: setup typecheck imports
	$(PYTHON) -m tests.support.house.c_rooms
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check clamor_ray actors workloads tests bench docs release setup.py

format: setup
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format clamor_ray actors workloads tests bench docs release

# mypy and import-linter know nothing of package_dir: they get the package as it will be installed,
# made of links.
linked: setup
	rm -rf .typecheck
	mkdir -p .typecheck/clamor_ray
	ln -s $(CURDIR)/clamor_ray/*.py $(CURDIR)/clamor_ray/*.pyi $(CURDIR)/clamor_ray/py.typed .typecheck/clamor_ray/
	ln -s $(CURDIR)/actors $(CURDIR)/workloads \
		$(patsubst %/__init__.py,$(CURDIR)/%,$(wildcard clamor_ray/*/__init__.py)) .typecheck/clamor_ray/

typecheck: linked
	$(PYTHON) -m mypy -p clamor_ray

imports: linked
	cd .typecheck && $(abspath $(VENV))/bin/lint-imports --config ../pyproject.toml --no-cache

bench: setup
	@test -n "$(B)" || { echo "usage: make bench B=name [ARGS=--small]" >&2; exit 2; }
	$(PYTHON) -m bench $(B) $(ARGS)

# ARGS: of pytest and pytest-benchmark. The last line is the summary: each case / its control.
microbench: setup
	$(PYTHON) -m pytest -q -p no:cacheprovider bench/micro --benchmark-warmup=on \
		--benchmark-columns=median,iqr,rounds $(ARGS)

# What builds releases is an environment of its own: its packages have one version each.
RELEASE := build/release
RELEASE_PYTHON := $(RELEASE)/bin/python
WHEEL_ARCHITECTURES ?= x86_64 aarch64

$(RELEASE)/.installed: release/requirements.txt
	test -x $(RELEASE_PYTHON) || $(BASE_PYTHON) -m venv $(RELEASE)
	$(RELEASE_PYTHON) -m pip install -q --disable-pip-version-check -r release/requirements.txt
	touch $@

dist: wheels

# Of this version alone: what lies in dist/ is uploaded.
sdist: $(RELEASE)/.installed
	rm -rf dist
	$(RELEASE_PYTHON) -m release.archives sdist dist

wheels: sdist
	for architecture in $(WHEEL_ARCHITECTURES); do \
		$(RELEASE_PYTHON) -m release.archives wheel $$architecture dist/*.tar.gz dist || exit 1; done

# After `make wheels`.
check-release: $(RELEASE)/.installed
	$(RELEASE_PYTHON) -m release.check dist

# After `make wheels`: what `check-release` makes, too, from an environment that there is (SBOM_PYTHON).
sbom: $(RELEASE)/.installed
	$(RELEASE_PYTHON) -m release.sbom dist $(SBOM_PYTHON)

# The same wheels by gcc in the containers of manylinux, each tested there: wants docker or podman.
cibuildwheel:
	test -x build/cibuildwheel/bin/python || $(BASE_PYTHON) -m venv build/cibuildwheel
	build/cibuildwheel/bin/python -m pip install -q --disable-pip-version-check cibuildwheel==4.3.5
	build/cibuildwheel/bin/python -m cibuildwheel --output-dir build/cibuildwheel/wheels $(CIBW_ARGS)

# After `make wheels`: the oldest and the newest Ray that it works with.
ray-matrix:
	release/ray_matrix.sh $(foreach ray,$(RAYS),'$(ray)')

# What can be tested of arm64 on another processor.
arm64:
	$(MAKE) --no-print-directory -C pagecache_c arm64

clean:
	rm -rf build dist .typecheck *.egg-info clamor_ray/_*.so clamor_ray/_pagecache.c
	rm -f $(VENV)/.installed $(VENV)/.extension
	$(MAKE) -C pagecache_c clean

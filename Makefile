# Everything starts here: each target builds the environment it needs; a second call starts at once.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: help setup test test-fast test-slow test-extras test-nnunet peers lint format demo numbers docs docs-serve dist bench-speed bench-adapt bench-harm bench-instance bench-real bench-serve bench-grid clean
help:
	@echo "make demo       train at a synthetic hospital A, adapt to hospital B; see runs/demo/oct/report.html"
	@echo "make test       build .venv and run the tests"
	@echo "make test-fast  the same without those of several seconds: for all day"
	@echo "make test-slow  those of minutes"
	@echo "make test-extras   those of the service, nnU-Net, the grid and DICOM peers, in an environment with all extras"
	@echo "make test-nnunet   a network that nnU-Net trains itself: adapted, exported, predicted by nnU-Net again; minutes"
	@echo "make lint       ruff and mypy --strict"
	@echo "make format     let ruff rewrite the code"
	@echo "make docs       build the documentation into site/ (make docs-serve: show it on port 8001)"
	@echo "make numbers    run the demo again, write its picture and all quoted numbers into README and docs"
	@echo "make dist       build wheel and sdist into dist/, install the wheel in an empty environment, run its demo"
	@echo "make bench-speed, bench-adapt, bench-harm, bench-instance   measure speed, the guard, instance normalization; rewrite their pages in docs"
	@echo "make bench-real SITES=FOLDER   every comparison on real sites, resumable, hours; rewrites docs/real.md"
	@echo "make bench-grid    what two tasks at the same time gain on this machine; rewrites the table of docs/grid.md"
	@echo "make clean      remove .venv and caches"

setup: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

test: setup
	$(BIN)/python -m pytest -n 2

test-fast: setup
	$(BIN)/python -m pytest -n 2 -m "not slow and not long"

test-slow: setup
	$(BIN)/python -m pytest -m slow

# nnunetv2 asks for timm, which asks for torchvision, of which there is no build for the CPU build of torch; its plain
# trainer needs neither, and a torchvision that cannot be imported is worse than none
EXTRAS := .venv-extras
$(EXTRAS)/.installed: pyproject.toml constraints.txt
	test -x $(EXTRAS)/bin/python || $(PYTHON) -m venv $(EXTRAS)
	$(EXTRAS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,serve,nnunet,grid,mlflow]"
	$(EXTRAS)/bin/python -m pip uninstall --quiet --yes timm torchvision
	touch $@

test-extras: $(EXTRAS)/.installed
	$(EXTRAS)/bin/python -m pytest -n 2 -rs $(EXTRA_TESTS)
EXTRA_TESTS := tests/serving/test_cluster.py tests/serving/test_running.py tests/serving/test_page_in_chromium.py tests/serving/test_dicom_peers.py \
  tests/models/io/test_nnunet.py tests/evaluation/test_given_models.py tests/evaluation/test_runners.py \
  tests/evaluation/test_rehearsal_elsewhere.py tests/evaluation/test_tracking.py tests/data/formats/test_images.py tests/data/formats/test_fuzz.py

# nnU-Net plans, trains and predicts by its own commands; two minutes of one core
test-nnunet: $(EXTRAS)/.installed
	$(EXTRAS)/bin/python -m pytest -m slow tests/models/io/test_nnunet_training.py

# programs that tests talk to, where there is apt: a browser, DICOM senders, an archive and a judge of DICOM files; a
# service of Debian's that comes with them is not wanted, the tests start their own
ORTHANC_WEB := /usr/share/orthanc/plugins/libOrthancDicomWeb.so
peers:
	@missing=""; \
	command -v chromedriver >/dev/null || missing="$$missing chromium chromium-driver"; \
	command -v storescu >/dev/null || missing="$$missing dcmtk"; \
	command -v dciodvfy >/dev/null || missing="$$missing dicom3tools"; \
	command -v Orthanc >/dev/null && test -e $(ORTHANC_WEB) || missing="$$missing orthanc orthanc-dicomweb"; \
	test -n "$$missing" || exit 0; \
	command -v apt-get >/dev/null || { echo "no apt-get here: install$$missing yourself"; exit 0; }; \
	{ apt-get update --quiet=2 && apt-get install --quiet=2 --yes$$missing >/dev/null; } || exit 1; \
	if command -v Orthanc >/dev/null && command -v service >/dev/null; then service orthanc stop >/dev/null 2>&1 || true; fi

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup
	$(BIN)/dltta demo

numbers: demo
	$(BIN)/python docs/figures/demo.py runs/demo/oct

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	! grep -rlE '<(script|link|img|iframe)[^>]+(src|href)="(https?:)?//' site --include='*.html'   # nothing from the network

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

# What users get is tested, not the checkout: the wheel is made from the sdist and installed where nothing of ours is.
EMPTY := $(VENV)-wheel
dist: setup
	rm -rf dist $(EMPTY)
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd $(EMPTY) && bin/dltta --version && bin/dltta help start >/dev/null && bin/dltta demo --quick -o demo
	test -s $(EMPTY)/demo/oct-quick/report.html
	rm -rf $(EMPTY)

bench-speed: setup
	$(BIN)/python benchmarks/speed.py --compile oct color
	$(BIN)/python benchmarks/tensors.py

bench-adapt: setup
	$(BIN)/python benchmarks/adapt.py

bench-harm: setup
	$(BIN)/python benchmarks/harm.py

bench-instance: setup
	$(BIN)/python benchmarks/instance_norm.py

bench-real: setup
	$(BIN)/python benchmarks/real.py $(SITES)  # goes on where it was stopped

bench-serve: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[serve]"
	$(BIN)/python benchmarks/serve.py --scratch runs/bench-serve  # goes on where it was stopped

bench-grid: setup
	$(BIN)/python benchmarks/grid.py

clean:
	rm -rf $(VENV) $(EXTRAS) $(EMPTY) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

# Each target makes its environment by itself; needs Python >= 3.11 and make.
VENV ?= .venv
JOBS ?= 2
ready := $(VENV)/.ready
# This checkout, whatever else is installed in VENV.
run := PYTHONPATH="$(CURDIR)" PATH="$(abspath $(VENV))/bin:$$PATH"

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1:	/p' $(MAKEFILE_LIST) | expand -t 9
	@echo "VENV=$(VENV): where the environment is, or is made"

tour: $(ready)  ## train and compare MoE language models on real text; leaves tour.html
	@$(run) moe-lab tour

test: $(ready)  ## all tests: package, notebooks, site (TESTS="..." for some)
	@$(run) OMP_NUM_THREADS=1 pytest -n $(JOBS) $(TESTS)

lab: $(ready)  ## JupyterLab on the notebooks
	@$(run) jupyter lab nbs $(if $(filter 0,$(shell id -u)),--allow-root)

docs: $(ready)  ## the site, in _docs/
	@$(run) python .ci/site.py

lock: $(ready)  ## write the versions of this environment to .ci/lock.txt
	@$(run) python -m pip freeze --exclude-editable | sed 's/^\(torch==[^+]*\)+.*/\1/' | grep -v '^nvidia-' > .ci/lock.txt

$(ready): pyproject.toml .ci/lock.txt .ci/install
	@echo "installing into $(VENV), once (minutes) ..."
	@.ci/install "$(VENV)"
	@touch $@

.PHONY: help tour test lab docs lock

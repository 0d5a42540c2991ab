# The two commands of the README are `make demo` and `make test`; both set up what they need.
PYTHON := .venv/bin/python
PORT ?= 3000
UI ?= 1
SECONDS ?= 60
# Tests that use the local BigQuery start it themselves, and wait for it, so that two cores carry
# three workers.
WORKERS ?= 3
export GRPC_VERBOSITY ?= NONE

.PHONY: setup demo demo-debezium test soak check docs bench test-gcp format constraints clean

setup:
	@tools/setup.sh

demo: setup ## A week of flights and bookings in a local BigQuery, then Dagster on port 3000 (UI=0: without)
	@$(PYTHON) -m flights.demo --port $(PORT) $(if $(filter 0,$(UI)),--no-ui)

# Its parts in front of the library are those of the tests.
demo-debezium: setup ## PostgreSQL, Debezium and Kafka into a local BigQuery (UI=0: without the page; SECONDS=60)
	@PYTHONPATH=tests $(PYTHON) tools/demo_debezium.py --port $(PORT) --seconds $(SECONDS) \
		$(if $(filter 0,$(UI)),--no-ui)

test: setup ## Every test that needs no cloud account
	@tools/browser.sh
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: setup ## Style, types and the floors of the house
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports --no-cache

format: setup
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

soak: setup ## The long proofs at full counts; writes tests/SOAK.md
	SOAK=1 SOAK_REQUESTS=20000 $(PYTHON) -m pytest tests/soak tests/daemon \
		tests/local/test_kills.py tests/local/test_cdc_kills.py tests/local/test_cdc_chain_source.py \
		tests/local/test_cdc_chain_tables.py tests/local/test_termination.py tests/local/test_every_type.py \
		tests/local/test_io_manager_grid.py

bench: setup ## Ratios measured in one run, printed
	$(PYTHON) -m benchmarks

docs: setup ## The site, into site/ (open site/index.html); a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet
	@echo "Built site/index.html. Its search needs a server: python3 -m http.server -d site"

test-gcp: setup ## tests/local and tests/gcp on a real project; CONTRIBUTING.md says how
	@test -n "$$BQ_TEST_PROJECT" -a -n "$$BQ_TEST_DATASET" -a -n "$$BQ_TEST_BUCKET" || \
		{ echo "Set BQ_TEST_PROJECT, BQ_TEST_DATASET and BQ_TEST_BUCKET: see CONTRIBUTING.md."; exit 1; }
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadfile tests/local tests/gcp

constraints: setup ## Choose the pinned versions anew
	uv pip compile -q --universal --python-version 3.13 --no-annotate --no-header \
		--all-extras --group dev pyproject.toml -o constraints.txt

clean:
	rm -rf .venv .uv .demo site

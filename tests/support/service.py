"""Whether the tests run on a real project, and where there."""

import os

# A project, what the names of the tests' datasets begin with, and a bucket in their location.
NEEDED = ("BQ_TEST_PROJECT", "BQ_TEST_DATASET", "BQ_TEST_BUCKET")
ON_SERVICE = all(os.environ.get(name) for name in NEEDED)
BUCKET = os.environ["BQ_TEST_BUCKET"] if ON_SERVICE else "staging"
PREFIX = os.environ["BQ_TEST_DATASET"] if ON_SERVICE else "test"

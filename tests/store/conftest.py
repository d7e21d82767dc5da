"""The contract's asserts speak as those of a test module do."""

import pytest

pytest.register_assert_rewrite("foreword.conformance")

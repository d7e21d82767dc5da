"""Make pytest rewrite the asserts of the conformance suites, so failures show values."""

import pytest

pytest.register_assert_rewrite("foreword.conformance")

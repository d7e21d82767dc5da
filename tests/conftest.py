"""For all tests: hypothesis asserts no times, as no test here does; a loaded machine is not a defect."""

from hypothesis import settings

settings.register_profile("foreword", deadline=None)
settings.load_profile("foreword")

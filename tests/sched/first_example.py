"""A pytest plugin: a failing example of hypothesis is reported as found.  Seeded bugs need not be made small."""

from hypothesis import Phase, settings

settings.register_profile("first_example", phases=[Phase.explicit, Phase.generate], database=None)
settings.load_profile("first_example")

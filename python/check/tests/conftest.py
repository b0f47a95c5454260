"""The plugin under test runs suites of its own (pytester)."""

pytest_plugins = ["pytester"]

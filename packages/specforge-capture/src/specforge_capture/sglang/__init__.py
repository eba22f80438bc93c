"""The `sglang` target backend: the one place that imports SGLang, in the modules that need it."""

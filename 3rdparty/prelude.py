"""What the BUILD files of the packages have in common (pants.toml names this file)."""


def specforge_sources():
    """The modules of a package, and what else lies beside them and ships in its wheel."""
    python_sources(sources=["**/*.py"])
    resources(name="resources", sources=["**/*", "!**/*.py", "!**/BUILD"])


def specforge_distribution(name):
    """The wheel and the sdist of packages/specforge-<name>, built as its pyproject.toml says."""
    resources(name="metadata", sources=["pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"])
    package = f"packages/specforge-{name}/src/specforge_{name}"
    python_distribution(
        name="dist",
        dependencies=[":metadata", package, f"{package}:resources"],
        provides=python_artifact(name=f"specforge-{name}"),
        generate_setup=False,
        wheel=True,
        sdist=True,
    )


def specforge_tests(skip_tests=True):
    """Tests and their helpers. Those that need torch are skipped here: `make test` runs them all."""
    # One tag: one pytest process for all of them.
    python_tests(sources=["**/test_*.py"], skip_tests=skip_tests, batch_compatibility_tag="package")
    python_test_utils(name="utils", sources=["**/*.py", "!**/test_*.py"])
    resources(name="data", sources=["**/*", "!**/*.py", "!**/BUILD"])

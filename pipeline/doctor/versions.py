"""Checks of versions: Python, Java, the packages that tasks import, and the optional dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from pipeline.core.extras import EXTRAS
from pipeline.doctor.checks import FAILED, OK, WARNING, Check, group_by_value, shorten_names
from pipeline.doctor.facts import LIBJPEG, ProcessFacts

OLDEST_JAVA = 17
SAME = "give all machines the same packages by PYSPARK_PYTHON or --archives"
# The effect of different versions in one run.
WHY_SAME = {
    "numpy": "may round numbers differently",
    "scipy": "may round numbers differently",
    "pyarrow": "may write different bytes",
    "pillow": "may decode images to different pixels",
    LIBJPEG: "may decode images to different pixels",
}


def check_versions(facts: Sequence[ProcessFacts]) -> list[Check]:
    """Return the checks of Python, Java and packages. facts: the driver's first, then the executors'."""
    return [check_python(facts), check_java(facts), check_spark(facts), *check_packages(facts)]


def check_python(facts: Sequence[ProcessFacts]) -> Check:
    """Return the check of Python: failed if an executor has another minor version than the driver, which Spark
    refuses."""
    text = group_by_value([(each.where, each.python) for each in facts])
    if len({each.python.rpartition(".")[0] for each in facts}) > 1:
        return Check(
            "python", FAILED, text, "set the same Python for driver and executors by PYSPARK_PYTHON or --archives"
        )
    return Check("python", OK, text)


def check_java(facts: Sequence[ProcessFacts]) -> Check:
    """Return the check of Java: failed if the driver has none, or if any machine's is too old for Spark.

    Executors whose version is unknown are ignored. facts: the driver's first, then the executors'."""
    versions = [(each.where, each.java) for each in facts if each.java]
    # Executors run in a JVM, so only the driver can lack Java.
    if not facts[0].java:
        return Check(
            "java",
            FAILED,
            "no program java",
            f"install Java {OLDEST_JAVA} or newer, or set JAVA_HOME to such a version",
        )
    old = [where for where, version in versions if major_version(version) < OLDEST_JAVA]
    if old:
        return Check(
            "java", FAILED, group_by_value(versions), f"Spark needs Java {OLDEST_JAVA} or newer on {shorten_names(old)}"
        )
    return Check("java", OK, group_by_value(versions))


def major_version(version: str) -> int:
    """Return the major version of a Java: 8 of "1.8.0_392", 17 of "17.0.9"."""
    first, _, rest = version.partition(".")
    number = rest.partition(".")[0] if first == "1" else first.partition("-")[0]
    return int(number) if number.isdigit() else 0


def check_spark(facts: Sequence[ProcessFacts]) -> Check:
    """Return the check of Spark: failed if driver and executors have different versions, whose classes may be
    incompatible."""
    text = group_by_value([(each.where, each.packages.get("pyspark") or "none") for each in facts])
    if len({each.packages.get("pyspark") for each in facts}) > 1:
        return Check(
            "spark", FAILED, text, "install the driver's release of Spark on the cluster, or pip's of the cluster"
        )
    return Check("spark", OK, text)


def check_packages(facts: Sequence[ProcessFacts]) -> list[Check]:
    """Return the checks of packages: one failed for each package that is missing somewhere, and one warning for each
    whose versions differ, if that can change the result. Without problems, return one check that passed."""
    names = [name for name in dict.fromkeys(name for each in facts for name in each.packages) if name != "pyspark"]
    problems = []
    for name in names:
        values = [(each.where, each.packages.get(name) or "missing") for each in facts]
        if lacking := [where for where, version in values if version == "missing"]:
            problems.append(Check(name, FAILED, f"missing on {shorten_names(lacking)}", SAME))
        elif len({version for _, version in values}) > 1 and name in WHY_SAME:
            problems.append(Check(name, WARNING, f"{group_by_value(values)}: these versions {WHY_SAME[name]}", SAME))
    summary = ", ".join(f"{name} {facts[0].packages[name]}" for name in WHY_SAME if facts[0].packages.get(name))
    return problems or [Check("packages", OK, summary)]


def missing_extras() -> dict[str, list[str]]:
    """Return the modules that are not installed, by the extra of pyproject.toml that installs them."""
    missing = {extra: [name for name in modules if find_spec(name) is None] for extra, modules in EXTRAS.items()}
    return {extra: modules for extra, modules in missing.items() if modules}


def check_extras(missing: Mapping[str, Sequence[str]]) -> Check:
    """Return the check of optional dependencies: a warning if some are not installed. missing: their modules, by
    extra."""
    if not missing:
        return Check("extras", OK, ", ".join(EXTRAS))
    text = "; ".join(f"{extra} lacks {', '.join(modules)}" for extra, modules in missing.items())
    return Check("extras", WARNING, text, f"if needed: pip install '.[{next(iter(missing))}]' in the checkout")
